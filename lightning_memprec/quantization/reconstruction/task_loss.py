"""A loss of whatever a model returns: its own if it has one, else one against its own output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_memprec.quantization.reconstruction.recording import first_tensor

__all__ = ["Loss", "task_loss"]

Loss = Callable[[Any], "tuple[str | None, Tensor] | None"]


def task_loss(seed: int = 0) -> Loss:
    """Return a function that makes a scalar of what a model returns.

    * A ``loss`` (an attribute or a key), or a scalar, is taken as it is.
    * ``logits``, or a matrix, are taken for classes: cross-entropy with the likeliest class as the label.
    * Anything else is taken for measurements: half the squared distance to itself with an error of variance 1 added,
      since the gradient of the distance to itself is zero.

    Args:
        seed: Of the errors.

    Returns:
        A function that returns what it had to make do with, or ``None`` if there was a loss, and the scalar.

    Example:
        >>> task_loss()({"loss": torch.tensor(2.0)})
        (None, tensor(2.))
    """
    generator = torch.Generator().manual_seed(seed)

    def loss(result: Any) -> tuple[str | None, Tensor] | None:
        given = _named(result, "loss")
        if given is None and isinstance(result, Tensor) and result.dim() == 0:
            given = result
        if given is not None:
            return None, given.sum()
        logits = _named(result, "logits")
        output = first_tensor(result) if logits is None else logits
        if output is None:
            return None
        if output.dim() > 1 and (logits is not None or output.dim() == 2):
            classes = output.flatten(0, -2)
            return "likeliest classes stand for labels", F.cross_entropy(classes, classes.argmax(1))
        noise = torch.randn(output.shape, generator=generator).to(output)
        distance = (output - (output + noise).detach()).square().sum() / 2
        return "own output stands for labels", distance / max(1, output.shape[0] if output.dim() else 1)

    return loss


def _named(result: Any, name: str) -> Tensor | None:
    found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    return found if isinstance(found, Tensor) else None
