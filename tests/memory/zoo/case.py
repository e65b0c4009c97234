"""What one training step of the zoo is: a module, its batch and everything around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Case", "Family", "OptimizerFactory", "adamw", "cross_entropy", "model_loss"]

Family = Literal["convolution", "transformer", "mlp", "recurrent"]
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]

adamw: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-4)


def model_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a `transformers` model computes itself."""
    return module(**batch).loss


def cross_entropy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a classifier, whose classes are its output's last dimension."""
    inputs, labels = batch
    logits = module(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step.

    Args:
        name: Unique, short.
        family: Which accuracy goal applies.
        build: Returns module and batch, randomly initialized.
        loss: ``(module, batch) -> scalar``; ``None`` for a LightningModule's own ``training_step``.
        optimizer: From parameters to an optimizer; ``None`` for ``configure_optimizers``.
        precision: Lightning's name.
        accumulate: Micro-batches per optimizer step.
        clip: Threshold of gradient clipping.
        clip_algorithm: ``"norm"`` or ``"value"``.
    """

    name: str
    family: Family
    build: Callable[[], tuple[nn.Module, Any]]
    loss: Callable[[nn.Module, Any], Tensor] | None = cross_entropy
    optimizer: OptimizerFactory | None = adamw
    precision: str = "32-true"
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: str = "norm"

    def make(self) -> tuple[nn.Module, Any]:
        """Build module and batch from a fixed seed, in training mode."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Model libraries call what other libraries deprecate.
            module, batch = self.build()
        return module.train(), batch
