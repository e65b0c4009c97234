"""Predicted against measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_memprec._units import format_bytes
from lightning_memprec.memory.observe.reading import Reading
from lightning_memprec.memory.observe.residual import applied_ratio
from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["Comparison", "Part", "compare", "expected_peak"]

# Parts of a breakdown that are the same all through a step, so that walking tensors after it measures them.
_STEADY = ("parameters", "buffers", "optimizer states")
_REST = "gradients, activations and the rest"
# Phases that a run may not have reached yet when it is measured.
_OCCASIONAL = ("sanity_validation", "validation", "checkpoint_save", "resume")


@dataclass(frozen=True)
class Part:
    """One part of the memory, in bytes.

    Args:
        name: Its name in a breakdown.
        predicted_bytes: As estimated, at the peak.
        measured_bytes: As measured.
    """

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """What was predicted too much, as a fraction of what was measured."""
        return (self.predicted_bytes - self.measured_bytes) / max(1, self.measured_bytes)

    def __str__(self) -> str:
        return f"{self.name} {format_bytes(self.predicted_bytes)} / {format_bytes(self.measured_bytes)}"


@dataclass(frozen=True)
class Comparison:
    """What was predicted for a run, and what it took.

    Args:
        step: Optimizer steps after which it was measured.
        peak: Largest sum of live tensors.
        reserved: What the allocator holds at its peak; ``None`` where one of the two is unknown.
        outside: What the process holds beside the allocator; ``None`` likewise.
        parts: Parts of the peak.
        calibration: Ratio of measured to traced memory of an earlier run that the prediction includes.
    """

    step: int
    peak: Part
    reserved: Part | None
    outside: Part | None
    parts: tuple[Part, ...]
    calibration: float = 1.0

    @property
    def error(self) -> float:
        """Error of the predicted peak, as a fraction of the measured one; negative if it was too low."""
        return self.peak.error

    @property
    def ratio(self) -> float:
        """Measured peak by traced peak: what the next estimate of the same run is to be multiplied by."""
        return self.calibration * self.peak.measured_bytes / max(1, self.peak.predicted_bytes)

    @property
    def worst(self) -> Part:
        """The part with the largest error in bytes."""
        return max(self.parts, key=lambda part: abs(part.predicted_bytes - part.measured_bytes))

    def __str__(self) -> str:
        rows = [*self.parts, *(part for part in (self.reserved, self.outside) if part is not None)]
        return (
            f"Predicted {format_bytes(self.peak.predicted_bytes)}, measured "
            f"{format_bytes(self.peak.measured_bytes)} ({self.error:+.1%}). Predicted / measured: "
            f"{'; '.join(map(str, rows))}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**asdict(self), "error": self.error, "ratio": self.ratio}


def expected_peak(estimate: MemoryEstimate, occasional: Collection[str]) -> tuple[int, int | None]:
    """Return the predicted peaks, allocated and reserved, of the phases that a run has reached.

    Args:
        estimate: The prediction.
        occasional: Which phases it has reached of those outside the training steps: ``"sanity_validation"``,
            ``"validation"``, ``"checkpoint_save"``, ``"resume"``.
    """
    left_out = set(_OCCASIONAL) - set(occasional)
    allocated, reserved = estimate.peak_allocated_bytes, estimate.peak_reserved_bytes
    reached = [phase for phase in estimate.phases if phase.name not in left_out]
    if not reached or max(reached, key=lambda p: p.peak_allocated_bytes).peak_allocated_bytes == max(
        phase.peak_allocated_bytes for phase in estimate.phases
    ):
        return allocated, reserved
    ratio = applied_ratio(estimate)
    held = [phase.peak_reserved_bytes for phase in reached if phase.peak_reserved_bytes is not None]
    peak = max(phase.peak_allocated_bytes for phase in reached)
    return int(peak * ratio), int(max(held) * ratio) if held else None


def compare(
    estimate: MemoryEstimate,
    reading: Reading,
    parts: Mapping[str, int],
    *,
    step: int,
    occasional: Collection[str] = (),
    foreign_bytes: int = 0,
) -> Comparison:
    """Hold a prediction against what a device tells.

    Args:
        estimate: The prediction.
        reading: What the device tells; its peak must be known.
        parts: What :func:`~lightning_memprec.memory.observe.parts.measure_parts` found.
        step: Optimizer steps made.
        occasional: See :func:`expected_peak`.
        foreign_bytes: What the process held of the device before the run; it is taken off.
    """
    expected, expected_reserved = expected_peak(estimate, occasional)
    peak = Part("peak", expected, (reading.peak_allocated_bytes or 0) - foreign_bytes)
    predicted = dict(estimate.breakdown.items())
    steady = [Part(name, predicted[name], parts[name]) for name in _STEADY]
    rest = Part(
        _REST,
        peak.predicted_bytes - sum(part.predicted_bytes for part in steady),
        peak.measured_bytes - sum(part.measured_bytes for part in steady),
    )
    reserved = outside = None
    if expected_reserved is not None and reading.peak_reserved_bytes is not None:
        reserved = Part(
            "reserved by the allocator", expected_reserved, reading.peak_reserved_bytes - foreign_bytes
        )
    if reading.outside_allocator_bytes is not None:
        outside = Part(
            "beside the allocator", estimate.outside_allocator_bytes, reading.outside_allocator_bytes
        )
    known = tuple(part for part in (*steady, rest) if part.predicted_bytes or part.measured_bytes)
    return Comparison(step, peak, reserved, outside, known, applied_ratio(estimate))
