"""What losses, gradient norms and the order of calls say."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprec.scaling.conditions import Conditions
    from lightning_memprec.scaling.record import StepRecord

__all__ = ["CLIP_TOLERANCE", "PERSISTENT_LOSSES", "RISING_RATIO", "LossJudge", "NormJudge", "OrderJudge"]

# One bad batch passes; this many in a row is every batch. As many finite ones in a row end the condition.
PERSISTENT_LOSSES = 8
# Gradient norms vary by small factors from batch to batch. Tenfold, several times running, is a trend, judged
# against a median of enough norms to stand firm.
RISING_RATIO = 10.0
_RISING_STEPS, _MIN_NORMS = 3, 16
# Two norms of exactly 0 in a row: one could be a batch without targets.
_ZERO_NORMS = 2
# `clip_grad_norm_` leaves max_norm * norm / (norm + 1e-6); FP32 sums over millions of elements agree to 1e-3.
CLIP_TOLERANCE = 1e-3


class LossJudge:
    """Watches for losses that are not finite.

    Args:
        conditions: What holds at the moment.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self.bad = 0
        self.good = 0

    def observe(self, record: StepRecord) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in a step; yield kinds of events with their figures."""
        if record.loss is None:
            return
        bad = not math.isfinite(record.loss)
        self.bad, self.good = (self.bad + 1, 0) if bad else (0, self.good + 1)
        over = self.good >= PERSISTENT_LOSSES
        if self._conditions.switch("non_finite_loss", on=bad, off=over):
            where = record.batch_idx if record.bad_batch_idx is None else record.bad_batch_idx
            unguarded = (
                "" if record.scale is not None else " Without a scaler the step was taken all the same."
            )
            figures = {
                "bad_batch_idx": where,
                "epoch": record.epoch,
                "culprit": record.culprit,
                "unguarded": unguarded,
            }
            yield "non_finite_loss", {"loss": record.loss, **figures}
        lasting = self.bad >= PERSISTENT_LOSSES
        if self._conditions.switch("loss_stays_non_finite", on=lasting, off=over):
            yield "loss_stays_non_finite", {"consecutive": self.bad, "first_step": record.step - self.bad + 1}

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on after a resume, as plain values."""
        return {"bad": self.bad, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.bad, self.good = int(state["bad"]), int(state["good"])


class NormJudge:
    """Watches the unscaled gradient norm: zero, not finite without a scaler, or rising.

    Args:
        conditions: What holds at the moment.
        window: Number of norms whose median is the measure.
    """

    _COUNTS = ("high", "zeros", "first_batch_idx", "first_epoch")

    def __init__(self, conditions: Conditions, window: int) -> None:
        self._conditions = conditions
        self.norms: deque[float] = deque(maxlen=window)
        self.high = 0
        self.zeros = 0
        self.first_batch_idx = self.first_epoch = 0  # Of the first of the high norms.

    def observe(self, record: StepRecord) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in a step; yield kinds of events with their figures."""
        norm = record.grad_norm
        if norm is None:
            return
        explained = record.loss is not None and not math.isfinite(record.loss)
        figures = {"norm": norm, "loss": record.loss, "culprit": record.culprit, "scale": record.scale}
        finite = math.isfinite(norm)
        unguarded = not finite and record.scale is None and not explained
        if self._conditions.switch("non_finite_gradients", on=unguarded, off=finite):
            yield "non_finite_gradients", figures
        self.zeros = self.zeros + 1 if norm == 0 and record.scale is not None and not explained else 0
        if self._conditions.switch("underflow", on=self.zeros >= _ZERO_NORMS, off=norm > 0):
            yield "underflow", figures
        if finite:
            yield from self._rising(record, norm)

    def _rising(self, record: StepRecord, norm: float) -> Iterator[tuple[str, dict[str, Any]]]:
        median = statistics.median(self.norms) if len(self.norms) >= _MIN_NORMS else 0.0
        count = len(self.norms)
        self.norms.append(norm)
        if median == 0:
            return
        ratio = norm / median
        self.high = self.high + 1 if ratio > RISING_RATIO else 0
        if self.high == 1:
            self.first_batch_idx, self.first_epoch = record.batch_idx, record.epoch
        if self._conditions.switch(
            "norm_rising", on=self.high >= _RISING_STEPS, off=ratio < RISING_RATIO / 2
        ):
            where = {"first_batch_idx": self.first_batch_idx, "first_epoch": self.first_epoch}
            figures = {"norm": norm, "ratio": ratio, "window": count, "consecutive": self.high}
            yield "norm_rising", {**figures, **where}

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on after a resume, as plain values."""
        return {**{name: getattr(self, name) for name in self._COUNTS}, "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.norms = deque(map(float, state["norms"]), maxlen=self.norms.maxlen)
        for name in self._COUNTS:
            setattr(self, name, int(state[name]))


class OrderJudge:
    """Finds what was done in the wrong order, or more often than meant; each is told once in a run.

    Args:
        conditions: What holds at the moment.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._batch_idx = -1
        self._optimizers: set[int] = set()
        self._clipped: list[tuple[float, float]] = []  # Norms before and after.

    def observe(
        self, record: StepRecord, growth_interval: int | None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in a step and the scaler's growth interval; yield kinds of events with their figures."""
        if record.scale is None:
            return
        if record.batch_idx != self._batch_idx:
            self._batch_idx, self._optimizers = record.batch_idx, set()
        self._optimizers.add(record.optimizer)
        count = len(self._optimizers)
        if count > 1 and growth_interval and self._conditions.once("growth_shared"):
            figures = {"growth_batches": growth_interval // count, "growth_wanted": growth_interval * count}
            yield "growth_shared", {"optimizers": count, "growth_interval": growth_interval, **figures}
        if self._is_clipped_scaled(record) and self._conditions.once("clip_before_unscale"):
            yield "clip_before_unscale", {"scale": record.scale}

    def _is_clipped_scaled(self, record: StepRecord) -> bool:
        """Tell whether gradients of two norms shrank to the same one between the backward pass and unscaling.

        Shrinking alone is not enough: who accumulates by hand may divide gradients by a number of batches.
        """
        before, norm, scale = record.backward_norm, record.grad_norm, record.scale
        if not before or not norm or not scale or not math.isfinite(before) or not math.isfinite(norm):
            return False
        if norm * scale < (1 - CLIP_TOLERANCE) * before:
            self._clipped = [*self._clipped[-1:], (before, norm * scale)]
        if len(self._clipped) < 2:
            return False
        same = [math.isclose(*norms, rel_tol=CLIP_TOLERANCE) for norms in zip(*self._clipped, strict=True)]
        return same == [False, True]
