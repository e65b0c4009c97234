"""torchmetrics inside a traced step: run where they can be, left out and named where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_memprec._errors import MemPrecError
from lightning_memprec.memory.result import Assumption

__all__ = ["tolerate_metrics"]


def tolerate_metrics(module: nn.Module, note: Callable[[Assumption], None]) -> None:
    """Let metrics whose update depends on values be skipped instead of ending the trace.

    Metrics check their inputs' values and count classes; what they hold is small beside a training step, so a
    metric that cannot be traced is left out, and ``note`` is told.

    Args:
        module: Copy of the user's module; its metrics are wrapped in place.
        note: Called once for each metric that was left out.
    """
    for name, child in module.named_modules():
        if any(base.__module__ == "torchmetrics.metric" for base in type(child).__mro__):
            running: list[str] = []
            for method in ("forward", "update", "compute"):
                setattr(
                    child,
                    method,
                    _skipping(getattr(child, method), name, type(child).__name__, note, running),
                )


def _skipping(
    method: Callable[..., Any],
    name: str,
    type_name: str,
    note: Callable[[Assumption], None],
    running: list[str],
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if running:  # `forward` calls the others: it is left out whole, or not at all.
            return method(*args, **kwargs)
        running.append(name)
        try:
            return method(*args, **kwargs)
        except (MemPrecError, NotImplementedError, RuntimeError, ValueError, AssertionError):
            note(
                Assumption(
                    f"metric_left_out:{name}",
                    f"The metric `{name}` ({type_name}) depends on values: its memory is left out.",
                    "torchmetrics",
                )
            )
            return torch.zeros(())
        finally:
            running.clear()

    return call
