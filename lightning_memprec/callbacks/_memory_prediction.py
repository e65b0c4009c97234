"""Hold what was predicted for a run against what it takes, and keep the difference for the next run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memprec.callbacks._calibration import calibration_path, run_key
from lightning_memprec.callbacks._capacity import choose_target
from lightning_memprec.callbacks._trainer_plan import is_sharded
from lightning_memprec.callbacks.memory_preflight import MemoryPreflight
from lightning_memprec.memory.observe.comparison import Comparison, compare
from lightning_memprec.memory.observe.parts import measure_parts
from lightning_memprec.memory.observe.residual import Residual, is_plausible, shapes_digest, write_residual

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.memory.observe.meters import DeviceMeter
    from lightning_memprec.memory.observe.reading import Reading
    from lightning_memprec.memory.observe.record import MemoryRecord
    from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["PredictionCheck"]

# An estimate covers two traced steps and two repetitions of the last.
_TRACED_STEPS = 4
# What a preflight looks at by default for the largest batch.
_SAMPLE_BATCHES = 8


class PredictionCheck:
    """Compares once, when the run has done what was predicted, and then watches that no later step needs more.

    Args:
        trainer: The Trainer, in `setup`.
        pl_module: Its module.
        meter: Reads the device.
        before: What the device told before the run.
        estimate: The prediction; ``None`` takes that of the Trainer's `MemoryPreflight`.
        tolerance: Largest error that is no warning.
        calibrate: Whether to keep the difference.
        record: Takes the comparison.
        tell: Called with the kind of an event, the step and its figures.

    Attributes:
        occasional: Phases outside the training steps that the run has reached.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        meter: DeviceMeter,
        before: Reading,
        *,
        estimate: MemoryEstimate | None,
        tolerance: float,
        calibrate: bool,
        record: MemoryRecord,
        tell: Callable[[str, int, dict[str, Any]], None],
    ) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._meter = meter
        self._estimate = estimate
        self._tolerance = tolerance
        self._calibrate = calibrate
        self._record = record
        self._tell = tell
        self._device = trainer.strategy.root_device
        self._path = calibration_path(trainer)
        self._shapes = shapes_digest(pl_module)
        self._peak_before = before.peak_allocated_bytes or 0
        # Weights that are on the device already belong to the run; what else is there does not.
        own_bytes = sum(self._parts([]).values())
        self._foreign_bytes = max(0, (before.allocated_bytes or 0) - own_bytes)
        self._limit_bytes = float("inf")
        self._is_done = False
        self.occasional: set[str] = set()

    def observe(self, step: int, reading: Reading, steps: int, batches: int, *, at_end: bool = False) -> None:
        """Take in a reading.

        Args:
            step: The Trainer's step.
            reading: What the device tells.
            steps: Steps of this run.
            batches: Batches of this run.
            at_end: Whether the run ends here.
        """
        peak = reading.peak_allocated_bytes
        if peak is None:
            return
        if peak > self._limit_bytes:
            figures = {
                "measured_bytes": peak,
                "predicted_bytes": round(self._limit_bytes / (1 + self._tolerance)),
            }
            self._limit_bytes = float("inf")
            self._tell("above_prediction", step, figures)
        preflight = self._preflight()
        sampled = preflight.sample_batches if preflight is not None else _SAMPLE_BATCHES
        is_settled = steps >= _TRACED_STEPS and batches >= sampled
        estimate = self._estimate or (preflight.estimate if preflight is not None else None)
        if self._is_done or estimate is None or not (at_end or is_settled):
            return
        self._is_done = True
        reason = self._why_not(estimate, peak)
        if reason:
            predicted = estimate.peak_allocated_bytes
            self._tell("not_compared", step, {"predicted_bytes": predicted, "reason": reason})
        else:
            self._compare(step, steps, estimate)

    def _compare(self, step: int, steps: int, estimate: MemoryEstimate) -> None:
        self._meter.ask_driver()
        result = self._record.comparison = compare(
            estimate,
            self._meter.read(),
            self._parts(self._trainer.optimizers),
            step=step,
            occasional=self.occasional,
            foreign_bytes=self._foreign_bytes,
        )
        highest = max(estimate.peak_allocated_bytes, result.peak.measured_bytes) + self._foreign_bytes
        self._limit_bytes = highest * (1 + self._tolerance)
        is_kept = self._keep(result, estimate)
        figures: dict[str, Any] = {"steps": steps, "comparison": str(result), "error": result.error}
        if abs(result.error) <= self._tolerance:
            self._tell("compared", step, figures)
            return
        figures |= {"tolerance": self._tolerance, "part": f"`{result.worst.name}`"}
        self._tell("prediction_off", step, {**figures, "remedy": _remedy(result, is_kept=is_kept)})

    def _keep(self, result: Comparison, estimate: MemoryEstimate) -> bool:
        """Write the difference for the next preflight; a run that writes no checkpoints writes no file."""
        path = self._path
        writes = self._calibrate and bool(self._trainer.checkpoint_callbacks)
        if not writes or path is None or not is_plausible(result.ratio):
            return False
        if self._trainer.is_global_zero:
            run = run_key(self._trainer, self._module, self._shapes, estimate)
            names = tuple(type(optimizer).__name__ for optimizer in self._trainer.optimizers)
            try:
                write_residual(path, Residual(run, result.ratio, names))
            except OSError as error:
                rank_zero_warn(f"`MemoryMonitor` could not keep what it measured: {error}")
                return False
        return True

    def _parts(self, optimizers: list[Any]) -> dict[str, int]:
        return measure_parts(self._module, optimizers, self._device, self._meter.granularity_bytes)

    def _preflight(self) -> MemoryPreflight | None:
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, MemoryPreflight)), None)

    def _why_not(self, estimate: MemoryEstimate, peak_bytes: int) -> str:
        """Return why the prediction cannot be held against this run; empty if it can."""
        if is_sharded(self._trainer):
            return "it is for one device that holds the whole model, and this run splits it."
        if choose_target(None, None, self._device).estimate_for != estimate.device:
            return f"it is for `{estimate.device}`, and this is another device."
        if peak_bytes <= self._peak_before:
            return (
                "an earlier peak of this process hides its own. Call `torch.accelerator.reset_peak_memory_stats()` "
                "before `fit` to see it."
            )
        return ""


def _remedy(result: Comparison, *, is_kept: bool) -> str:
    text = (
        "The verdict on this run was too hopeful: keep a larger `safety_margin`."
        if result.error < 0
        else "The run needs less than was said: a larger batch may fit."
    )
    if is_kept:
        text += " The next `MemoryPreflight` of this model takes the difference into account."
    return text
