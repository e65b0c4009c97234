"""What is known about one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Event", "StepRecord"]


class StepRecord(NamedTuple):
    """One optimizer step under observation.

    Args:
        step: Number of optimizer steps before this one, skipped ones included.
        batch_idx: Batch on which the optimizer stepped, counted within its epoch.
        scale: Loss scale by which this step's gradients were multiplied; ``None`` without a scaler.
        skipped: Whether the scaler left the step out; ``None`` if that is not known.
        optimizer: Index of the optimizer.
        loss: Unscaled loss that was backpropagated, summed over the accumulated batches; ``None`` if unknown.
        bad_batch_idx: First accumulated batch whose loss was not finite.
        grad_norm: L2 norm of the unscaled gradients before clipping; ``None`` if it was not taken.
        backward_norm: L2 norm of the scaled gradients right after the backward pass; ``None`` if it was not
            taken.
        param_norm: Largest L2 norm of a parameter; ``None`` if it was not taken.
        param_name: The parameter with that norm.
        culprit: First parameter with a non-finite gradient, if it was looked up.
        epoch: Epoch of the batch.
    """

    step: int
    batch_idx: int
    scale: float | None = None
    skipped: bool | None = False
    optimizer: int = 0
    loss: float | None = None
    bad_batch_idx: int | None = None
    grad_norm: float | None = None
    backward_norm: float | None = None
    param_norm: float | None = None
    param_name: str | None = None
    culprit: str | None = None
    epoch: int = 0


@dataclass(frozen=True)
class Event:
    """Something worth telling about a run.

    Args:
        kind: Which diagnosis of :data:`~lightning_memprec.scaling.diagnosis.DIAGNOSES`.
        severity: ``"info"`` for what is normal, ``"warning"`` for what needs a person.
        step: Optimizer step at which it was seen.
        batch_idx: Batch at which it was seen; ``None`` outside the training loop.
        message: What was seen, what it means, and what to do first, second and third.
        figures: The numbers and names in the message.
    """

    kind: str
    severity: str
    step: int
    batch_idx: int | None
    message: str
    figures: dict[str, float | int | str | None]
