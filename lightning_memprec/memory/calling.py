"""How a module is called with a batch, and what its loss is where nobody says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec._errors import TraceError
from lightning_memprec.memory.tree import tensors_in

__all__ = ["call_with", "default_loss", "takes_index"]


def takes_index(training_step: Callable[..., Any]) -> bool:
    """Tell whether Lightning would pass ``batch_idx`` (``is_param_in_hook_signature(..., min_args=2)``)."""
    parameters = inspect.signature(training_step).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (
        len(positional) >= 2
        or any(p.name == "batch_idx" for p in parameters)
        or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    )


def call_with(module: nn.Module, batch: Any) -> Any:
    """Call a module with a mapping as keywords, a sequence as positional arguments, or one argument."""
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, (list, tuple)):
        return module(*batch)
    return module(batch)


def default_loss(output: Any) -> Tensor:
    """Return an output's ``loss``, else the sum of its differentiable tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floating = [t.sum() for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not floating:
        raise TraceError("The module's output holds no differentiable tensor to train on. Pass `loss=`.")
    return torch.stack(floating).sum() if len(floating) > 1 else floating[0]
