"""What a short run trains: a module, its loss and its one optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how.

    Args:
        module: Module in FP32; only copies of it are trained.
        optimizer: Callable from parameters to an optimizer; ``None`` uses ``configure_optimizers``.
        loss: Callable ``(module, batch) -> scalar``; ``None`` uses ``training_step``.
        gradient_clip_val: Threshold of gradient clipping; ``None`` clips nothing.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
    """

    module: nn.Module
    optimizer: Callable[[Iterable[Any]], Optimizer] | None = None
    loss: Callable[[nn.Module, Any], Tensor] | None = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"

    def copy_module(self) -> nn.Module:
        """Copy the module; a LightningModule's copy sees the same Trainer, and logs nothing.

        Raises:
            ValueError: If the module cannot be copied.
        """
        trainers = [vars(m)["_trainer"] for m in self.module.modules() if "_trainer" in vars(m)]
        try:
            # What else leads to the Trainer, such as a hook, must not copy it.
            duplicate = copy.deepcopy(self.module, {id(t): t for t in trainers if t is not None})
        except Exception as error:
            raise ValueError(
                f"The module cannot be copied ({error}). Compare a freshly built one."
            ) from error
        for original, part in zip(self.module.modules(), duplicate.modules(), strict=True):
            # A LightningModule leaves its Trainer behind when it is copied.
            if "_trainer" in vars(original):
                vars(part).update(_trainer=vars(original)["_trainer"], log=_ignore, log_dict=_ignore)
        return duplicate

    def build_optimizer(self, module: nn.Module) -> Optimizer:
        """Build the optimizer of a copy. Schedules are left out: they hardly act in a few steps.

        Raises:
            ValueError: If there is not exactly one optimizer, or it needs a closure.
        """
        if self.optimizer is not None:
            configured: Any = self.optimizer([p for p in module.parameters() if p.requires_grad])
        elif hasattr(module, "configure_optimizers"):
            configured = module.configure_optimizers()  # type: ignore[operator]
        else:
            raise ValueError(
                "The module has no `configure_optimizers`. `compare_precisions` takes one by `optimizer=`, "
                "e.g. `torch.optim.Adam`."
            )
        optimizer = _only_optimizer(configured)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            name = type(optimizer).__name__
            raise ValueError(f"`{name}` needs a closure, which a short run does not give. Take another one.")
        return optimizer

    def loss_of(self, module: nn.Module, batch: Any) -> Tensor:
        """Compute the loss of a copy on a batch.

        Raises:
            ValueError: If nothing says what the loss is, or it is no tensor.
        """
        if self.loss is not None:
            loss: Any = self.loss(module, batch)
        else:
            step = getattr(module, "training_step", None)
            if step is None or not getattr(module, "automatic_optimization", True):
                raise ValueError(
                    "The module has no `training_step` with automatic optimization. `compare_precisions` takes a "
                    "loss by `loss=`."
                )
            loss = step(batch, 0) if len(inspect.signature(step).parameters) > 1 else step(batch)
        if isinstance(loss, Mapping):
            loss = loss.get("loss")
        if not isinstance(loss, Tensor):
            raise ValueError(f"The loss must be a tensor, got {loss!r}. Return one.")
        return loss


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _only_optimizer(configured: Any) -> Optimizer:
    if hasattr(configured, "param_groups"):
        return configured  # type: ignore[no-any-return]
    if isinstance(configured, Mapping):
        return _only_optimizer(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)) and configured:
        first = configured[0]
        # One optimizer in a list, or a pair of a list of optimizers and a list of schedulers.
        if len(configured) == 1 or isinstance(first, (list, tuple)):
            return _only_optimizer(first)
    raise ValueError(
        f"A comparison needs one optimizer, got {configured!r}. `compare_precisions` takes one by `optimizer=`, and "
        "the `loss=` to go with it."
    )
