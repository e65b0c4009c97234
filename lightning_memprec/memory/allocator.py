"""Replay a trace through PyTorch's CUDA caching allocator, simulated: what it reserves, and on how little it runs.

The allocator itself is in :mod:`~lightning_memprec.memory.allocator_segments` and
:mod:`~lightning_memprec.memory.allocator_expandable`, rule by rule with its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_memprec._units import MIB
from lightning_memprec.memory.allocator_blocks import Block
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.allocator_expandable import ExpandableAllocator
from lightning_memprec.memory.allocator_segments import SegmentAllocator, round_size
from lightning_memprec.memory.events import MemoryEvents, StorageRecord

__all__ = ["AllocatorResult", "minimum_capacity", "simulate"]

# The driver hands out memory in pages of 2 MiB (Note [Expandable Segments] in c10/cuda/CUDACachingAllocator.cpp).
_CAPACITY_STEP_BYTES = 2 * MIB


@dataclass(frozen=True)
class AllocatorResult:
    """What a replay needed. After an out-of-memory error: up to that error.

    Attributes:
        peak_allocated_bytes: Largest sum of the blocks in use (``torch.cuda.max_memory_allocated``).
        peak_requested_bytes: Largest sum of the sizes asked for, not rounded.
        peak_reserved_bytes: Largest sum of all segments (``torch.cuda.max_memory_reserved``).
        reserved_at_peak_bytes: Reserved when allocated was largest.
        inactive_split_at_peak_bytes: Free blocks, when allocated was largest, that cannot be given back because
            their segment is in use: fragmentation. 0 with expandable segments, as PyTorch counts it.
        segment_allocations: How often the driver was asked for memory with success.
        retries: How often everything cached was given back to make room (``num_alloc_retries``).
        out_of_memory_event: Event whose request could not be met, or ``None``.
        reserved_changes: ``(event, reserved bytes after it)`` wherever reserved changed, in order of time.
    """

    peak_allocated_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    reserved_at_peak_bytes: int
    inactive_split_at_peak_bytes: int
    segment_allocations: int
    retries: int
    out_of_memory_event: int | None
    reserved_changes: tuple[tuple[int, int], ...]


def simulate(
    events: MemoryEvents, *, config: AllocatorConfig | None = None, capacity_bytes: int | None = None
) -> AllocatorResult:
    """Replay births and deaths through the caching allocator.

    Args:
        events: Storages with their sizes, and the order of their births and deaths. Storages of 0 bytes take
            no memory.
        config: Settings of the allocator; default, PyTorch's defaults.
        capacity_bytes: What the driver can hand out to the allocator: the device's memory less everything outside
            the allocator. ``config.per_process_memory_fraction`` is a share of it. ``None`` is without limit.

    Raises:
        ValueError: If ``config`` names another backend than ``"native"``.

    Example:
        A request above 1 MiB opens a segment of 20 MiB:

        >>> from lightning_memprec.memory.events import StorageRecord
        >>> events = MemoryEvents([StorageRecord(2**20 + 1, 0, 0, False, 0)], [0])
        >>> result = simulate(events)
        >>> result.peak_allocated_bytes - 2**20, result.peak_reserved_bytes // 2**20
        (512, 20)
    """
    config = config or AllocatorConfig()
    if config.backend != "native":
        raise ValueError(
            f"Only the allocator backend 'native' is simulated, not {config.backend!r}. "
            "Compare allocated bytes with the capacity, or train with `backend:native`."
        )
    return _replay(events, _rounded(events, config), config, capacity_bytes)


def minimum_capacity(events: MemoryEvents, config: AllocatorConfig | None = None) -> int:
    """Find on how little memory the events still run, cached segments given back under pressure.

    Capacities in steps of 2 MiB are replayed by bisection, between the largest sum of live rounded sizes, below
    which nothing can run, and what is reserved without a limit. More memory may, rarely, end in another layout
    that does not fit: the capacity returned is one that was replayed and ran, 2 MiB less was replayed and did not
    run (unless it is the lower bound), and what lies between it and the peak reserved was not all tried.

    Args:
        events: As for :func:`simulate`.
        config: Settings of the allocator; default, PyTorch's defaults.

    Returns:
        Bytes that the driver has to offer to the allocator.

    Raises:
        ValueError: If ``config`` names another backend than ``"native"``, or allows this process no memory.
    """
    config = config or AllocatorConfig()
    if config.per_process_memory_fraction == 0:
        raise ValueError(
            "`per_process_memory_fraction` is 0, so no capacity is large enough. Set it above 0, up to 1."
        )
    unlimited = simulate(events, config=config)
    rounded = _rounded(events, config)

    def runs(steps: int) -> bool:
        return _replay(events, rounded, config, steps * _CAPACITY_STEP_BYTES).out_of_memory_event is None

    enough = _steps(int(unlimited.peak_reserved_bytes / config.per_process_memory_fraction))
    while not runs(enough):  # Only where the fraction or the garbage collection changes what is cached.
        enough += max(1, enough // 8)
    least = _rounded(events, config, smallest=True)
    return _smallest(runs, _steps(_peak_live(events, least)), enough) * _CAPACITY_STEP_BYTES


def _steps(size_bytes: int) -> int:
    return -(-size_bytes // _CAPACITY_STEP_BYTES)


def _smallest(runs: Callable[[int], bool], lowest: int, enough: int) -> int:
    """Bisect for a number that runs while the one below does not; ``enough`` is known to run."""
    too_small = lowest - 1
    while enough - too_small > 1:
        middle = (enough + too_small) // 2
        if runs(middle):
            enough = middle
        else:
            too_small = middle
    return enough


def _rounded(events: MemoryEvents, config: AllocatorConfig, *, smallest: bool = False) -> list[int]:
    """Return the rounded size of every storage, or of the least that does instead."""
    known: dict[int, int] = {0: 0}
    sizes = []
    for record in events.storages:
        size_bytes = record.size_bytes
        if smallest and record.smallest_bytes is not None:
            size_bytes = record.smallest_bytes
        if size_bytes not in known:
            known[size_bytes] = round_size(size_bytes, config)
        sizes.append(known[size_bytes])
    return sizes


def _peak_live(events: MemoryEvents, sizes_bytes: list[int]) -> int:
    live_bytes = peak_bytes = 0
    for storage in events.order:
        live_bytes += sizes_bytes[storage] if storage >= 0 else -sizes_bytes[~storage]
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes


def _allocate_less(
    allocator: SegmentAllocator | ExpandableAllocator, record: StorageRecord, config: AllocatorConfig
) -> Block | None:
    """Give whoever can do with less what it then asks for; a byte stands for nothing."""
    return (
        None
        if record.smallest_bytes is None
        else allocator.allocate(round_size(max(1, record.smallest_bytes), config))
    )


def _replay(
    events: MemoryEvents, rounded: list[int], config: AllocatorConfig, capacity_bytes: int | None
) -> AllocatorResult:
    kind = ExpandableAllocator if config.expandable_segments else SegmentAllocator
    allocator = kind(config, capacity_bytes)
    allocate, free = allocator.allocate, allocator.free
    blocks: list[Block | None] = [None] * len(rounded)
    sizes = [record.size_bytes for record in events.storages]
    allocated = requested = reserved = 0
    peak_allocated = peak_requested = reserved_at_peak = inactive_at_peak = 0
    changes: list[tuple[int, int]] = []
    failed_event = None
    for event, storage in enumerate(events.order):
        if storage < 0:
            block = blocks[~storage]
            if block is not None:
                allocated -= block.size_bytes
                requested -= sizes[~storage]
                free(block)
            continue
        size_bytes = rounded[storage]
        if size_bytes == 0:
            continue
        block = allocate(size_bytes) or _allocate_less(allocator, events.storages[storage], config)
        blocks[storage] = block
        if allocator.reserved_bytes != reserved:
            reserved = allocator.reserved_bytes
            changes.append((event, reserved))
        if block is None:
            failed_event = event
            break
        requested += sizes[storage]
        if requested > peak_requested:
            peak_requested = requested
        allocated += block.size_bytes
        if allocated > peak_allocated:
            peak_allocated, reserved_at_peak = allocated, reserved
            inactive_at_peak = allocator.inactive_split_bytes
    return AllocatorResult(
        peak_allocated_bytes=peak_allocated,
        peak_requested_bytes=peak_requested,
        peak_reserved_bytes=max((size for _, size in changes), default=0),
        reserved_at_peak_bytes=reserved_at_peak,
        inactive_split_at_peak_bytes=0 if config.expandable_segments else inactive_at_peak,
        segment_allocations=allocator.segment_allocations,
        retries=allocator.retries,
        out_of_memory_event=failed_event,
        reserved_changes=tuple(changes),
    )
