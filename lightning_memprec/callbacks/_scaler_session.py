"""One `fit` under observation: from records to events, and from events to what is printed, logged and done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memprec._lightning import hold_step_schedulers, logged_step
from lightning_memprec.callbacks._scaler_watch import ScalerWatch
from lightning_memprec.callbacks._speaking import say
from lightning_memprec.report.file import write_report
from lightning_memprec.scaling.errors import ScalerCollapseError
from lightning_memprec.scaling.health import no_scaler_in_words
from lightning_memprec.scaling.metrics import metrics_of
from lightning_memprec.scaling.norms import optimizer_parameters
from lightning_memprec.scaling.scaler_access import clamp_scale

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.scaling.health import ScalerHealth
    from lightning_memprec.scaling.record import Event, StepRecord

__all__ = ["SavedScaler", "ScalerSession", "Settings"]

# Losses are each rank's own. Everything else is the same on all ranks, and rank zero tells it.
_LOCAL_KINDS = ("non_finite_loss", "loss_stays_non_finite")

# What `on_collapse` acts on.
_COLLAPSED = ("collapse", "stuck_at_floor")

# What torch raises when its scaler is used in a wrong order, and the diagnosis that explains it.
_TORCH_ERRORS = {
    "_scale is None": "raw_backward",
    "unscale_() has already been called": "second_unscale",
    "unscale_() is being called after step()": "second_unscale",
    "Attempting to unscale FP16 gradients": "fp16_gradients",
    "No inf checks were recorded": "no_gradients",
}


@dataclass(frozen=True)
class SavedScaler:
    """What a checkpoint holds of a loss scaler.

    Args:
        states: States by the key under which they were found.
        fresh: State of this run's scaler before the checkpoint reached it.
    """

    states: dict[str, dict[str, Any]]
    fresh: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The options of a `GradScalerMonitor` that act on a run, and how often it looks closely."""

    every_n_steps: int
    min_scale: float | None
    on_collapse: str
    hold_schedule: bool
    import_scaler_state: bool
    report_path: str | Path | None


