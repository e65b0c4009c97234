"""From recorded births and deaths to peaks, parts and a timeline. Pure bookkeeping."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lightning_memprec.memory.events import MemoryEvents, StorageRecord
from lightning_memprec.memory.result import Breakdown, ModuleMemory, PhasePeak, TimelinePoint
from lightning_memprec.memory.timeline import timeline

__all__ = ["Analysis", "analyse", "categories", "owner"]


@dataclass(frozen=True)
class Analysis:
    """What the events say, see :class:`~lightning_memprec.memory.result.MemoryEstimate`."""

    peak_bytes: int
    peak_phase: PhasePeak
    breakdown: Breakdown
    phases: tuple[PhasePeak, ...]
    by_module: tuple[ModuleMemory, ...]
    timeline: tuple[TimelinePoint, ...]


def analyse(
    events: MemoryEvents, *, granularity_bytes: int = 1, module_types: dict[str, str] | None = None
) -> Analysis:
    """Find the peak of a trace and what it is made of.

    Args:
        events: What a recorder saw.
        granularity_bytes: Every storage is rounded up to a multiple of it (512 in the CUDA caching allocator,
            ``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.cpp; 1 on the CPU).
        module_types: Class name of each module, by name.
    """
    sizes = [-(-s.size_bytes // granularity_bytes) * granularity_bytes for s in events.storages]
    totals = _running_sum(events, sizes)
    peak_event = max(range(len(totals)), key=totals.__getitem__) if totals else 0
    phases = _phase_peaks(events, totals)
    in_phase = _phase_of(events, peak_event)
    peak_bytes = totals[peak_event] if totals else 0
    alive = [
        k for k, s in enumerate(events.storages) if s.birth <= peak_event and not -1 < s.death <= peak_event
    ]
    parts = [f"{category.replace(' ', '_')}_bytes" for category in categories(events)]
    breakdown, by_module = _attribute(events, sizes, alive, parts, module_types or {})
    return Analysis(
        peak_bytes=peak_bytes,
        peak_phase=PhasePeak(events.phases[in_phase][0], events.phases[in_phase][1], peak_bytes),
        breakdown=breakdown,
        phases=phases,
        by_module=by_module,
        timeline=timeline(events, sizes, parts, totals),
    )


def _running_sum(events: MemoryEvents, sizes: list[int]) -> list[int]:
    total, totals = 0, []
    for event in events.order:
        total += sizes[event] if event >= 0 else -sizes[~event]
        totals.append(total)
    return totals


def _phase_of(events: MemoryEvents, event: int) -> int:
    return max(i for i, (_, _, first) in enumerate(events.phases) if first <= event)


def _phase_peaks(events: MemoryEvents, totals: list[int]) -> tuple[PhasePeak, ...]:
    peaks: dict[tuple[str, int], int] = {}
    ends = [first for _, _, first in events.phases[1:]] + [len(totals)]
    for (name, step, first), end in zip(events.phases, ends, strict=True):
        # A phase begins with what was there before its first event.
        peak = max(totals[max(first - 1, 0) : end], default=0)
        peaks[name, step] = max(peak, peaks.get((name, step), 0))
    return tuple(PhasePeak(name, step, peak) for (name, step), peak in peaks.items())


def categories(events: MemoryEvents) -> list[str]:
    """Say of each storage which part of the memory it belongs to, such as ``"optimizer states"``."""
    forward_ends = _forward_ends(events)
    return [_category(events, record, forward_ends) for record in events.storages]


def owner(events: MemoryEvents, record: StorageRecord) -> str:
    """Name the module that holds a storage: that of its parameter, else the one that made it."""
    return record.owner.rpartition(".")[0] if record.owner is not None else events.modules[record.module]


def _forward_ends(events: MemoryEvents) -> dict[int, int]:
    """Map each forward phase to the event at which it ends."""
    ends: dict[int, int] = {}
    for index, (name, _, _) in enumerate(events.phases):
        if name == "forward":
            following = events.phases[index + 1 :]
            ends[index] = following[0][2] if following else len(events.order)
    return ends


def _category(events: MemoryEvents, record: StorageRecord, forward_ends: dict[int, int]) -> str:
    """Resolve what was not marked: a storage that outlives its forward pass is an activation.

    In backward autograd records nothing, unless a checkpointed block is run again: what is born while it
    records is a recomputed activation.
    """
    if record.category is not None:
        return record.category
    forward_end = forward_ends.get(record.phase)
    if forward_end is not None:
        return "activations" if record.death == -1 or record.death > forward_end else "temporaries"
    if events.phases[record.phase][0] == "backward" and record.grad_enabled:
        return "activations"
    return "temporaries"


def _attribute(
    events: MemoryEvents,
    sizes: list[int],
    alive: list[int],
    parts: list[str],
    module_types: dict[str, str],
) -> tuple[Breakdown, tuple[ModuleMemory, ...]]:
    total: dict[str, int] = defaultdict(int)
    modules: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for index in alive:
        total[parts[index]] += sizes[index]
        modules[owner(events, events.storages[index])][parts[index]] += sizes[index]
    by_module = [
        ModuleMemory(name, module_types.get(name, ""), Breakdown(**held)) for name, held in modules.items()
    ]
    by_module.sort(key=lambda m: (-m.breakdown.total_bytes, m.name))
    return Breakdown(**total), tuple(by_module)
