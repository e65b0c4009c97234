"""Training steps of :mod:`benchmarks.gpu_check`: small enough for one GPU of 16 GB, and tiny ones for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CASES", "Case", "Choices", "Run", "collecting"]

Optimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true"]


class Choices(TorchDispatchMode):
    """Notes in which types products run and which attention kernels are called."""

    def __init__(self) -> None:
        super().__init__()
        self.product_types: set[str] = set()
        self.attention: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note it."""
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "bmm", "baddbmm", "convolution"):
            self.product_types.add(str(args[-1 if name == "mm" else 1].dtype).removeprefix("torch."))
        elif name.startswith("_scaled_dot_product_") and name.endswith("_attention"):
            self.attention.add(name.removeprefix("_scaled_dot_product_").removesuffix("_attention"))
        return func(*args, **(kwargs or {}))


collecting: list[Choices] = []
"""Where a step notes its choices; empty while memory is measured."""


class Run(pl.LightningModule):
    """A module with a loss and an optimizer.

    Args:
        module: What is trained.
        loss: Callable from module and batch.
        optimizer: Callable from parameters.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor], optimizer: Optimizer
    ) -> None:
        super().__init__()
        self.module, self._loss, self._optimizer = module, loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        with collecting[-1] if collecting else nullcontext():
            return self._loss(self.module, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self._optimizer(self.parameters())


@dataclass(frozen=True)
class Case:
    """One training step.

    Args:
        name: Short name.
        module: Builds the module; the argument tells whether it has to be tiny.
        batch: Builds a batch on the host, likewise.
        loss: Callable from module and batch.
        precision: Lightning's name.
        optimizer: Callable from parameters.
        verdict: Whether the predicted minimum is checked by runs on limited memory.
    """

    name: str
    module: Callable[[bool], nn.Module]
    batch: Callable[[bool], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    precision: Precision
    optimizer: Optimizer
    verdict: bool = False

    def precision_on(self, accelerator: str) -> Precision:
        """Return the precision; Lightning trains in bfloat16 on a CPU where float16 is asked for."""
        return "bf16-mixed" if accelerator == "cpu" and self.precision == "16-mixed" else self.precision

    def run(self, tiny: bool) -> Run:
        """Build the LightningModule."""
        return Run(self.module(tiny), self.loss, self.optimizer)


# -- models --------------------------------------------------------------------------------------------


def _torchvision(name: str, tiny_name: str) -> Callable[[bool], nn.Module]:
    def build(tiny: bool) -> nn.Module:
        import torchvision

        model = getattr(torchvision.models, tiny_name if tiny else name)
        return model(num_classes=10 if tiny else 1000)  # type: ignore[no-any-return]

    return build


def _vit(tiny: bool) -> nn.Module:
    import timm

    name = f"vit_{'tiny' if tiny else 'base'}_patch16_224"
    return timm.create_model(name, num_classes=1000, img_size=64 if tiny else 224)  # type: ignore[no-any-return]


def _text(kind: str, *, checkpoint: bool = False, **config: Any) -> Callable[[bool], nn.Module]:
    def build(tiny: bool) -> nn.Module:
        import transformers

        head = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}[kind]
        layers, heads, hidden = (2, 4, 64) if tiny else (12, 12, 768)
        sizes: dict[str, Any] = {
            "vocab_size": 1000 if tiny else 32000, "num_hidden_layers": layers, "num_attention_heads": heads,
            "hidden_size": hidden, "use_cache": False, **config,
        }  # fmt: skip
        if kind != "GPT2":
            sizes["intermediate_size"] = 4 * hidden
        model: nn.Module = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**sizes))
        if checkpoint:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model.train()

    return build


class _Lstm(nn.Module):
    """An LSTM over a sequence of features, and a classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, 64)`` to logits ``(batch, 1000)``."""
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


# -- batches and losses --------------------------------------------------------------------------------


def _pictures(batch: int) -> Callable[[bool], Any]:
    def build(tiny: bool) -> Any:
        count, side = (2, 64) if tiny else (batch, 224)
        return torch.randn(count, 3, side, side), torch.zeros(count).long()

    return build


def _tokens(batch: int, length: int) -> Callable[[bool], Any]:
    def build(tiny: bool) -> dict[str, Tensor]:
        ids = torch.randint(0, 1000, (2, 32) if tiny else (batch, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return build


def _sequences(tiny: bool) -> Any:
    batch = 4 if tiny else 256
    return torch.randn(batch, 16 if tiny else 256, 64), torch.zeros(batch).long()


def _classification(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def _language(module: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = module(**batch).loss
    return loss


# -- optimizers ----------------------------------------------------------------------------------------


def _adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _adamw_8bit(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)  # type: ignore[no-any-return]


_resnet = _torchvision("resnet50", "resnet18")
_mobilenet = _torchvision("mobilenet_v2", "mobilenet_v3_small")
_gpt, _gpt_checkpointed = _text("GPT2"), _text("GPT2", checkpoint=True)
_llama, _bert = _text("Llama", num_key_value_heads=2), _text("Bert")

CASES: tuple[Case, ...] = (
    Case("resnet50-fp32-sgd", _resnet, _pictures(64), _classification, "32-true", _sgd, True),
    Case("resnet50-fp16-adamw", _resnet, _pictures(64), _classification, "16-mixed", _adamw),
    Case("mobilenetv2-fp32-sgd", _mobilenet, _pictures(64), _classification, "32-true", _sgd),
    Case("vit-bf16-adamw", _vit, _pictures(64), _classification, "bf16-mixed", _adamw),
    Case("gpt2-fp32-adamw", _gpt, _tokens(8, 512), _language, "32-true", _adamw),
    Case("gpt2-bf16-adamw", _gpt, _tokens(8, 512), _language, "bf16-mixed", _adamw, True),
    Case("gpt2-bf16-checkpointed", _gpt_checkpointed, _tokens(8, 512), _language, "bf16-mixed", _adamw),
    Case("llama-gqa-bf16-true-sgd", _llama, _tokens(8, 1024), _language, "bf16-true", _sgd, True),
    Case("llama-gqa-bf16-adamw", _llama, _tokens(8, 1024), _language, "bf16-mixed", _adamw),
    Case("llama-gqa-bf16-adamw8bit", _llama, _tokens(8, 1024), _language, "bf16-mixed", _adamw_8bit),
    Case("bert-fp16-adamw", _bert, _tokens(16, 512), _language, "16-mixed", _adamw),
    Case("lstm-fp32-adamw", lambda tiny: _Lstm(32 if tiny else 1024), _sequences, _classification, "32-true", _adamw),
)  # fmt: skip
