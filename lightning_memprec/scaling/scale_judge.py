"""What the loss scale and the skipped steps say."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprec.scaling.conditions import Conditions
    from lightning_memprec.scaling.record import StepRecord

__all__ = ["CALIBRATION_STEPS", "COLLAPSED_SCALE", "EXPLODING_RATE", "PROBE_STEPS", "ScaleJudge"]

# From 2^16, torch's default, 16 halvings lead to a scale of 1. A run that needs more does not calibrate.
CALIBRATION_STEPS = 16
# A healthy scaler skips about one step in a growth interval (2000 by default): one in ten is 200 times that.
EXPLODING_RATE = 0.1
# A scale of 1 multiplies by nothing: gradients that overflow here exceed FP16's 65504 by themselves.
UNIT_SCALE = 1.0
# Below it a gradient of 1/16 becomes 0 in FP16, whose smallest number is 2^-24. A healthy run never comes near.
COLLAPSED_SCALE = 2.0**-20
# An overflow this soon after a growth comes from the growth, not from the data.
PROBE_STEPS = 16


class ScaleJudge:
    """Tells calibration, probing, single bad batches, explosion and collapse apart.

    Args:
        conditions: What holds at the moment.
        low_scale_threshold: Below this scale, frequent skips count as exploding gradients.
        window: Number of steps over which the rate of skips is taken.
        min_scale: Floor at which the scale is held, ``None`` for none.
    """

    def __init__(
        self, conditions: Conditions, low_scale_threshold: float, window: int, min_scale: float | None
    ) -> None:
        self._conditions = conditions
        self._threshold = low_scale_threshold
        self._min_scale = min_scale
        self._window = window
        self._skip: StepRecord | None = (
            None  # First step of the present run of skips, and what was before it.
        )
        self._held_before, self._grew_before = 0, False
        self._last_run = 0
        self.skips: deque[bool] = deque(maxlen=window)
        self.calibrating = True
        self.leading = 0  # Skipped steps at the start.
        self.run = 0  # Length of the present run of skipped steps.
        self.first_skip: int | None = None  # Step at which the last fall of the scale began,
        self.first_batch_idx: int | None = None  # its batch,
        self.first_epoch: int | None = None  # and the epoch of that.
        self.held = 0  # Steps taken since the last skip or growth.
        self.grew = False  # Whether the present scale was reached by growing.
        self.last_scale: float | None = None

    @property
    def skip_rate(self) -> float:
        """Fraction of skipped steps in the window, in [0, 1]; calibration at the start is left out."""
        return sum(self.skips) / len(self.skips) if self.skips else 0.0

    def observe(self, record: StepRecord, largest_norm: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Take in a step and the largest finite norm so far; yield kinds of events with their figures."""
        if record.scale is None:
            return
        self._follow(record, record.scale)
        yield from self._calibration(record) if self.calibrating else self._end_of_run(record)
        self.held = 0 if record.skipped else self.held + 1
        if not self.calibrating:
            self.skips.append(bool(record.skipped))
        if record.loss is None or math.isfinite(record.loss):
            yield from self._low_scale(record, record.scale, largest_norm)
        yield from self._collapse(record, record.scale)

    def _follow(self, record: StepRecord, scale: float) -> None:
        if self.last_scale is not None and scale != self.last_scale:
            self.grew = scale > self.last_scale
            self.held = 0
        self.last_scale = scale
        self._last_run = self.run
        self.run = self.run + 1 if record.skipped else 0
        # Good steps in between do not end a fall, unless the scale has held or grown over them.
        if record.skipped and (self.grew or self.held > PROBE_STEPS or self.first_skip is None):
            self.first_skip, self.first_batch_idx = record.step, record.batch_idx
            self.first_epoch = record.epoch

    def _calibration(self, record: StepRecord) -> Iterator[tuple[str, dict[str, Any]]]:
        """Leave the skips at the start out of the rate, unless there are too many of them."""
        if record.skipped:
            self.leading = self.run
            if self.run > CALIBRATION_STEPS:
                self.calibrating = False
                self.skips.extend([True] * (self.run - 1))
            return
        self.calibrating = False
        if self.leading:
            yield "calibration", {"skips": self.leading, "scale": record.scale}

    def _end_of_run(self, record: StepRecord) -> Iterator[tuple[str, dict[str, Any]]]:
        """Tell what a run of skipped steps was, once a step has gone through again."""
        if record.skipped:
            if self.run == 1:
                self._skip = record
                self._held_before, self._grew_before = self.held, self.grew
            elif self._skip is not None and self._skip.culprit is None:
                self._skip = self._skip._replace(culprit=record.culprit)
            if record.loss is not None and not math.isfinite(record.loss):
                self._skip = None  # The loss explains it.
            return
        if not any(self.skips):
            self._conditions.switch("isolated_skip", on=False, off=True)
        skip, self._skip = self._skip, None
        if skip is None or self._conditions.holds("exploding"):
            return
        figures = {
            "scale": skip.scale,
            "held": self._held_before,
            "skipped_batch_idx": skip.batch_idx,
            "skipped_epoch": skip.epoch,
        }
        if self._grew_before and self._last_run == 1 and self._held_before <= PROBE_STEPS:
            if self._conditions.once("probing"):
                yield "probing", figures
        elif self._conditions.switch("isolated_skip", on=True, off=False):
            yield (
                "isolated_skip",
                {**figures, "culprit": skip.culprit, "loss": skip.loss, "skips": self._last_run},
            )

    def _low_scale(
        self, record: StepRecord, scale: float, largest_norm: float
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Judge a low scale; the caller has ruled out that the loss itself is at fault."""
        rate = self.skip_rate
        figures = {"scale": scale, "culprit": record.culprit, "rate": rate, "window": len(self.skips)}
        judged = len(self.skips) >= min(CALIBRATION_STEPS, self._window)
        # A condition ends only well clear of its threshold: twice the scale or half the rate.
        if self._conditions.switch(
            "exploding",
            on=bool(record.skipped) and judged and scale < self._threshold and rate > EXPLODING_RATE,
            off=rate <= EXPLODING_RATE / 2 or scale >= 2 * self._threshold,
        ):
            yield "exploding", {**figures, **self._beginning(), "norm": largest_norm or None}
        below = bool(record.skipped) and scale < UNIT_SCALE
        if self._conditions.switch("range_insufficient", on=below, off=scale >= 2 * UNIT_SCALE):
            yield "range_insufficient", figures

    def _collapse(self, record: StepRecord, scale: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Tell a scale that has collapsed, or would have if a floor did not hold it."""
        figures = {"scale": scale, "skips": self.run, **self._beginning()}
        over = not record.skipped and scale >= UNIT_SCALE
        if self._conditions.switch("collapse", on=scale <= COLLAPSED_SCALE, off=over):
            yield "collapse", figures
        stuck = self._min_scale is not None and scale <= self._min_scale and self.run > CALIBRATION_STEPS
        if self._conditions.switch("stuck_at_floor", on=stuck, off=not record.skipped):
            yield "stuck_at_floor", figures

    def _beginning(self) -> dict[str, Any]:
        """Return where the last fall of the scale began."""
        return {
            "first_skip": self.first_skip,
            "first_batch_idx": self.first_batch_idx,
            "first_epoch": self.first_epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on after a resume, as plain values."""
        state = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**state, "skips": list(self.skips)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name in ("calibrating", "grew"):
            setattr(self, name, bool(state[name]))
        for name in ("leading", "run", "held"):
            setattr(self, name, int(state[name]))
        for name in self._beginning():
            setattr(self, name, None if state[name] is None else int(state[name]))
        self.last_scale = None if state["last_scale"] is None else float(state["last_scale"])
        self.skips = deque(map(bool, state["skips"]), maxlen=self._window)