class ScalerSession:
    """Watches one `fit`.

    Args:
        trainer: The Trainer at the start of training, its checkpoint loaded.
        pl_module: Its module.
        health: What judges the steps.
        settings: The monitor's options.
        saved: What the checkpoint that the run goes on from holds of a scaler, ``None`` for a new run.
        guard: Calls a function with arguments and keeps its errors from the run.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        health: ScalerHealth,
        settings: Settings,
        saved: SavedScaler | None,
        guard: Callable[..., None],
    ) -> None:
        self._trainer = trainer
        self._health = health
        self._settings = settings
        self._untold: list[Event] = []
        self._logged: StepRecord | None = None
        self._has_step_schedulers = _follows_every_step(trainer)
        self._release: Callable[[], None] | None = None
        self.watch = ScalerWatch(
            trainer, pl_module, settings.every_n_steps, health.totals.steps, self._tell_once, guard
        )
        scaler = self.watch.scaler
        if scaler is not None:
            health.growth_interval = scaler.get_growth_interval()
            self._check_saved_scaler(scaler, saved)
        else:
            self._tell_of_no_scaler()
        if settings.hold_schedule:
            self._release = hold_step_schedulers(trainer, self._has_just_skipped)
        self._publish()

    def detach(self) -> None:
        """Take every hook away again."""
        self.watch.detach()
        if self._release is not None:
            self._release()
            self._release = None

    def end_batch(self) -> None:
        """Judge, print, log and act.

        Raises:
            ScalerCollapseError: If the scale has collapsed and that ends the run.
        """
        self.take_in()
        scaler = self.watch.scaler
        if self._settings.min_scale is not None and scaler is not None:
            clamp_scale(scaler, self._settings.min_scale)
        if self._untold or self._logged is not None:  # Quiet steps have nothing to tell.
            self._act(self._publish())

    def take_in(self, *, every: bool = False) -> None:
        """Judge the steps whose figures have arrived.

        Args:
            every: Wait for those on their way too.
        """
        for record, is_due in self.watch.records(every=every):
            events = self._health.observe(record)
            self._untold += events
            if record.skipped or self._settings.min_scale is not None:
                self._judge_options(record)
            if is_due or events:
                self._logged = record

    def finish(self, *, wait: bool) -> None:
        """Print the summary and write the report.

        Args:
            wait: Whether to wait for figures on their way. After an error they may never come.
        """
        if wait:
            self.take_in(every=True)
            if self.watch.scaler is not None:
                self._health.totals.see_scale(self.watch.scaler.get_scale())
        self._publish()
        say(self._trainer, "GradScalerMonitor, summary", self._health.summary())
        if self._settings.report_path is not None and self._trainer.is_global_zero:
            try:
                write_report(self._settings.report_path, self._health.to_dict())
            except OSError as error:
                rank_zero_warn(
                    f"GradScalerMonitor could not write its report: {error}. "
                    "Pass a `report_path` that can be written; the counts are in `summary()` and `events`."
                )

    def explain(self, error: BaseException) -> None:
        """Say what an error of torch's scaler means, on screen and in a note on the error."""
        kind = next((kind for text, kind in _TORCH_ERRORS.items() if text in str(error)), None)
        if kind is None or not isinstance(error, (AssertionError, RuntimeError, ValueError)):
            return
        event = self._tell(kind, {})
        if hasattr(error, "add_note"):  # Python 3.11.
            error.add_note(event.message)

    def _tell_of_no_scaler(self) -> None:
        plugin: Any = self._trainer.precision_plugin
        # Master weights go by one of Lightning's names, and have one of their own.
        precision = str(getattr(plugin, "master_precision", plugin.precision))
        self._health.unscaled_precision = precision
        optimizers = self._trainer.optimizers
        if any(p.dtype == torch.float16 for o in optimizers for p in optimizer_parameters(o)):
            self._tell("no_scaler_in_fp16", {})
        else:
            say(self._trainer, "GradScalerMonitor", no_scaler_in_words(precision))

    def _check_saved_scaler(self, scaler: Any, saved: SavedScaler | None) -> None:
        """Find out whether the saved scaler's state has reached this run's scaler."""
        plugin: Any = self._trainer.precision_plugin
        name = type(plugin).__qualname__
        if saved is None or not saved.states or name in saved.states:
            return
        # Master weights take over the state of Lightning's own plugins by themselves, within their bounds.
        imported: str | None = getattr(plugin, "imported_scaler_key", None)
        if imported is None and scaler.state_dict() != saved.fresh:
            return
        key = imported or next(iter(saved.states))
        if imported is None and self._settings.import_scaler_state:
            getattr(scaler, "take_over", scaler.load_state_dict)(saved.states[key])
            imported = key
        saved_scale = saved.states[key]["scale"]
        figures = {"saved_scale": saved_scale, "key": key, "plugin": name, "scale": scaler.get_scale()}
        self._health.totals.last_scale = None  # The scale did neither grow nor fall: it is another one.
        self._tell("scale_imported" if imported else "scale_reset", figures)

    def _judge_options(self, record: StepRecord) -> None:
        """Tell what the options that act have done, or would have."""
        if record.scale is None:
            return
        if record.skipped and self._has_step_schedulers and not self._settings.hold_schedule:
            self._tell_once("scheduler_on_skip", {})
        floor = self._settings.min_scale
        if floor is not None:
            scale = record.scale * self.watch.scaler.get_backoff_factor()
            held = bool(record.skipped) and scale < floor
            if self._health.conditions.switch("floor_held", on=held, off=scale >= floor):
                figures = {"scale": scale, "min_scale": floor}
                event = self._health.tell("floor_held", record.step, record.batch_idx, figures)
                self._untold.append(event)

    def _tell_once(self, kind: str, figures: dict[str, Any]) -> None:
        if self._health.conditions.once(kind):
            self._tell(kind, figures)

    def _tell(self, kind: str, figures: dict[str, Any]) -> Event:
        event = self._health.tell(kind, self._trainer.global_step, self.watch.batch_idx, figures)
        self._untold.append(event)
        return event

    def _publish(self) -> list[Event]:
        """Print and log what is new, and return the events."""
        events, self._untold = self._untold, []
        record, self._logged = self._logged, None
        for event in events:
            head = f"GradScalerMonitor, step {event.step}, {event.kind}"
            warns, every_rank = event.severity == "warning", event.kind in _LOCAL_KINDS
            say(self._trainer, head, event.message, warns=warns, every_rank=every_rank)
        if record is not None and self._trainer.is_global_zero:
            for logger in self._trainer.loggers:
                logger.log_metrics(metrics_of(record, self._health), step=logged_step(self._trainer))
        return events

    def _act(self, events: list[Event]) -> None:
        """End the run, if its scale has collapsed and that ends it; the scale is the same on all ranks."""
        collapse = next((event for event in events if event.kind in _COLLAPSED), None)
        if collapse is None or self._settings.on_collapse == "warn":
            return
        if self._settings.on_collapse == "raise":
            raise ScalerCollapseError(collapse.message, collapse)
        self._trainer.should_stop = True
        head = f"GradScalerMonitor, step {self._trainer.global_step}, stop"
        text = f"The Trainer is told to end training, because of `{collapse.kind}` and `on_collapse='stop'`."
        say(self._trainer, head, text, warns=True)

    def _has_just_skipped(self) -> bool:
        """Tell whether the optimizer skipped the step of this batch; waits for a fused optimizer."""
        last = self.watch.last
        return last is not None and last.is_skipped() is True


def _follows_every_step(trainer: Trainer) -> bool:
    """Tell whether Lightning advances a scheduler on every step, and so on each skipped one."""
    if not trainer.lightning_module.automatic_optimization:
        return False
    return any(
        config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau
        for config in trainer.lr_scheduler_configs
    )
