"""The sections of the HTML page that hold figures, each with a table in place of what it draws."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING

from lightning_memprec._units import format_bytes
from lightning_memprec.memory.modules_alike import modules_alike
from lightning_memprec.report.charts import (
    css_class,
    describe_point,
    parts_bar,
    phase_name,
    phase_peaks,
    timeline_chart,
    timeline_places,
)
from lightning_memprec.report.content import part_rows, phase_rows, remedy_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_memprec.memory.result import MemoryEstimate, Remedy

__all__ = ["modules_section", "parts_section", "phases_section", "remedies_section", "timeline_section"]

# Of some hundred modules most hold next to nothing; what is left out is summed up in the last row.
_MODULES = 20


def parts_section(estimate: MemoryEstimate, capacity_bytes: int | None) -> str:
    """Show the parts at the peak against what the device offers."""
    need = estimate.minimum_device_bytes
    rows = part_rows(estimate)
    total = sum(size for _, size in rows)
    written = [
        _row(
            f'<span class="swatch {css_class(name)}"></span>{escape(name)}',
            format_bytes(size),
            f"{size / (total or 1):.1%}",
        )
        for name, size in rows
    ]
    bar = parts_bar(rows, max(need, capacity_bytes or 0), height=36, limit_bytes=capacity_bytes)
    table = _table(
        "Parts at the peak, and what a device needs beyond them",
        ("part", "size", "share"),
        written,
        _row("needed", format_bytes(need), "") if rows else "",
    )
    return f"<figure>{bar}</figure>\n{table}"


def remedies_section(remedies: Sequence[Remedy]) -> str:
    """List the changes that would help; those that are enough alone bear a sign."""
    items = []
    for remedy, (text, how) in zip(remedies, remedy_lines(tuple(remedies)), strict=True):
        facts = escape(text.removeprefix(f"{remedy.description}: "))
        sign = '<span class="fits" aria-hidden="true">✓</span> ' if remedy.fits else ""
        code = f"<pre><code>{escape(how)}</code></pre>" if how else ""
        items.append(f"<li>{sign}<b>{escape(remedy.description)}</b>: {facts}{code}</li>")
    return f'<ol class="remedies">{"".join(items)}</ol>'


def timeline_section(estimate: MemoryEstimate, capacity_bytes: int | None) -> str:
    """Draw the parts over the trace, which must have a timeline."""
    limit = None if capacity_bytes is None else max(0, capacity_bytes - estimate.outside_allocator_bytes)
    points = [
        [round(place, 3), describe_point(point)]
        for place, point in zip(timeline_places(estimate.timeline), estimate.timeline, strict=True)
    ]
    data = json.dumps(points).replace("<", "\\u003c")  # No text can end the script element then.
    peak = max(estimate.timeline, key=lambda point: point.allocated_bytes)
    names = [name for name, _ in part_rows(estimate)]
    legend = "".join(
        f'<span class="swatch {css_class(name)}"></span>{escape(name)} &ensp;'
        for name, size in _ever_held(estimate)
        if size and name not in names
    )
    return (
        f"<figure>{timeline_chart(estimate, limit)}"
        f'<p class="readout" id="readout">Peak: {escape(describe_point(peak))}</p>'
        "<figcaption>Live tensors after each birth and death of a tensor, in the order of the trace; every stretch "
        "shows its highest point. Colors as in the table above. "
        f"{legend}"
        '<span class="hint">Move the pointer over the chart, or press Tab and the arrow keys, to read values.</span>'
        "</figcaption></figure>"
        f'<script type="application/json" id="points">{data}</script>'
        f"{_timeline_table(estimate)}"
    )


def _timeline_table(estimate: MemoryEstimate) -> str:
    """Write the chart as a table: the highest point of each phase."""
    names = [name for name, size in _ever_held(estimate) if size]
    rows = []
    for i in phase_peaks(estimate.timeline):
        point = estimate.timeline[i]
        sizes = dict(point.breakdown.items())
        cells = [format_bytes(size) for size in (point.allocated_bytes, *(sizes[name] for name in names))]
        rows.append(_row(escape(phase_name(point.phase, point.step)), *cells))
    table = _table("The highest point of each phase", ("phase", "allocated", *map(escape, names)), rows)
    return f"<details><summary>The chart as a table</summary>{table}</details>"


def phases_section(estimate: MemoryEstimate) -> str:
    """List the phases with what is allocated and reserved."""
    rows = phase_rows(estimate)
    simulated = any(reserved is not None for _, _, reserved in rows)  # Only CUDA's allocator is.
    written = []
    for name, allocated, reserved in rows:
        cells = [format_bytes(allocated), "" if reserved is None else format_bytes(reserved)]
        written.append(_row(escape(name), *cells[: 1 + simulated]))
    head = ("phase", "allocated", "reserved")
    return _table(
        "Most allocated, and most held by the allocator, in each phase", head[: 2 + simulated], written
    )


def modules_section(estimate: MemoryEstimate) -> str:
    """List the modules that hold most at the peak, of which one at least must hold something."""
    groups = modules_alike(estimate.by_module)
    largest = groups[0][1].breakdown.total_bytes
    rows = []
    for count, module in groups[:_MODULES]:
        parts = [(name, size) for name, size in module.breakdown.items() if size]
        kind = f' <span class="note">{escape(module.type_name)}</span>' if module.type_name else ""
        times = f' <span class="note count">&times; {count}</span>' if count > 1 else ""
        rows.append(
            f'<tr><th scope="row"><code>{escape(module.name or "(root)")}</code>{kind}{times}</th>'
            f'<td class="number">{format_bytes(module.breakdown.total_bytes)}</td>'
            f'<td class="wide">{escape(max(parts, key=lambda part: part[1])[0])}</td>'
            f'<td class="bar">{parts_bar(parts, largest)}</td></tr>'
        )
    rest = groups[_MODULES:]
    if rest:
        count, size = sum(n for n, _ in rest), sum(module.breakdown.total_bytes for _, module in rest)
        rows.append(
            f'<tr><th scope="row">{count} others</th><td class="number">{format_bytes(size)}</td>'
            '<td class="wide"></td><td></td></tr>'
        )
    head = (
        '<th scope="col">module</th><th scope="col" class="number">size</th>'
        '<th scope="col" class="wide">mostly</th><td class="bar"></td>'
    )
    return (
        '<div class="scroll"><table><caption>What the modules hold at the peak, without their children. Those that '
        "differ in a number of their name only are added up: * stands for it. Bars show the parts.</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _ever_held(estimate: MemoryEstimate) -> list[tuple[str, int]]:
    """List the parts with the most each of them ever holds."""
    items = [point.breakdown.items() for point in estimate.timeline]
    return [(name, max(item[i][1] for item in items)) for i, (name, _) in enumerate(items[0])]


def _table(caption: str, head: Sequence[str], rows: Iterable[str], foot: str = "") -> str:
    """Write a table whose rows are written already; columns from the second on hold numbers."""
    cells = "".join(
        f'<th scope="col"{_number(i)}>{name}</th>' if name else "<td></td>" for i, name in enumerate(head)
    )
    footer = f"<tfoot>{foot}</tfoot>" if foot else ""
    return (
        f'<div class="scroll"><table><caption>{caption}</caption><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody>{footer}</table></div>"
    )


def _number(column: int) -> str:
    return ' class="number"' if column else ""


def _row(name: str, *cells: str) -> str:
    """Write a row; the name is HTML already, the cells are not."""
    numbers = "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
    return f'<tr><th scope="row">{name}</th>{numbers}</tr>'
