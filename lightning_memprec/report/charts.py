"""Charts as inline SVG.

Horizontal places are in percent, so that a chart is as wide as the page and its text stays legible. Colors are
those of the page's style sheet, by the name of a part as a class.
"""

from __future__ import annotations

import math
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from lightning_memprec._units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_memprec.memory.result import MemoryEstimate, TimelinePoint

__all__ = [
    "css_class",
    "describe_point",
    "parts_bar",
    "phase_name",
    "phase_peaks",
    "timeline_chart",
    "timeline_places",
]

_BAR_HEIGHT = 36
# Of the chart in pixels: areas, room for a label above them, strip of phases.
_HEIGHT, _TOP, _STRIP = 300, 24, 22
_LABEL = 26  # Height of a label with its line, in pixels.
# Width of a letter in percent of the narrowest chart that names phases (see the style sheet): a phase too narrow for
# its name bears none.
_LETTER = 0.8
# A limit further above the peak is not drawn: it would press the areas into less than two thirds of the chart.
_NEAR = 1.5


def css_class(part: str) -> str:
    """Return the class that colors a part."""
    return part.replace(" ", "-")


def phase_name(name: str, step: int) -> str:
    """Name a phase and its step, counted from one."""
    words = name.replace("_", " ")
    return f"step {step + 1}, {words}" if step >= 0 else words


def describe_point(point: TimelinePoint) -> str:
    """Say in one line what is allocated at a point."""
    text = (
        f"{phase_name(point.phase, point.step)}, event {point.event:,}: {format_bytes(point.allocated_bytes)}"
    )
    return f"{text} ({point.breakdown})" if point.allocated_bytes else text


def parts_bar(
    rows: Iterable[tuple[str, int]], whole_bytes: int, *, height: int = 14, limit_bytes: int | None = None
) -> str:
    """Draw parts side by side.

    Args:
        rows: Name and bytes of each part.
        whole_bytes: What the whole width stands for.
        height: Height of the bar in pixels.
        limit_bytes: What is offered: marked by a line across the bar.
    """
    whole = whole_bytes or 1
    left, shapes = 0.0, []
    for name, size in rows:
        width = 100 * size / whole
        shapes.append(
            f'<rect class="{css_class(name)}" x="{left:.3f}%" width="{width:.3f}%" height="{height}">'
            f"<title>{escape(name)} {format_bytes(size)}</title></rect>"
        )
        left += width
    below = 0
    if limit_bytes is not None:
        place, below = 100 * limit_bytes / whole, 22
        anchor = "end" if place > 50 else "start"
        shapes.insert(0, f'<rect class="room" width="{place:.3f}%" height="{height}"/>')
        line = f'x1="{place:.3f}%" x2="{place:.3f}%" y1="-4" y2="{height + 8}"'
        shapes.append(
            f'<line class="limit-halo" {line}/><line class="limit" {line}/><text x="{place:.3f}%" y="{height + 20}" '
            f'text-anchor="{anchor}">offered {format_bytes(limit_bytes)}</text>'
        )
    return f'<svg class="parts" height="{height + below}" aria-hidden="true">{"".join(shapes)}</svg>'


def timeline_places(points: Sequence[TimelinePoint]) -> list[float]:
    """Return where each point lies, in percent of the width."""
    first = points[0].event
    span = max(1, points[-1].event + 1 - first)
    return [100 * (point.event - first) / span for point in points]


def phase_peaks(points: Sequence[TimelinePoint]) -> list[int]:
    """Return the numbers of the points that are the highest of their phase and step."""
    highest: dict[tuple[str, int], int] = {}
    for i, point in enumerate(points):
        known = highest.setdefault((point.phase, point.step), i)
        if point.allocated_bytes > points[known].allocated_bytes:
            highest[point.phase, point.step] = i
    return sorted(highest.values())


def timeline_chart(estimate: MemoryEstimate, limit_bytes: int | None = None) -> str:
    """Draw the parts over the events as stacked areas.

    The highest point of each phase can be reached with the keyboard and bears its values as a label.

    Args:
        estimate: What to draw; its timeline must not be empty.
        limit_bytes: What the device offers for tensors; drawn as a line where it is not far above the peak.
    """
    points, places = estimate.timeline, timeline_places(estimate.timeline)
    peak = max(points, key=lambda point: point.allocated_bytes)
    if limit_bytes is not None and limit_bytes > _NEAR * peak.allocated_bytes:
        limit_bytes = None
    top = max(peak.allocated_bytes, limit_bytes or 0, 1)
    return (
        f'<svg id="timeline" height="{_TOP + _HEIGHT + _STRIP + 4}" role="group" '
        'aria-label="Allocated memory over the traced events, by part">'
        f'<svg y="{_TOP}" width="100%" height="{_HEIGHT}" viewBox="0 0 1000 1000" preserveAspectRatio="none" '
        f'aria-hidden="true">{_areas(points, places, top)}</svg>'
        f"{_grid(top)}{_limit(limit_bytes, peak, top)}{_strip(points, places)}"
        f'<line class="cursor" y1="{_TOP}" y2="{_TOP + _HEIGHT}" x1="0" x2="0"/>'
        f"{_marks(points, places, top, peak)}{_peak_label(peak, places[points.index(peak)], limit_bytes, top)}</svg>"
    )


