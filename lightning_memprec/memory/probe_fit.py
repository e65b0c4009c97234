"""From what small batches took to what a large one will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_memprec.memory.probe_meter import Phase

__all__ = ["Extrapolation", "Measurement", "extrapolate", "is_settled"]

# Kernels may treat a single sample apart, and data may send few samples elsewhere than many. Where two pairs of sizes
# agree this closely on the wanted size, a further size would not change the answer by much.
_SETTLED = 0.02


@dataclass(frozen=True)
class Measurement:
    """What a run with one batch size took.

    Args:
        size: Samples of the batch.
        phases: Its phases, in order of time.
        parameters_bytes: Parameters.
        buffers_bytes: Buffers.
        inputs_bytes: The batch.
        total_parameters: Parameter elements, tied ones once.
        trainable_parameters: Of these, those that are trained.
    """

    size: int
    phases: tuple[Phase, ...]
    parameters_bytes: int = 0
    buffers_bytes: int = 0
    inputs_bytes: int = 0
    total_parameters: int = 0
    trainable_parameters: int = 0


@dataclass(frozen=True)
class Extrapolation:
    """What a run with a larger batch will take.

    Args:
        size: Samples of the batch.
        phases: Its phases, in order of time.
        lowest_bytes: The lowest peak that other fits through the same points give.
        highest_bytes: The highest.
        is_checked: Whether there were three points, so that the answer was tested at all.
    """

    size: int
    phases: tuple[Phase, ...]
    lowest_bytes: int
    highest_bytes: int
    is_checked: bool

    @property
    def peak(self) -> Phase:
        """The phase in which memory peaks."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)


def is_settled(points: Sequence[Measurement], size: int) -> bool:
    """Tell whether a further measurement can be spared.

    Args:
        points: Measurements, smallest size first.
        size: Samples of the wanted batch.
    """
    if len(points) < 3:
        return False
    before, now = _need(_continued(points[-3:-1], size)), _need(_continued(points[-2:], size))
    return abs(before - now) <= _SETTLED * now


def extrapolate(points: Sequence[Measurement], size: int) -> Extrapolation:
    """Continue what was measured to a larger batch.

    A straight line through the two largest sizes, or a parabola through the three largest where memory grows like that
    (a matrix of all samples by all samples): where it would have told the last size better. Where both sizes made the
    same allocations one after the other, each is continued for itself, and the peak is the largest sum of all instants;
    elsewhere the peaks of the phases are continued, which misses an instant that only peaks with a large batch.

    Args:
        points: Measurements, smallest size first; at least one.
        size: Samples of the wanted batch.

    Example:
        >>> points = [Measurement(n, (Phase("forward", 0, peak_bytes=1000 + 10 * n * n),)) for n in (1, 2, 4, 8)]
        >>> result = extrapolate(points, 64)
        >>> result.peak.peak_bytes, result.lowest_bytes, result.highest_bytes
        (41960, 4760, 41960)
    """
    last = points[-1]
    if len(points) == 1 or last.size >= size:
        need = _need(last.phases)
        return Extrapolation(size, last.phases, need, need, True)
    fits = [_continued(points[-2:], size)]
    if len(points) >= 3:
        fits.append(_continued(points[-3:-1], size))
        if not is_settled(points, size):
            fits.append(_continued(points[-3:], size))
    needs = [_need(fit) for fit in fits]
    chosen = fits[2] if len(fits) == 3 and _bends(points) else fits[0]
    return Extrapolation(size, chosen, min(needs), max(needs), len(points) >= 3)


def _need(phases: Sequence[Phase]) -> int:
    return max(phase.peak_bytes for phase in phases)


def _bends(points: Sequence[Measurement]) -> bool:
    """Tell whether the sizes before the last would have told it better by a parabola than by a line."""
    if len(points) < 4:
        return False
    size, measured = points[-1].size, _need(points[-1].phases)
    by_parabola, by_line = (_need(_continued(points[first:-1], size)) for first in (-4, -3))
    return abs(by_parabola - measured) < abs(by_line - measured)


def _continued(points: Sequence[Measurement], size: int) -> tuple[Phase, ...]:
    """Lay a polynomial through two or three measurements, phase by phase."""
    sizes = [point.size for point in points]
    return tuple(
        _continued_phase(sizes, phases, size)
        for phases in zip(*(point.phases for point in points), strict=False)
    )


def _continued_phase(sizes: list[int], phases: tuple[Phase, ...], size: int) -> Phase:
    reserved = [phase.reserved_bytes for phase in phases]
    known = [value for value in reserved if value is not None]
    return replace(
        phases[-1],
        peak_bytes=_replayed(sizes, phases, size)
        if _are_alike(phases)
        else max(phases[-1].peak_bytes, _newton(sizes, [phase.peak_bytes for phase in phases], size)),
        reserved_bytes=_newton(sizes, known, size) if len(known) == len(reserved) else None,
        events=(),
    )


def _are_alike(phases: tuple[Phase, ...]) -> bool:
    """Tell whether all sizes allocated and freed in the same order."""
    first, *others = (phase.events for phase in phases)
    return bool(first) and all(
        len(events) == len(first) and all((a < 0) == (b < 0) for a, b in zip(events, first, strict=True))
        for events in others
    )


def _replayed(sizes: list[int], phases: tuple[Phase, ...], size: int) -> int:
    live = peak = _newton(sizes, [phase.start_bytes for phase in phases], size)
    for changes in zip(*(phase.events for phase in phases), strict=True):
        live += _newton(sizes, changes, size)
        peak = max(peak, live)
    return peak


def _newton(sizes: list[int], values: Sequence[int], size: int) -> int:
    """Value at ``size`` of the line or parabola through the points, in Newton's form."""
    a, b = sizes[:2]
    slope = (values[1] - values[0]) / (b - a)
    value = values[0] + slope * (size - a)
    if len(sizes) == 3:
        bend = ((values[2] - values[1]) / (sizes[2] - b) - slope) / (sizes[2] - a)
        value += bend * (size - a) * (size - b)
    return round(value)
