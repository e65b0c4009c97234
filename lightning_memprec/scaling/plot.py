"""Draw the scale, the skipped steps and the gradient norm of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning_memprec._optional import require

if TYPE_CHECKING:
    from lightning_memprec.scaling.history import History

__all__ = ["plot_history"]


def plot_history(history: History, ax: Any = None) -> Any:
    """Draw scale and gradient norm over steps on logarithmic axes, with a mark at each skipped step.

    Args:
        history: What to draw.
        ax: Matplotlib axes for the scale, the norm gets a twin of it; a new figure is made if ``None``.

    Returns:
        ``(figure, axes)``.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    pyplot = require("matplotlib.pyplot", extra="plot", purpose="drawing a run's loss scale")
    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    lines = []
    # A scale of 0 has no place on a logarithmic axis; it ends the line.
    scales = [(point.step, point.scale) for point in history.points if point.scale]
    if scales:
        lines += ax.step(*zip(*scales, strict=True), where="post", color="C0", label="loss scale")
        ax.set_yscale("log", base=2)
    skips = [(point.step, point.scale) for point in history.points if point.skipped and point.scale]
    if skips:
        lines += ax.plot(*zip(*skips, strict=True), "x", color="C3", label="skipped step")
    norms = [
        (point.step, point.grad_norm)
        for point in history.points
        if point.grad_norm and math.isfinite(point.grad_norm)
    ]
    if norms:
        other = ax.twinx()
        lines += other.plot(
            *zip(*norms, strict=True), ".-", color="C2", linewidth=0.8, markersize=3, label="gradient norm"
        )
        other.set_yscale("log")
        other.set_ylabel("unscaled gradient norm")
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("loss scale")
    if lines:
        ax.legend(handles=lines, loc="center left", fontsize="small")
    return ax.figure, ax
