"""Steps after those that were traced: each repeats the last, in storages of its own."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from lightning_memprec.memory.events import MemoryEvents, StorageRecord

__all__ = ["with_more_steps"]

_PHASES_OF_A_STEP = frozenset({"batch_transfer", "forward", "backward", "optimizer_step"})


def with_more_steps(events: MemoryEvents, more: int = 2) -> MemoryEvents:
    """Repeat the last optimizer step, for a replay.

    What lives at a time is the same in every step from the second on, but the allocator's segments are not: blocks
    that one step leaves behind lie in the way of the next. In Lightning's order, where gradients live through the
    forward pass, reserved memory grows up to the fourth step, by up to 8 % (``benchmarks/memory_accuracy.py``).

    Args:
        events: A trace. What follows its last step, such as a validation, stays at the end.
        more: How often the step is repeated.

    Returns:
        The longer sequence, without modules, whose repeated phases bear the names of the traced ones; ``events`` itself
        if its last step does not leave behind what it found, since then a repetition means nothing.

    Example:
        >>> events = MemoryEvents([StorageRecord(512, 0, 0, True, 0)], [0, -1], [("forward", 0, 0)])
        >>> len(with_more_steps(events, more=2).order)
        6
    """
    start, end = _last_step(events)
    body = events.order[start:end]
    born = {k for k in body if k >= 0}
    died = {~k for k in body if k < 0}
    successors = _matched(events, sorted(died - born), sorted(born - died))
    if successors is None:
        return events
    storages, order = list(events.storages), events.order[:end]
    now = {k: k for k in successors.values()}  # Storages that outlive a step: who holds their place.
    for _ in range(more):
        holder = {found: now[left] for found, left in successors.items()}
        for k in body:
            if k >= 0:
                holder[k] = len(storages)
                storages.append(_copy(events.storages[k]))
                order.append(holder[k])
            else:
                order.append(~holder[~k])
        now = {left: holder[left] for left in now}
    order += [k if k >= 0 else ~now.get(~k, ~k) for k in events.order[end:]]
    return MemoryEvents(storages, order, _repeated_phases(events, start, end, more))


def _repeated_phases(events: MemoryEvents, start: int, end: int, more: int) -> list[tuple[str, int, int]]:
    before = [phase for phase in events.phases if phase[2] < end]
    again = [
        (name, step, first + repetition * (end - start))
        for repetition in range(1, more + 1)
        for name, step, first in before
        if first >= start
    ]
    after = [
        (name, step, first + more * (end - start)) for name, step, first in events.phases if first >= end
    ]
    return [*before, *again, *after]


def _last_step(events: MemoryEvents) -> tuple[int, int]:
    """Return where the last optimizer step begins and ends."""
    steps = [step for name, step, _ in events.phases if name in _PHASES_OF_A_STEP]
    if not steps:
        return 0, 0
    inside = [
        i
        for i, (name, step, _) in enumerate(events.phases)
        if name in _PHASES_OF_A_STEP and step == steps[-1]
    ]
    after = inside[-1] + 1
    end = events.phases[after][2] if after < len(events.phases) else len(events.order)
    return events.phases[inside[0]][2], end


def _matched(events: MemoryEvents, found: Iterable[int], left: Iterable[int]) -> dict[int, int] | None:
    """Match what a step found and released to what it leaves, by size and age; ``None`` if they differ."""
    by_size: dict[int, deque[int]] = defaultdict(deque)
    for k in left:
        by_size[events.storages[k].size_bytes].append(k)
    matched = {}
    for k in found:
        same = by_size[events.storages[k].size_bytes]
        if not same:
            return None
        matched[k] = same.popleft()
    return None if any(by_size.values()) else matched


def _copy(record: StorageRecord) -> StorageRecord:
    copy = StorageRecord(record.size_bytes, record.phase, record.module, record.grad_enabled, record.birth)
    copy.smallest_bytes = record.smallest_bytes
    return copy