def _y(size_bytes: int, top: int) -> float:
    return _TOP + _HEIGHT * (1 - size_bytes / top)


def _areas(points: Sequence[TimelinePoint], places: Sequence[float], top: int) -> str:
    """Stack the parts as steps: memory stays as it is until the next event."""
    x = [10 * place for place in places] + [1000.0]
    lower = [0] * len(points)
    shapes = []
    for number, (name, _) in enumerate(points[0].breakdown.items()):
        sizes = [point.breakdown.items()[number][1] for point in points]
        if any(sizes):
            upper = [below + size for below, size in zip(lower, sizes, strict=True)]
            back = "".join(
                f"V{1000 - 1000 * lower[i] / top:.1f}H{x[i]:.1f}" for i in reversed(range(len(points)))
            )
            shapes.append(f'<path class="area {css_class(name)}" d="{_steps(x, upper, top)}{back}Z"/>')
            lower = upper
    return f'{"".join(shapes)}<path class="outline" d="{_steps(x, lower, top)}"/>'


def _steps(x: Sequence[float], sizes: Sequence[int], top: int) -> str:
    heights = [1000 - 1000 * size / top for size in sizes]
    return f"M{x[0]:.1f} {heights[0]:.1f}" + "".join(
        f"V{height:.1f}H{x[i + 1]:.1f}" for i, height in enumerate(heights)
    )


def _grid(top: int) -> str:
    unit = next((unit for unit in (GIB, MIB, KIB) if top >= 2 * unit), 1)
    step = _round_step(top / unit / 4) * unit
    shapes = []
    for number in range(1, int(top / step) + 1):
        size = round(number * step)
        y = _y(size, top)
        shapes.append(f'<line class="grid" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(f'<text class="halo" x="4" y="{y - 4:.1f}">{_label(size)}</text>')
    return f'<g aria-hidden="true">{"".join(shapes)}</g>'


def _round_step(least: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, … that is not below a size."""
    power = 10 ** math.floor(math.log10(max(least, 1)))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least))


def _label(size_bytes: int) -> str:
    return format_bytes(size_bytes).replace(".00 ", " ")


def _limit(limit_bytes: int | None, peak: TimelinePoint, top: int) -> str:
    if limit_bytes is None:
        return ""
    y = _y(limit_bytes, top)
    line = f'x2="100%" y1="{y:.1f}" y2="{y:.1f}"'
    # Below its line where the label of the peak needs the room above.
    label = y + 16 if abs(y - _y(peak.allocated_bytes, top)) < _LABEL else y - 6
    return (
        f'<line class="limit-halo" {line}/><line class="limit" {line}/>'
        f'<text class="halo" x="100%" dx="-4" y="{label:.1f}" text-anchor="end">'
        f"offered for tensors {format_bytes(limit_bytes)}</text>"
    )


def _peak_label(peak: TimelinePoint, place: float, limit_bytes: int | None, top: int) -> str:
    y = _y(peak.allocated_bytes, top)
    limit = y if limit_bytes is None else _y(limit_bytes, top)
    above = min(y, limit) if abs(y - limit) < _LABEL else y
    anchor, shift = ("end", -10) if place > 50 else ("start", 10)
    return (
        f'<text class="halo" x="{place:.3f}%" dx="{shift}" y="{above - 8:.1f}" text-anchor="{anchor}" '
        f'aria-hidden="true">Peak {format_bytes(peak.allocated_bytes)}</text>'
    )


def _strip(points: Sequence[TimelinePoint], places: Sequence[float]) -> str:
    """Draw the phases below the areas."""
    shapes, position = [], 0
    for number, ((name, step), members) in enumerate(groupby(points, key=lambda p: (p.phase, p.step))):
        start = places[position]
        position += len(list(members))
        width = (places[position] if position < len(places) else 100.0) - start
        odd = " odd" if number % 2 else ""
        text = f"{name.replace('_', ' ')}" + (f" {step + 1}" if step >= 0 else "")
        named = (
            f'<text class="band-name" x="4" y="15">{escape(text)}</text>'
            if width > _LETTER * len(text)
            else ""
        )
        shapes.append(
            f'<svg x="{start:.3f}%" y="{_TOP + _HEIGHT + 4}" width="{width:.3f}%" height="{_STRIP}">'
            f'<rect class="band{odd}" width="100%" height="{_STRIP}"/>{named}</svg>'
        )
    return f'<g aria-hidden="true">{"".join(shapes)}</g>'


def _marks(points: Sequence[TimelinePoint], places: Sequence[float], top: int, peak: TimelinePoint) -> str:
    """Mark the highest point of each phase and step."""
    shapes = []
    for i in phase_peaks(points):
        point, place, y = points[i], places[i], _y(points[i].allocated_bytes, top)
        is_peak = point is peak
        said = escape(("Peak: " if is_peak else "") + describe_point(point), quote=True)
        shapes.append(
            f'<g class="mark{" peak" if is_peak else ""}" tabindex="0" role="img" data-x="{place:.3f}" '
            f'aria-label="{said}"><circle cx="{place:.3f}%" cy="{y:.1f}" r="{6 if is_peak else 4}"/>'
            "</g>"
        )
    return "".join(shapes)
