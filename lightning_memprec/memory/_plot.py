"""Draw an estimate with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from lightning_memprec._optional import require
from lightning_memprec._units import GIB, MIB
from lightning_memprec.memory.modules_alike import modules_alike
from lightning_memprec.memory.result import PlotKind

if TYPE_CHECKING:
    from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["plot_estimate"]

_MODULES = 12  # More names than these do not fit beside a chart of this height.
_SIZES = {
    "timeline": (8.0, 3.8),
    "modules": (8.0, 3.8),
    "measured": (6.0, 3.8),
}  # Of a new figure, in inches.


def plot_estimate(
    estimate: MemoryEstimate, ax: Any, kind: PlotKind, measured: int | Sequence[int] | None
) -> Any:
    """Draw an estimate; see :meth:`MemoryEstimate.plot`."""
    if kind not in get_args(PlotKind):
        raise ValueError(f"`kind` must be one of {list(get_args(PlotKind))}, got {kind!r}.")
    series = [measured] if isinstance(measured, int) else list(measured or ())
    if kind == "measured" and not series:
        raise ValueError(
            "`kind='measured'` needs `measured`: the largest allocation of a real run in bytes, or one for each step."
        )
    pyplot = require("matplotlib.pyplot", extra="plot", purpose="drawing an estimate")
    if ax is None:
        _, ax = pyplot.subplots(figsize=_SIZES[kind], layout="constrained")
    if kind == "timeline":
        _timeline(estimate, ax, max(series, default=None))
    elif kind == "modules":
        _modules(estimate, ax)
    else:
        _measured(estimate, ax, series)
    return ax.figure, ax


def _unit(size_bytes: int) -> tuple[int, str]:
    return (GIB, "GiB") if size_bytes >= GIB else (MIB, "MiB")


def _timeline(estimate: MemoryEstimate, ax: Any, measured: int | None) -> None:
    """Stack the parts over the events, mark the peak, and name the phases that are wide enough below."""
    points = estimate.timeline
    factor, unit = _unit(estimate.peak_allocated_bytes)
    x = [point.event for point in points]
    items = [point.breakdown.items() for point in points]
    below = [0.0] * len(points)
    for number, (name, _) in enumerate(estimate.breakdown.items()):
        sizes = [item[number][1] / factor for item in items]
        if any(sizes):
            above = [low + size for low, size in zip(below, sizes, strict=True)]
            ax.fill_between(x, below, above, step="post", color=f"C{number}", linewidth=0, label=name)
            below = above
    ax.step(x, below, where="post", color="black", linewidth=0.6)
    if points:
        peak = max(points, key=lambda point: point.allocated_bytes)
        height = peak.allocated_bytes / factor
        ax.plot(peak.event, height, "o", color="black", markersize=5)
        left = peak.event > (x[0] + x[-1]) / 2
        ax.annotate(
            f"peak {height:.2f} {unit}, {peak.phase.replace('_', ' ')}",
            (peak.event, height),
            (-8 if left else 8, 4),
            textcoords="offset points",
            ha="right" if left else "left",
        )
    if measured is not None:
        ax.axhline(
            measured / factor, color="black", linestyle="--", label=f"measured {measured / factor:.2f} {unit}"
        )
    ax.set_xlabel("births and deaths of tensors, in order")
    ax.set_ylabel(f"allocated ({unit})")
    ax.set_xlim(min(x, default=0), max(x, default=1))
    ax.set_ylim(0, 1.12 * max([*below, (measured or 0) / factor], default=1) or 1)
    if ax.get_legend_handles_labels()[1]:
        # Above the axes: inside it would hide a peak.
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize="small", ncols=4, frameon=False)


def _modules(estimate: MemoryEstimate, ax: Any) -> None:
    """Draw what the largest modules hold at the peak, part by part, the largest on top."""
    groups = modules_alike(estimate.by_module)[:_MODULES][::-1]
    largest = [module for _, module in groups]
    factor, unit = _unit(max((module.breakdown.total_bytes for module in largest), default=0))
    names = [f"{module.name or '(root)'}{f' (x {count})' if count > 1 else ''}" for count, module in groups]
    places = range(len(largest))  # Not by name: a name twice would be one bar.
    left = [0.0] * len(largest)
    for number, (name, _) in enumerate(estimate.breakdown.items()):
        sizes = [module.breakdown.items()[number][1] / factor for module in largest]
        if any(sizes):
            ax.barh(places, sizes, left=left, color=f"C{number}", label=name)
            left = [start + size for start, size in zip(left, sizes, strict=True)]
    ax.set_yticks(places, names, fontsize="small")
    ax.set_xlabel(f"held at the peak ({unit})")
    if largest:
        ax.legend(loc="lower right", fontsize="small")


def _measured(estimate: MemoryEstimate, ax: Any, measured: list[int]) -> None:
    """Draw predicted and measured peaks: of the whole run, or step by step."""
    factor, unit = _unit(max(estimate.peak_allocated_bytes, *measured))
    predicted = estimate.peak_allocated_bytes
    error = 100 * (predicted - max(measured)) / (max(measured) or 1)
    if len(measured) == 1:
        bars = ax.bar(
            ["predicted", "measured"], [predicted / factor, measured[0] / factor], color=["C0", "C1"]
        )
        ax.bar_label(bars, fmt="%.2f")
    else:
        steps = _predicted_steps(estimate, len(measured))
        x = range(1, len(measured) + 1)
        ax.plot(x, [size / factor for size in steps], color="C0", drawstyle="steps-mid", label="predicted")
        ax.plot(x, [size / factor for size in measured], "o", color="C1", label="measured")
        ax.set_xlabel("optimizer step")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(loc="lower right", fontsize="small")
    ax.set_ylabel(f"most allocated ({unit})")
    ax.set_ylim(0, 1.12 * max(predicted, *measured) / factor or 1)
    ax.set_title(f"error of the predicted peak: {error:+.1f} %", fontsize="medium")


def _predicted_steps(estimate: MemoryEstimate, count: int) -> list[int]:
    """Return the predicted peak of each step; steps after the traced ones are as the last."""
    peaks: dict[int, int] = {}
    for phase in estimate.phases:
        if phase.step >= 0:
            peaks[phase.step] = max(peaks.get(phase.step, 0), phase.peak_allocated_bytes)
    last = max(peaks, default=-1)
    return [peaks.get(min(step, last), estimate.peak_allocated_bytes) for step in range(count)]
