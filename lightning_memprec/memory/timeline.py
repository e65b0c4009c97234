"""The parts of live memory over a trace, thinned so that every peak stays exact."""

from __future__ import annotations

from lightning_memprec.memory.events import MemoryEvents
from lightning_memprec.memory.result import Breakdown, TimelinePoint

__all__ = ["timeline"]

# A chart 800 pixels wide shows no more, and a report in JSON stays below 300 KB.
_POINTS = 400


def timeline(
    events: MemoryEvents, sizes: list[int], parts: list[str], totals: list[int]
) -> tuple[TimelinePoint, ...]:
    """Cut each phase into stretches and keep the highest point of each.

    Args:
        events: What a recorder saw.
        sizes: Bytes of each storage.
        parts: Field of :class:`Breakdown` to which each storage belongs.
        totals: Bytes alive after each event.

    Returns:
        About 400 points in order of time, more if there are more phases. The highest event of each phase is among them.
    """
    chosen = _highest_points(events, totals)
    live = dict.fromkeys(parts, 0)
    points: list[TimelinePoint] = []
    position = 0
    for index, event in chosen:
        for storage in events.order[position : event + 1]:
            if storage >= 0:
                live[parts[storage]] += sizes[storage]
            else:
                live[parts[~storage]] -= sizes[~storage]
        position = event + 1
        name, step, _ = events.phases[index]
        points.append(TimelinePoint(event, name, step, Breakdown(**live)))
    return tuple(points)


def _highest_points(events: MemoryEvents, totals: list[int]) -> list[tuple[int, int]]:
    """List pairs of phase and event."""
    stride = max(1, -(-len(totals) // _POINTS))
    starts = [first for _, _, first in events.phases] + [len(totals)]
    return [
        (index, max(range(start, min(start + stride, starts[index + 1])), key=totals.__getitem__))
        for index in range(len(events.phases))
        for start in range(starts[index], starts[index + 1], stride)
    ]
