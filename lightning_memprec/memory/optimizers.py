"""Optimizers inside a trace: what ``configure_optimizers`` returned, and steps that ask for values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_memprec._errors import TraceError
from lightning_memprec.memory.trace import Recorder

__all__ = ["configured_optimizers", "state_tensors", "steppable"]


def configured_optimizers(configured: Any) -> list[Optimizer]:
    """Return the optimizers in what a LightningModule's ``configure_optimizers`` returned.

    Args:
        configured: ``None``, an optimizer, a dictionary with the key ``"optimizer"``, a sequence of these, or
            a pair of a list of optimizers and a list of schedulers.

    Raises:
        TraceError: If it is none of these.
    """
    if configured is None:
        return []
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return configured_optimizers(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        is_pair = len(configured) == 2 and isinstance(configured[0], (list, tuple))
        items = configured[0] if is_pair else configured
        return [optimizer for item in items for optimizer in configured_optimizers(item)]
    raise TraceError(
        f"`configure_optimizers` returned a `{type(configured).__name__}`. "
        "Return an optimizer, a list of them, or a dictionary with the key 'optimizer'."
    )


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[Any, Tensor]]:
    """Yield ``(parameter, tensor)`` for every tensor in an optimizer's state, containers included."""
    for parameter, state in optimizer.state.items():
        for tensor in _tensors_in(state):
            yield parameter, tensor


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


class _NoEarlyExit(TorchFunctionMode):
    """Answers the comparisons in LBFGS so that it takes every iteration and keeps its whole history.

    ``torch.optim.LBFGS`` leaves its loop when a norm is *at most* a tolerance or a directional derivative is
    *above* a negative one, and extends its history when a curvature is *above* a positive one. On a step that
    makes progress the former are false and the latter true, which is also what needs most memory.
    """

    paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.paused and args and isinstance(args[0], Tensor) and args[0].numel() == 1:
            name = getattr(func, "__name__", "")
            if name in ("gt", "__gt__"):
                return isinstance(args[1], (int, float)) and args[1] > 0
            if name in ("lt", "le", "ge", "__lt__", "__le__", "__ge__"):
                return False
        return func(*args, **(kwargs or {}))


@contextmanager
def steppable(
    optimizer: Optimizer, closure: Callable[[], Any] | None, recorder: Recorder
) -> Iterator[Callable[[], Any] | None]:
    """Make an optimizer's step traceable where its control flow depends on values; yield the closure to pass."""
    if not isinstance(optimizer, torch.optim.LBFGS) or closure is None:
        yield closure
        return
    branches = _NoEarlyExit()
    answer, recorder.on_unknown = recorder.on_unknown, lambda tensor: float("nan")

    def evaluate() -> Any:
        branches.paused, assumed, recorder.on_unknown = True, recorder.on_unknown, answer
        try:
            return closure()
        finally:
            branches.paused, recorder.on_unknown = False, assumed

    try:
        with branches:
            yield evaluate
    finally:
        recorder.on_unknown = answer


