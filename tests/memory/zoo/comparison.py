"""Estimate beside reality, for one case."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memprec.memory.estimate import estimate_memory
from tests.memory.zoo.case import Case
from tests.memory.zoo.reference import Reality, measure

__all__ = ["Comparison", "compare", "estimate_case"]


@dataclass(frozen=True)
class Comparison:
    """One row of the accuracy table; errors are fractions of reality, positive where the estimate is high."""

    case: Case
    real: Reality
    estimated_peak_bytes: int

    @property
    def error(self) -> float:
        """Error of the whole peak."""
        return (self.estimated_peak_bytes - self.real.peak_bytes) / self.real.peak_bytes

    @property
    def error_above_fixed(self) -> float:
        """Error of the part above parameters, buffers, gradients and optimizer states."""
        return (self.estimated_peak_bytes - self.real.peak_bytes) / (
            self.real.peak_bytes - self.real.fixed_bytes
        )


def estimate_case(case: Case) -> int:
    """Return the estimated peak of a case in bytes."""
    module, batch = case.make()
    estimate = estimate_memory(
        module,
        batch,
        optimizer=case.optimizer,
        loss=case.loss,
        precision=case.precision,
        device="cpu",
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm=case.clip_algorithm,
    )
    return estimate.peak_allocated_bytes


def compare(case: Case) -> Comparison:
    """Run a case for real and estimate it."""
    return Comparison(case, measure(case), estimate_case(case))
