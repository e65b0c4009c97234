"""A run's health as its optimizer steps show it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_memprec.scaling.conditions import Conditions
from lightning_memprec.scaling.diagnosis import make_event
from lightning_memprec.scaling.history import History
from lightning_memprec.scaling.record import Event, StepRecord
from lightning_memprec.scaling.scale_judge import ScaleJudge
from lightning_memprec.scaling.step_judges import LossJudge, NormJudge, OrderJudge
from lightning_memprec.scaling.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_EVENTS", "ScalerHealth", "no_scaler_in_words"]

# Conditions that come and go for days must not fill the memory.
MAX_EVENTS = 1000
_VERSION = 1


class ScalerHealth:
    """Takes one record a step and tells what is worth telling, each thing once until it has ended.

    Scale, skips, norms and losses are judged together: an overflow at a scale of 65536 is calibration, at a
    scale of 4 it is an explosion. Every threshold is a constant beside the judge that uses it, with its reason.

    Args:
        low_scale_threshold: Below this scale, frequent skips count as exploding gradients.
        window: Number of steps over which the rate of skips and the median norm are taken.
        min_scale: Floor at which the scale is held, ``None`` for none.

    Attributes:
        growth_interval: The scaler's, for messages.
        unscaled_precision: Name of the precision of a run whose precision plugin has no loss scaler.
        totals: Counts over the whole run.
        history: Scale, skips and norms over steps.
        events: What was told, oldest first, the last 1000.
        conditions: What holds at the moment.

    Example:
        >>> health = ScalerHealth()
        >>> for step in range(4):
        ...     events = health.observe(StepRecord(step, step, scale=2.0 ** (16 - step), skipped=step < 3))
        >>> [event.kind for event in events]
        ['calibration']
        >>> health.totals.skipped
        {0: 3}
    """

    def __init__(
        self, low_scale_threshold: float = 16.0, window: int = 100, min_scale: float | None = None
    ) -> None:
        self.growth_interval: int | None = None
        self.unscaled_precision: str | None = None
        self.totals = Totals()
        self.history = History()
        self.events: list[Event] = []
        self.conditions = Conditions()
        self._scale = ScaleJudge(self.conditions, low_scale_threshold, window, min_scale)
        self._loss = LossJudge(self.conditions)
        self._norm = NormJudge(self.conditions, window)
        self._order = OrderJudge(self.conditions)

    @property
    def skip_rate(self) -> float:
        """Fraction of skipped steps in the window, in [0, 1]; calibration at the start is left out."""
        return self._scale.skip_rate

    def observe(self, record: StepRecord) -> list[Event]:
        """Take in one step and return what it shows.

        Args:
            record: The step. Records come in the order of steps.
        """
        self.totals.add(record)
        self.history.add(record)
        found = [
            *self._loss.observe(record),
            *self._scale.observe(record, self.totals.largest_norm),
            *self._norm.observe(record),
            *self._order.observe(record, self.growth_interval),
        ]
        return [self.tell(kind, record.step, record.batch_idx, figures) for kind, figures in found]

    def tell(self, kind: str, step: int, batch_idx: int | None, figures: Mapping[str, Any]) -> Event:
        """Make an event, also of something that was seen elsewhere, and keep it."""
        event = make_event(kind, step, batch_idx, dict(figures))
        self.events.append(event)
        del self.events[:-MAX_EVENTS]
        return event

    def summary(self) -> str:
        """Put the whole run into words."""
        if not self.totals.steps:
            return "No optimizer step was observed."
        text = f"{self.totals.in_words()}. "
        if self.unscaled_precision is not None:
            text += f"{no_scaler_in_words(self.unscaled_precision)} "
        kinds = [event.kind for event in self.events if event.severity == "warning"]
        told = ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds))
        verdict = f"Warnings: {told}." if told else "Healthy: nothing to warn about."
        return text + verdict

    def to_dict(self) -> dict[str, Any]:
        """Return summary, counts, events and history as plain values, ready for strict JSON."""
        report = {
            "version": _VERSION,
            "summary": self.summary(),
            "totals": self.totals.state_dict(),
            "events": [asdict(event) for event in self.events],
            "history": [point._asdict() for point in self.history.points],
        }
        plain: dict[str, Any] = _plain(report)
        return plain

    def state_dict(self) -> dict[str, Any]:
        """Return everything that goes on after a resume, as plain values."""
        return {
            "version": _VERSION,
            "events": [asdict(event) for event in self.events],
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: If another version of the package wrote the state in another form.
        """
        if state.get("version") != _VERSION:
            raise ValueError(
                f"The state has version {state.get('version')!r}, but this package reads version {_VERSION}. "
                "Resume without it, or with the package that wrote it."
            )
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.events = [Event(**event) for event in state["events"]]
        # Whoever resumes a collapsed run is told again, and the run ends again if that is its setting.
        for name in ("collapse", "stuck_at_floor"):
            self.conditions.switch(name, on=False, off=True)

    def _parts(self) -> dict[str, Any]:
        return {
            "totals": self.totals,
            "history": self.history,
            "conditions": self.conditions,
            "scale": self._scale,
            "loss": self._loss,
            "norm": self._norm,
        }


def no_scaler_in_words(precision: str) -> str:
    """Say that a run has no loss scaler, and what of it is watched all the same."""
    return (
        f"No loss scaler in this run's precision plugin ({precision}): only losses and gradients are watched."
    )


def _plain(value: Any) -> Any:
    """Write numbers that JSON does not know as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
