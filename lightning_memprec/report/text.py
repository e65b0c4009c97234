"""The report as plain text: the default on every screen and in every log file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_memprec._text import WIDTH, wrap
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

    from lightning_memprec.memory.result import MemoryEstimate, Remedy
    from lightning_memprec.report.verdict import Verdict

__all__ = ["format_estimate"]

_BAR = 24


def format_estimate(
    estimate: MemoryEstimate,
    verdict: Verdict | None = None,
    remedies: Sequence[Remedy] = (),
    notes: Sequence[str] = (),
) -> str:
    """Write an estimate as one plain text table.

    Args:
        estimate: What the run needs.
        verdict: Whether it fits; ``None`` leaves capacity and verdict out.
        remedies: Changes to show below the table.
        notes: Remarks to put above the assumptions.

    Returns:
        Text in ASCII, lines of at most 88 characters where names allow, no newline at the end.
    """
    lines = [title(estimate), "=" * WIDTH, *_parts(estimate), "-" * WIDTH]
    rows = capacity_rows(estimate, verdict)
    lines += [f"  {name:<32}{value:>14}" for name, value in rows]
    if verdict is not None:
        lines += wrap(verdict_sentence(verdict), "  ")
        lines += wrap(largest_batch_sentence(verdict), "  ")
    lines += ["", *wrap(peak_sentence(estimate), "  ")]
    phases = phase_rows(estimate)
    simulated = any(reserved is not None for _, _, reserved in phases)  # Only CUDA's allocator is.
    lines += ["", "  Phases" + " " * 34 + "allocated" + "      reserved" * simulated]
    lines += [_phase(*row) for row in phases]
    modules = module_rows(estimate)
    if modules:
        lines += ["", "  Largest modules at the peak"]
        lines += [
            f"    {f'{name} ({kind})':<44}{format_bytes(size):>14}  {most}"
            for name, kind, size, most in modules
        ]
    if remedies:
        lines += ["", "  What would help"]
        for number, (text, how) in enumerate(remedy_lines(tuple(remedies)), start=1):
            lines += wrap(text, f"    {number}. ")
            lines += [f"       {line}" for line in how.splitlines()]
    if estimate.host is not None:
        lines += ["", "  Beside the device"]
        for line in host_lines(estimate.host):
            lines += wrap(line, "    ")
    remarks = remark_lines(estimate, verdict, notes)
    if remarks:
        lines += ["", "  Assumed"]
        for remark in remarks:
            lines += wrap(remark, "    - ")
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def _parts(estimate: MemoryEstimate) -> list[str]:
    total = estimate.minimum_device_bytes or 1
    lines = []
    for name, size in part_rows(estimate):
        bar = "#" * round(_BAR * min(1.0, size / total))  # A file may hold parts that do not add up.
        lines.append(f"  {name:<32}{format_bytes(size):>14}{size / total:>8.1%}  {bar}".rstrip())
    return lines


def _phase(name: str, allocated_bytes: int, reserved_bytes: int | None) -> str:
    reserved = "" if reserved_bytes is None else format_bytes(reserved_bytes)
    return f"    {name:<32}{format_bytes(allocated_bytes):>13}{reserved:>14}".rstrip()
