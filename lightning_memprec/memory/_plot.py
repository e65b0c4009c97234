"""Draw an estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_memprec._optional import require
from lightning_memprec._units import GIB, MIB

if TYPE_CHECKING:
    from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["plot_timeline"]


def plot_timeline(estimate: MemoryEstimate, ax: Any = None) -> Any:
    """Draw the allocation over the traced events, one color a phase.

    Args:
        estimate: What to draw.
        ax: Matplotlib axes; a new figure is made if ``None``.

    Returns:
        ``(figure, axes)``.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    pyplot = require("matplotlib.pyplot", extra="plot", purpose="drawing an estimate")
    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    factor, unit = (GIB, "GiB") if estimate.peak_allocated_bytes >= GIB else (MIB, "MiB")
    points = estimate.timeline
    x = [point.event for point in points]
    y = [point.allocated_bytes / factor for point in points]
    names = list(dict.fromkeys(point.phase for point in points))
    for number, name in enumerate(names):
        inside = [point.phase == name for point in points]
        ax.fill_between(
            x, y, where=inside, step="post", color=f"C{number}", alpha=0.6, label=name.replace("_", " ")
        )
    ax.step(x, y, where="post", color="black", linewidth=0.6)
    ax.set_xlabel("births and deaths of tensors, in order")
    ax.set_ylabel(f"allocated ({unit})")
    ax.set_xlim(min(x, default=0), max(x, default=1))
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper left", fontsize="small", ncols=3)
    return ax.figure, ax
