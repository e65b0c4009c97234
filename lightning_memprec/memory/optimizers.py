"""Optimizers inside a trace: what ``configure_optimizers`` returned, and steps that ask for values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memprec._errors import TraceError
from lightning_memprec.memory.result import Assumption
from lightning_memprec.memory.trace import Recorder
from lightning_memprec.memory.tree import tensors_in

__all__ = ["configured_optimizers", "configured_schedulers", "state_tensors", "steppable"]


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
    # As in Lightning, an optimizer is what looks like one.
    if hasattr(configured, "step") and hasattr(configured, "param_groups"):
        return [configured]
    if isinstance(configured, Mapping):
        return configured_optimizers(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        items = configured[0] if _is_pair(configured) else configured
        return [optimizer for item in items for optimizer in configured_optimizers(item)]
    raise TraceError(
        f"`configure_optimizers` returned a `{type(configured).__name__}`. "
        "Return an optimizer, a list of them, or a dictionary with the key 'optimizer'."
    )


def configured_schedulers(configured: Any) -> list[Any]:
    """Return the learning-rate schedulers in what ``configure_optimizers`` returned, in its order.

    Args:
        configured: As for :func:`configured_optimizers`.
    """
    if isinstance(configured, Mapping):
        given = configured.get("lr_scheduler", configured.get("scheduler"))
        if given is None or not isinstance(given, Mapping):
            return [] if given is None else [given]
        return configured_schedulers(given)
    if isinstance(configured, (list, tuple)):
        if _is_pair(configured):
            # Bare schedulers, or dictionaries that hold one.
            entries = (item if isinstance(item, Mapping) else {"scheduler": item} for item in configured[1])
            return [scheduler for entry in entries for scheduler in configured_schedulers(entry)]
        return [scheduler for item in configured for scheduler in configured_schedulers(item)]
    return []


def _is_pair(configured: Any) -> bool:
    return len(configured) == 2 and isinstance(configured[0], (list, tuple))


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[Any, Tensor]]:
    """Yield ``(parameter, tensor)`` for every tensor in an optimizer's state, containers included."""
    for parameter, state in optimizer.state.items():
        for tensor in tensors_in(state):
            yield parameter, tensor


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


class _NumbersForOperators(TorchFunctionMode):
    """Reads a tensor where a custom operator takes a number, as torch does by itself for tensors with storage.

    bitsandbytes' LAMB and LARS hand a parameter's norm to their operator so.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, OpOverloadPacket):
            wanted = func.default._schema.arguments
            args = tuple(
                value.item()
                if isinstance(value, Tensor) and isinstance(argument.type, torch.FloatType)
                else value
                for value, argument in zip(args, wanted, strict=False)  # Defaults are left out.
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _bitsandbytes(recorder: Recorder, note: Callable[[Assumption], None]) -> Iterator[None]:
    """Make bitsandbytes' steps traceable.

    Paged states are left out of the device: they live in unified memory, and need a driver to be made.
    """
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is None:
        yield
        return
    names = ("get_paged", "fill", "prefetch_tensor", "optimizer_update_32bit")
    originals = {name: getattr(functional, name) for name in names}

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        note(
            Assumption(
                "paged_states",
                "Paged optimizer states lie in unified memory: none of them is counted on the device, where the "
                "driver keeps what has room.",
                "bitsandbytes/functional.py, get_paged",
            )
        )
        with _disable_current_modes():  # Unseen by the recorder.
            state = torch.empty(shape, dtype=dtype, device="meta")
        return recorder.exclude(state)

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Contents and pages are no concern of a trace."""

    def update(*args: Any, **kwargs: Any) -> Any:
        with _NumbersForOperators():
            return originals["optimizer_update_32bit"](*args, **kwargs)

    functional.__dict__.update(
        get_paged=get_paged, fill=nothing, prefetch_tensor=nothing, optimizer_update_32bit=update
    )
    try:
        yield
    finally:
        functional.__dict__.update(originals)


@contextmanager
def steppable(
    optimizer: Optimizer,
    closure: Callable[[], Any] | None,
    recorder: Recorder,
    note: Callable[[Assumption], None],
) -> Iterator[Callable[[], Any] | None]:
    """Make an optimizer's step traceable where it reads values; yield the closure to pass to it.

    Norms and losses that an optimizer reads scale its step; they do not decide what it allocates. Inside the
    step, but not inside the closure, unknown numbers are taken to be 1 (for LBFGS not-a-number, which no
    tolerance test stops at) and unknown conditions not to hold.

    Args:
        optimizer: The optimizer about to be stepped.
        closure: What it will call, if it is given a closure.
        recorder: Recorder of the trace.
        note: Told when a value was assumed.
    """
    is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
    branches = _NoEarlyExit()
    branches.paused = not is_lbfgs
    unknown = recorder.on_unknown

    def assume(tensor: Tensor) -> Any:
        note(
            Assumption(
                "optimizer_values",
                f"`{type(optimizer).__name__}` reads norms or losses while it steps: ordinary values were assumed.",
                "traced",
            )
        )
        if tensor.dtype is torch.bool:
            # Optimizers ask for what is out of the ordinary: `norm == 0`, `isnan`, `norm > limit`.
            return False
        return tensor.new_full((), float("nan") if is_lbfgs else 1.0, device="cpu").item()

    def evaluate() -> Any:
        branches.paused, recorder.on_unknown = True, unknown
        try:
            return closure() if closure is not None else None
        finally:
            branches.paused, recorder.on_unknown = not is_lbfgs, assume

    recorder.on_unknown = assume
    try:
        with branches if is_lbfgs else nullcontext(), _bitsandbytes(recorder, note):
            yield evaluate if closure is not None else None
    finally:
        recorder.on_unknown = unknown
