"""An optimizer step whose figures are still on their way to the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lightning_memprec.scaling.readback import Readback
from lightning_memprec.scaling.record import StepRecord
from lightning_memprec.scaling.survey import Findings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lightning_memprec.scaling.survey import Survey

__all__ = ["Loss", "PendingStep"]


class Loss(NamedTuple):
    """A loss on its way into the backward pass.

    Args:
        batch_idx: Batch it belongs to.
        value: The scaled loss, detached, shape ``()``.
    """

    batch_idx: int
    value: Tensor


@dataclass(slots=True)
class PendingStep:
    """One optimizer step, from just before it until its figures are read.

    Args:
        step: Optimizer steps before this one.
        batch_idx: Batch on which the optimizer steps.
        optimizer: Its index.
        is_fused: Whether the optimizer unscales and skips inside its kernel.
        is_unscaled: Whether its gradients were unscaled when they were looked at.
        has_scaler: Whether a scaler decides over this step.
        has_hooks: Whether the optimizer tells when it has stepped.
        epoch: Epoch of the batch.
    """

    step: int
    batch_idx: int
    optimizer: int = 0
    is_fused: bool = False
    is_unscaled: bool = True
    has_scaler: bool = True
    has_hooks: bool = True
    epoch: int = 0
    has_run: bool = False
    losses: list[Loss] = field(default_factory=list)
    is_due: bool = False
    is_old: bool = False
    survey: Survey | None = None
    found_inf: Readback | None = None
    clip_norm: Readback | None = None
    backward_norm: Readback | None = None
    scale_after: Readback | None = None
    _values: Readback | None = None
    _has_scale: bool = False

    def send(self, scale: Tensor | None, losses: Sequence[Loss]) -> None:
        """Start the copies of what is known before the step.

        Args:
            scale: The scale, float32, shape ``()``; ``None`` without a scaler.
            losses: Scaled losses whose gradients the step uses.
        """
        values = ([] if scale is None else [scale]) + [loss.value for loss in losses]
        self.losses, self._has_scale = list(losses), scale is not None
        self._values = Readback(values) if values else None

    @property
    def waits(self) -> bool:
        """Whether reading now could wait for the device.

        A scaler asks the device before it lets an optimizer step, unless that is fused: all copies that were
        started before the step have arrived then.
        """
        return self.is_fused or not self.has_scaler

    def can_be_read(self, *, every: bool) -> bool:
        """Tell whether the figures are there, or with ``every`` whether the step itself is over."""
        return self.is_old or (self.has_run if every else not self.waits)

    def is_skipped(self) -> bool | None:
        """Tell whether the scaler left the step out; ``None`` if nothing tells. Waits if the step is fused."""
        if not self.has_scaler or (self.has_run and not self.is_fused):
            return False
        if self.found_inf is not None:
            return self.found_inf.read()[0] > 0
        if self.has_hooks and self.is_unscaled and not self.is_fused:
            return True
        if self.scale_after is None or self._values is None:
            return None
        return self.scale_after.read()[0] < self._values.read()[0]

    @property
    def is_left_out(self) -> bool:
        """Whether nobody tried the step: Lightning does not, where `training_step` returned None."""
        if (
            not self.has_scaler
            or not self.has_hooks
            or self.has_run
            or (self.is_unscaled and not self.is_fused)
        ):
            return False
        return self.is_fused or not self.is_skipped()

    def follow_scale(self, scale: Tensor | None) -> None:
        """Take the scale after the step, for optimizers of which nothing else tells whether they were skipped.

        Args:
            scale: The scale, float32, shape ``()``.
        """
        told = self.found_inf is not None or (self.has_hooks and self.is_unscaled and not self.is_fused)
        if (
            self.has_scaler
            and not told
            and self._has_scale
            and self.scale_after is None
            and scale is not None
        ):
            self.scale_after = Readback([scale])

    def resolve(self, name_of: Callable[[Tensor], str]) -> StepRecord:
        """Return the record of the step, once its figures have arrived.

        Args:
            name_of: Names a parameter.
        """
        values = self._values.read() if self._values is not None else []
        scale = values[0] if self._has_scale else None
        loss, bad_batch_idx = self._loss(values[self._has_scale :], scale)
        findings = self.survey.read(name_of) if self.survey is not None else Findings()
        norm = findings.grad_norm
        if self.clip_norm is not None:
            norm = self.clip_norm.read()[0]
        elif norm is not None and scale and not self.is_unscaled:
            norm /= scale
        return StepRecord(
            step=self.step,
            batch_idx=self.batch_idx,
            scale=scale,
            skipped=self.is_skipped(),
            optimizer=self.optimizer,
            loss=loss,
            bad_batch_idx=bad_batch_idx,
            grad_norm=norm,
            backward_norm=None if self.backward_norm is None else self.backward_norm.read()[0],
            param_norm=findings.param_norm,
            param_name=findings.param_name,
            culprit=findings.culprit,
            epoch=self.epoch,
        )

    def _loss(self, values: list[float], scale: float | None) -> tuple[float | None, int | None]:
        """Undo the scale; a scale of 0 leaves nothing to undo."""
        if not values or scale == 0:
            return None, None
        for value, loss in zip(values, self.losses, strict=True):
            if not math.isfinite(value):
                # FSDP's scaler casts the scaled loss back to FP16, which overflows at a high scale. That is
                # the scale's doing and not the loss's.
                overflow = math.isinf(value) and scale is not None and loss.value.itemsize < 4
                return (None, None) if overflow else (value, loss.batch_idx)
        return sum(values) / (scale or 1.0), None
