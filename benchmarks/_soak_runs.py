"""Random training runs for ``benchmarks/soak.py``: a drawn model with everything around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import _soak_models, _soak_sequences
from benchmarks._soak_draw import Draw
from tests.memory.zoo.case import Case, OptimizerFactory

__all__ = ["draw_run"]

_FAMILIES = {**_soak_models.FAMILIES, **_soak_sequences.FAMILIES}
_Loss = Callable[[Tensor, Tensor], Tensor]

_ON_CLASSES: dict[str, _Loss] = {
    "cross_entropy": functional.cross_entropy,
    "label_smoothing": partial(functional.cross_entropy, label_smoothing=0.1),
    "nll": lambda y, t: functional.nll_loss(functional.log_softmax(y, -1), t),
    "sum over classes": lambda y, t: functional.cross_entropy(y, t, reduction="none").sum() / len(t),
    "float32 logits": lambda y, t: functional.cross_entropy(y.float(), t),
    "focal": lambda y, t: (
        (1 - y.softmax(-1).gather(1, t[:, None])[:, 0]) ** 2
        * functional.cross_entropy(y, t, reduction="none")
    ).mean(),
    "one hot": lambda y, t: functional.binary_cross_entropy_with_logits(
        y, functional.one_hot(t, y.size(-1)).to(y.dtype)
    ),
}
_ON_TENSORS: dict[str, _Loss] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth_l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "log_cosh": lambda y, t: (y - t).cosh().log().mean(),
    "cosine": lambda y, t: 1 - functional.cosine_similarity(y, t, dim=-1).mean(),
    "root mean square": lambda y, t: (y - t).pow(2).mean().sqrt(),
    "bce": lambda y, t: functional.binary_cross_entropy_with_logits(y, t.sigmoid()),
    "kl": lambda y, t: functional.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
}

_Options = dict[str, list[Any]]
_FOREACH: _Options = {"foreach": [None, None, True, False]}
_OPTIMIZERS: dict[str, _Options] = {
    "SGD": {"momentum": [0.0, 0.9], "weight_decay": [0.0, 0.1], "maximize": [False, False, True], **_FOREACH},
    "Adam": {"amsgrad": [False, True], "weight_decay": [0.0, 0.1], **_FOREACH},
    "AdamW": {"amsgrad": [False, True], **_FOREACH},
    "NAdam": {"decoupled_weight_decay": [False, True], **_FOREACH},
    "RAdam": {"weight_decay": [0.0, 0.1], **_FOREACH},
    "Adamax": {"weight_decay": [0.0, 0.1], **_FOREACH},
    "Adagrad": {"weight_decay": [0.0, 0.1], **_FOREACH},
    "Adadelta": {"weight_decay": [0.0, 0.1], **_FOREACH},
    "RMSprop": {"momentum": [0.0, 0.9], "centered": [False, True], **_FOREACH},
    "ASGD": {"weight_decay": [0.0, 0.1], **_FOREACH},
    "Rprop": {**_FOREACH},
    "Adafactor": {"beta2_decay": [-0.8], **_FOREACH},
    # Its `foreach` is deprecated.
    "optimi.AdamW": {"foreach": [False]},
    "optimi.Lion": {"foreach": [False]},
    "optimi.StableAdamW": {"foreach": [False]},
}
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


class _Loop(pl.LightningModule):
    """A model, its loss and optimizer, in a training step that logs; by hand where ``manual``."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        factory: OptimizerFactory,
        manual: bool,
    ) -> None:
        super().__init__()
        self.model, self.loss, self.factory = model, loss, factory
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(self.model, batch)
        self.log("loss", loss, batch_size=1)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.factory(self.parameters())


def _optimizer(draw: Draw, fused: bool) -> OptimizerFactory:
    name = draw.pick("optimizer", list(_OPTIMIZERS))
    options = {key: draw.pick(key, values) for key, values in _OPTIMIZERS[name].items()}
    if fused and name in _FUSED and options["foreach"] is None:
        options["fused"] = draw.pick("fused", [False, True])

    def factory(parameters: Any) -> torch.optim.Optimizer:
        home: Any = torch.optim
        if name.startswith("optimi."):
            import optimi as home
        return getattr(home, name.removeprefix("optimi."))(parameters, lr=1e-3, **options)  # type: ignore[no-any-return]

    return factory


def _freeze(module: nn.Module, share: float) -> None:
    """Freeze the first parameters, as in fine-tuning."""
    parameters = list(module.parameters())
    for parameter in parameters[: int(share * len(parameters))]:
        parameter.requires_grad = False


def _targets(module: nn.Module, inputs: Any, classes: bool) -> Tensor:
    """Targets of the shape that the module's output has."""
    with torch.no_grad():
        output = module.eval()(inputs)
    return torch.randint(output.size(-1), output.shape[:-1]) if classes else torch.randn(output.shape)


def draw_run(seed: int) -> tuple[Case, dict[str, Any]]:
    """Draw a training run.

    Args:
        seed: The same seed draws the same run.

    Returns:
        The run, and what was drawn by name.
    """
    draw = Draw(seed)
    family = draw.pick("family", list(_FAMILIES))
    drawn = _FAMILIES[family](draw)
    losses = _ON_CLASSES if drawn.classes else _ON_TENSORS
    loss_name = "own" if drawn.own_loss else draw.pick("loss", list(losses))
    # Reentrant checkpoints need an input that asks for a gradient, which frozen embeddings do not give.
    reentrant = draw.chosen.get("checkpointing") == "reentrant"
    frozen = draw.pick("frozen", [0.0] if reentrant else [0.0, 0.0, 0.0, 0.3, 0.7])
    precision = draw.pick("precision", ["32-true", "32-true", "bf16-mixed", "bf16-true"])
    loop = draw.pick("loop", ["plain", "plain", "Trainer", "manual optimization"])
    by_hand = loop.startswith("manual")
    clip = None if by_hand else draw.pick("clip", [None, None, 1.0])
    # Lightning refuses to clip under mixed precision what a fused optimizer unscales itself.
    factory = _optimizer(draw, fused=clip is None or not precision.endswith("mixed"))

    def loss(module: nn.Module, batch: Any) -> Tensor:
        if drawn.own_loss:
            output = module(**batch) if isinstance(batch, dict) else module(batch)
            return output if isinstance(output, Tensor) else output.loss
        inputs, targets = batch
        output = module(inputs)
        if drawn.classes:
            return losses[loss_name](output.flatten(0, -2), targets.flatten())
        return losses[loss_name](output, targets)

    def build() -> tuple[nn.Module, Any]:
        module, inputs = drawn.build()
        batch = inputs if drawn.own_loss else (inputs, _targets(module, inputs, drawn.classes))
        _freeze(module, frozen)
        return (module if loop == "plain" else _Loop(module, loss, factory, by_hand)), batch

    case = Case(
        name=str(seed), family="mlp", build=build, precision=precision,
        loss=loss if loop == "plain" else None, # `estimate_memory` gives an optimizer the parameters that are trained.
        optimizer=(lambda ps: factory([p for p in ps if p.requires_grad])) if loop == "plain" else None,
        accumulate=1 if by_hand else draw.pick("accumulate", [1, 1, 2]),
        clip=clip, clip_algorithm="norm" if clip is None else draw.pick("clip_algorithm", ["norm", "value"]),
    )  # fmt: skip
    return case, draw.chosen
