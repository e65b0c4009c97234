"""What quantization did to each layer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memprec._units import format_bytes

__all__ = ["LayerRow", "QuantizationReport"]


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Attributes:
        name: Name in the model.
        kind: Class of the float layer.
        scheme: What was done, or ``None`` if the layer stays in floating point.
        sqnr_db: Signal-to-quantization-noise ratio of the weight, ``10 log10(‖W‖² / ‖W - Ŵ‖²)``, in dB; infinite if
            the weight came through exactly.
        output_error: ``‖Y - Ŷ‖ / ‖Y‖`` on the calibration batches, each layer fed with the float model's activations;
            ``None`` without batches.
        bytes_before: Parameters and buffers of the float layer; a tied weight counts where it is met first.
        bytes_after: The same of the int8 layer.
        outlier_columns: Input features that reached the outlier threshold in the calibration batches.
        reason: Why the layer was left.
        note: What a method that learns did not do as asked, and whether all batches reached the layer.
    """

    name: str
    kind: str
    scheme: str | None = None
    sqnr_db: float | None = None
    output_error: float | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    outlier_columns: int | None = None
    reason: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class QuantizationReport:
    """One row for each layer that was quantized or could have been, and totals of the model.

    Attributes:
        method: Name of the method.
        layers: Rows in the order of the model.
        bytes_before: Parameters and buffers of the whole model before; storages that are shared count once.
        bytes_after: The same after.
        outliers: Shares of outliers over the model, or ``None`` without threshold or batches;
            see :meth:`~lightning_memprec.quantization.outliers.OutlierStatistics.to_dict`.
    """

    method: str
    layers: tuple[LayerRow, ...]
    bytes_before: int
    bytes_after: int
    outliers: dict[str, Any] | None = None

    @property
    def quantized(self) -> tuple[LayerRow, ...]:
        """Rows of the layers that hold integers now."""
        return tuple(row for row in self.layers if row.reason is None)

    @property
    def skipped(self) -> tuple[LayerRow, ...]:
        """Rows of the layers that stay in floating point."""
        return tuple(row for row in self.layers if row.reason is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite ratio is ``None``."""
        rows = [asdict(row) for row in self.layers]
        for row in rows:
            if row["sqnr_db"] is not None and math.isinf(row["sqnr_db"]):
                row["sqnr_db"] = None
        return {
            "method": self.method,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "outliers": self.outliers,
            "layers": rows,
        }

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.layers] + [5])
        lines = [
            f"{self.method}: {len(self.quantized)} layers quantized, {len(self.skipped)} left,"
            f" {format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}",
            f"{'layer':{width}s}  SQNR dB  {'error':>8s}  outliers  {'before':>11s}  {'after':>11s}  scheme",
        ]
        for row in self.layers:
            ratio = "" if row.sqnr_db is None else f"{row.sqnr_db:.1f}"
            error = "" if row.output_error is None else f"{row.output_error:.2%}"
            columns = "" if row.outlier_columns is None else str(row.outlier_columns)
            what = row.scheme if row.reason is None else f"left: {row.reason}"
            what = what if row.note is None else f"{what}; {row.note}"
            lines.append(
                f"{row.name:{width}s}  {ratio:>7s}  {error:>8s}  {columns:>8s}"
                f"  {format_bytes(row.bytes_before):>11s}  {format_bytes(row.bytes_after):>11s}  {what}"
            )
        return "\n".join(lines)
