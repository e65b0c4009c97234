"""How much of a metric quantization may cost, and which layers pay for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from lightning_memprec._units import format_bytes
from lightning_memprec.quantization.report import LayerRow, QuantizationReport

__all__ = ["Attempt", "change_of", "degradation_of", "search", "table_of", "worst_layers"]


@dataclass(frozen=True)
class Attempt:
    """One quantized model, measured.

    Args:
        kept: Layers that stay in floating point to hold the limit, worst first.
        report: What quantization did; a table of its own, so not among what ``repr`` shows.
        metrics: Validation metrics.
        degradation: Loss of the monitored metric; ``None`` if nothing is monitored, or its mode is not known.
    """

    kept: tuple[str, ...]
    report: QuantizationReport = field(repr=False)
    metrics: dict[str, float]
    degradation: float | None = None


def degradation_of(
    before: float, after: float, mode: Literal["min", "max"], kind: Literal["relative", "absolute"]
) -> float:
    """Return by how much a metric became worse; negative if it became better.

    Args:
        before: Metric of the float model.
        after: Metric of the quantized model.
        mode: Whether a larger metric is better.
        kind: The difference, or its share of ``|before|``.

    Returns:
        The loss; infinite if the metric is not a number, or was 0 and became worse by any amount, relatively.

    Example:
        >>> round(degradation_of(0.80, 0.76, "max", "relative"), 3)
        0.05
    """
    loss = before - after if mode == "max" else after - before
    if math.isnan(loss):
        return math.inf
    if kind == "absolute" or loss == 0:
        return loss
    return loss / abs(before) if before else math.copysign(math.inf, loss)


def worst_layers(report: QuantizationReport) -> list[str]:
    """Order quantized layers by how much of them was lost: the error of the output if it is known, else of the weight.

    Args:
        report: Report of the model with all layers quantized.
    """

    def loss(row: LayerRow) -> float:
        if row.output_error is not None:
            return row.output_error
        return 0.0 if row.sqnr_db is None else 10 ** (-row.sqnr_db / 20)

    return [row.name for row in sorted(report.quantized, key=loss, reverse=True)]


def search(attempt: Callable[[tuple[str, ...]], Attempt], limit: float, budget: int) -> Iterator[Attempt]:
    """Keep one more of the worst layers in floating point until the limit holds.

    Args:
        attempt: Quantizes all but some layers, and measures.
        limit: Largest degradation.
        budget: How many layers may be kept.

    Yields:
        Each attempt; the last holds the limit, or nothing more may be kept.
    """
    current = attempt(())
    yield current
    order = worst_layers(current.report)
    for count in range(1, min(budget, len(order) - 1) + 1):
        if current.degradation is None or current.degradation <= limit:
            return
        current = attempt(tuple(order[:count]))
        yield current


def table_of(attempts: list[Attempt], monitor: str, before: float) -> str:
    """Write what was tried as a table.

    Args:
        attempts: In their order.
        monitor: Name of the metric.
        before: Its value for the float model.
    """
    lines = [f"{monitor:>24}  degradation  in floating point", f"{before:>24.6g}  {'-':>11}  all layers"]
    for attempt in attempts:
        kept = ", ".join(attempt.kept) or "none"
        value = attempt.metrics.get(monitor, math.nan)
        lines.append(f"{value:>24.6g}  {attempt.degradation or 0.0:>11.4g}  {kept}")
    return "\n".join(lines)


def change_of(
    attempt: Attempt, before: dict[str, float], monitor: str | None, mode: Literal["min", "max"] | None
) -> str:
    """Write what became of the size and of the monitored metric, or of all metrics if none is monitored.

    Args:
        attempt: The model that is exported.
        before: Metrics of the float model.
        monitor: Name of the metric.
        mode: Whether a larger metric is better, if that is known.
    """
    report = attempt.report
    parts = [f"{format_bytes(report.bytes_before)} -> {format_bytes(report.bytes_after)}"]
    for name, value in before.items():
        if monitor in (None, name):
            parts.append(f"{name} {value:.5g} -> {attempt.metrics[name]:.5g}")
    if mode is not None:
        parts.append(f"mode {mode}")
    return ", ".join(parts)
