"""What the caching allocator makes of a trace: one replay, and the smallest capacity on which it survives."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memprec.memory.allocator import minimum_capacity, simulate
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.events import MemoryEvents
from lightning_memprec.memory.result import Assumption
from lightning_memprec.memory.steady import with_more_steps

__all__ = ["Reserve", "allocator_reserve"]

_SOURCE = "c10/cuda/CUDACachingAllocator.cpp"


@dataclass(frozen=True)
class Reserve:
    """What the allocator hands out, holds, and cannot do without.

    Attributes:
        peak_allocated_bytes: Largest sum of blocks in use.
        peak_reserved_bytes: Largest sum of segments, without a limit.
        minimum_bytes: Smallest capacity on which the replay does not run out of memory.
        phases: The phases that were replayed, as in :class:`MemoryEvents`.
        changes: ``(event, reserved bytes after it)`` wherever reserved changed; empty if nothing was replayed.
        assumption: How it was found.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    minimum_bytes: int
    assumption: Assumption
    phases: tuple[tuple[str, int, int], ...] = ()
    changes: tuple[tuple[int, int], ...] = ()


def allocator_reserve(events: MemoryEvents, live_bytes: int) -> Reserve:
    """Replay a trace, and some steps more, through the simulated CUDA caching allocator.

    It is set up as the environment says.

    Args:
        events: What a trace recorded.
        live_bytes: Largest sum of live tensors, for allocators that are not simulated.
    """
    events = with_more_steps(events)
    try:
        config = AllocatorConfig.from_environment()
        result = simulate(events, config=config)
        minimum = minimum_capacity(events, config)
    except ValueError as error:
        note = Assumption(
            "allocator", f"The allocator is not simulated, reserved equals live memory: {error}", _SOURCE
        )
        return Reserve(live_bytes, live_bytes, live_bytes, note)
    note = Assumption(
        "allocator",
        "Segments and fragmentation come from a simulation of PyTorch's caching allocator, with the settings of "
        "this process' PYTORCH_ALLOC_CONF, over the traced steps and two repetitions of the last.",
        _SOURCE,
        minimum - live_bytes,
    )
    return Reserve(
        result.peak_allocated_bytes,
        result.peak_reserved_bytes,
        minimum,
        note,
        tuple(events.phases),
        result.reserved_changes,
    )
