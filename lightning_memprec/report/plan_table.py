"""What fits where, as text, JSON and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_memprec._files.atomic import replacing
from lightning_memprec._optional import require
from lightning_memprec._units import GIB, format_bytes
from lightning_memprec.memory.planning import fewest_devices

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lightning_memprec.memory.planning import PlanCell

    Columns = Sequence[tuple[str, int, list[PlanCell]]]

__all__ = ["check_picture", "format_plan", "plan_as_dict", "plot_plan", "save_picture"]

_FIGURE_WIDTH, _ROW_HEIGHT = 8.0, 0.28  # inches


def format_plan(columns: Columns, strategy: str, safety_margin: float, notes: Sequence[str]) -> str:
    """Lay out a plan as text.

    Args:
        columns: Name, capacity in bytes and cells of each device to plan for. All have the same combinations.
        strategy: What shares a run over several devices.
        safety_margin: Fraction of each capacity to keep free.
        notes: What was assumed.
    """
    # Devices of one kind need the same; others run other kernels and hold another context.
    alike = all(cells == columns[0][2] for _, _, cells in columns)
    needs = ["each needs"] if alike else []
    rows = [["recipe", "devices", "sequence", "batch", *needs, *(name for name, _, _ in columns)]]
    reasons: dict[str, None] = {}
    for cells in zip(*(cells for _, _, cells in columns), strict=True):
        marks = [
            _mark(cell, capacity, safety_margin)
            if alike
            else f"{_need(cell)} {_mark(cell, capacity, safety_margin)}"
            for cell, (_, capacity, _) in zip(cells, columns, strict=True)
        ]
        rows.append([*_labels(cells[0]), *([_need(cells[0])] if alike else []), *marks])
        reasons.update({f"? {cells[0].recipe}: {cell.reason}": None for cell in cells if cell.reason})
    lines = [*_table(rows), ""]
    if len({cell.num_devices for _, _, cells in columns for cell in cells}) > 1:
        lines += [*_fewest(columns, safety_margin), ""]
    if any(cell.num_devices > 1 for _, _, cells in columns for cell in cells):
        lines.append(f"Several devices share the run by `{strategy}`.")
    lines.append(
        f"fits: {safety_margin * 100:.3g} % and more stay free; tight: less; >: a smaller batch needs this already "
        "and fits no device."
    )
    if any(name[:1].isdigit() for name, _, _ in columns):
        lines.append("A plain size is what the run can have: the context of a device is not counted in.")
    return "\n".join([*lines, *reasons, *notes])


def plan_as_dict(columns: Columns, safety_margin: float, notes: Sequence[str]) -> dict[str, Any]:
    """Return a plan as plain values for JSON; see :func:`format_plan`."""
    return {
        "safety_margin": safety_margin,
        "notes": list(notes),
        "devices": [
            {
                "name": name,
                "capacity_bytes": capacity,
                "cells": [{**cell.to_dict(), "fits": cell.fits(capacity, safety_margin)} for cell in cells],
                "fewest_devices": [
                    {"recipe": recipe, "batch": batch, "sequence": sequence, "num_devices": count}
                    for (recipe, batch, sequence), count in fewest_devices(
                        cells, capacity, safety_margin
                    ).items()
                ],
            }
            for name, capacity, cells in columns
        ],
    }


def plot_plan(columns: Columns) -> Any:
    """Draw what each combination needs as bars, with a line at each capacity.

    Args:
        columns: See :func:`format_plan`.

    Returns:
        The matplotlib figure.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    require("matplotlib", extra="plot", purpose="drawing a plan")
    from matplotlib.figure import Figure

    cells = [cell for cell in columns[0][2] if cell.basis == "traced" and cell.need_bytes is not None]
    figure = Figure(figsize=(_FIGURE_WIDTH, 1.5 + _ROW_HEIGHT * len(cells)), layout="constrained")
    axes = figure.subplots()
    labels = [_sentence(cell) for cell in cells]
    bars = axes.barh(range(len(cells)), [(cell.need_bytes or 0) / GIB for cell in cells], color="C0")
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize="small")
    axes.set_yticks(range(len(cells)), labels, fontsize="small")
    axes.invert_yaxis()
    for number, (name, capacity, _) in enumerate(columns):
        axes.axvline(capacity / GIB, color=f"C{number + 1}", linestyle="--", label=name)
    axes.margins(x=0.1)
    axes.set_xlabel("GiB that each device must offer")
    axes.legend(fontsize="small")
    return figure


def check_picture(path: Path) -> None:
    """Refuse a file that no picture can be written to.

    Args:
        path: The file; its folder is made.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If its ending names no format of pictures.
        OSError: If the folder cannot be made.
    """
    require("matplotlib", extra="plot", purpose="drawing a plan")
    from matplotlib.figure import Figure

    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{str(path)!r} names no format of pictures. End it in one of: {', '.join(known)}.")
    path.parent.mkdir(parents=True, exist_ok=True)


def save_picture(path: Path, columns: Columns) -> None:
    """Write :func:`plot_plan` to a file, whole or not at all.

    Args:
        path: The file, see :func:`check_picture`.
        columns: See :func:`format_plan`.

    Raises:
        OSError: If it cannot be written.
    """
    with replacing(path) as file:
        plot_plan(columns).savefig(file, format=path.suffix[1:].lower())


def _fewest(columns: Columns, safety_margin: float) -> list[str]:
    counts = [fewest_devices(cells, capacity, safety_margin) for _, capacity, cells in columns]
    rows = [["fewest devices", "sequence", "batch", *(name for name, _, _ in columns)]]
    for recipe, batch, sequence in counts[0]:
        found = [count[recipe, batch, sequence] for count in counts]
        rows.append(
            [recipe, _text(sequence), _text(batch), *("none tried" if n is None else str(n) for n in found)]
        )
    return _table(rows)


def _labels(cell: PlanCell) -> list[str]:
    return [cell.recipe, str(cell.num_devices), _text(cell.sequence), _text(cell.batch)]


def _sentence(cell: PlanCell) -> str:
    parts = [cell.recipe, f"{cell.num_devices} devices" if cell.num_devices > 1 else ""]
    parts += [f"{name} {value}" for name, value in (("batch", cell.batch), ("seq", cell.sequence)) if value]
    return " ".join(filter(None, parts))


def _text(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _need(cell: PlanCell) -> str:
    if cell.need_bytes is None:
        return ""
    return f"{'> ' if cell.basis == 'implied' else ''}{format_bytes(cell.need_bytes)}"


def _mark(cell: PlanCell, capacity_bytes: int, safety_margin: float) -> str:
    if cell.need_bytes is None:
        return "?"
    if cell.fits(capacity_bytes, safety_margin):
        return "fits"
    return "tight" if cell.fits(capacity_bytes) else "no"


def _table(rows: list[list[str]]) -> list[str]:
    """Align columns, the first to the left; columns without entries are left out."""
    kept = [k for k in range(len(rows[0])) if any(row[k] for row in rows[1:])]
    widths = [max(len(row[k]) for row in rows) for k in kept]
    lines = []
    for row in rows:
        cells = [row[k].ljust(w) if k == 0 else row[k].rjust(w) for k, w in zip(kept, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
