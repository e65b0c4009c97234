"""The report in colour, where rich is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memprec._optional import require
from lightning_memprec._units import format_bytes
from lightning_memprec.report.content import (
    capacity_rows,
    host_lines,
    largest_batch_sentence,
    module_rows,
    part_rows,
    peak_sentence,
    phase_rows,
    remark_lines,
    remedy_lines,
    title,
    verdict_sentence,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group
    from rich.table import Table

    from lightning_memprec.memory.result import MemoryEstimate, Remedy
    from lightning_memprec.report.verdict import Verdict

__all__ = ["render_estimate"]

_COLORS = {"fits": "green", "tight": "yellow", "overflow": "red", "undetermined": "yellow"}
_BAR = 24


def render_estimate(
    estimate: MemoryEstimate,
    verdict: Verdict | None = None,
    remedies: Sequence[Remedy] = (),
    notes: Sequence[str] = (),
) -> Group:
    """Write an estimate as a rich renderable with the content of the plain text report.

    Args:
        estimate: What the run needs.
        verdict: Whether it fits; ``None`` leaves capacity and verdict out.
        remedies: Changes to show below the table.
        notes: Remarks to put above the assumptions.

    Raises:
        ModuleNotFoundError: If rich is not installed (extra ``rich``).
    """
    require("rich", extra="rich", purpose="a report in colour")
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    color = _COLORS[verdict.status] if verdict is not None else "cyan"
    blocks: list[Text | Table] = [Text(f"\n{title(estimate)}", style="bold"), _parts(estimate, verdict)]
    if verdict is not None:
        blocks.append(Text(f"\n{verdict_sentence(verdict)}", style=f"bold {color}"))
        blocks += [Text(line) for line in (largest_batch_sentence(verdict),) if line]
    blocks += [Text(f"\n{peak_sentence(estimate)}"), Text("\nPhases", style="bold"), _phases(estimate)]
    modules = Table(box=None, show_header=False)
    for module, kind, size, mostly in module_rows(estimate):
        modules.add_row(Text(f"{module} ({kind})"), Text(format_bytes(size), justify="right"), mostly)
    if modules.row_count:
        blocks += [Text("\nLargest modules at the peak", style="bold"), modules]
    if remedies:
        blocks.append(Text("\nWhat would help", style="bold"))
        for number, (text, how) in enumerate(remedy_lines(tuple(remedies)), start=1):
            blocks += [_hanging(f"  {number}.", text, ""), _hanging("    ", how, "cyan")]
    if estimate.host is not None:
        blocks.append(Text("\nBeside the device", style="bold"))
        blocks += [_hanging(" ", line, "") for line in host_lines(estimate.host)]
    remarks = remark_lines(estimate, verdict, notes)
    if remarks:
        blocks.append(Text("\nAssumed", style="bold"))
        blocks += [_hanging("  -", remark, "dim") for remark in remarks]
    return Group(*blocks)


def _parts(estimate: MemoryEstimate, verdict: Verdict | None) -> Table:
    from rich.table import Table
    from rich.text import Text

    total = estimate.minimum_device_bytes or 1
    parts = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left"):
        parts.add_column(justify=justify)  # type: ignore[arg-type]
    for name, size in part_rows(estimate):
        bar = Text("█" * round(_BAR * min(1.0, size / total)), style="cyan")
        parts.add_row(name, format_bytes(size), f"{size / total:.1%}", bar)
    parts.add_section()
    for name, value in capacity_rows(estimate, verdict):
        parts.add_row(Text(name, style="bold"), Text(value, style="bold"))
    return parts


def _phases(estimate: MemoryEstimate) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    table.add_column()
    table.add_column("allocated", justify="right")
    rows = phase_rows(estimate)
    simulated = any(reserved is not None for _, _, reserved in rows)  # Only CUDA's allocator is.
    if simulated:
        table.add_column("reserved", justify="right")
    for name, allocated, reserved in rows:
        cells = [format_bytes(allocated), "" if reserved is None else format_bytes(reserved)]
        table.add_row(name, *cells[: 1 + simulated])
    return table


def _hanging(lead: str, text: str, style: str) -> Table:
    """Indent the lines that follow as far as the first."""
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_row(Text(lead, style=style), Text(text, style=style))
    return line
