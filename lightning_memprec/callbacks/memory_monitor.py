"""Watch what a run takes of its device, and hold it against what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_memprec._lightning import CallbackBase
from lightning_memprec.callbacks._memory_prediction import PredictionCheck
from lightning_memprec.callbacks._memory_session import MemorySession
from lightning_memprec.callbacks._speaking import say
from lightning_memprec.memory.observe.meters import meter_for
from lightning_memprec.memory.observe.record import MemoryRecord
from lightning_memprec.report.file import read_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.memory.observe.comparison import Comparison
    from lightning_memprec.memory.observe.event import MemoryEvent
    from lightning_memprec.memory.observe.reading import Reading
    from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["MemoryMonitor"]

# Each rank has batches and a device of its own; the rest is alike, and rank zero tells it.
_LOCAL_KINDS = ("above_prediction", "alloc_retries", "fragmentation")


class MemoryMonitor(CallbackBase):
    """Log the memory of a run, compare it with the prediction, and tell of growth, fragmentation and pressure.

    Readings are the allocator's counters and the driver's figure at the end of a step. Nothing waits for the device,
    and the run itself is not changed. If the Trainer has a `MemoryPreflight`, its estimate is held against the
    measured peak after the first steps, part by part. The difference is kept in `memprec_calibration.json` in the
    Trainer's `default_root_dir`, where the next `MemoryPreflight` of the same model finds it.

    Each rank watches its own device; rank zero logs, and tells what is alike on all. On a CPU, whose allocator keeps no
    count, resident memory is logged and nothing is compared.

    Logged to every logger, at the first step and then every `every_n_steps` steps, as far as the device tells:

    | key | meaning |
    |---|---|
    | `memprec/memory/allocated_bytes` | tensors that are alive after the step |
    | `memprec/memory/reserved_bytes` | what the caching allocator holds |
    | `memprec/memory/peak_allocated_bytes` | largest sum of live tensors so far |
    | `memprec/memory/peak_reserved_bytes` | largest reserved memory so far |
    | `memprec/memory/active_bytes` | allocated, or freed and waiting for another stream |
    | `memprec/memory/inactive_split_bytes` | free parts of segments in use: fragmentation |
    | `memprec/memory/alloc_retries_count` | allocations that came through after the cache was given back |
    | `memprec/memory/capacity_bytes` | memory of the device |
    | `memprec/memory/device_used_bytes` | what the driver says is in use, by all processes |
    | `memprec/memory/outside_allocator_bytes` | context, kernels and libraries of this process (nvidia-ml-py) |
    | `memprec/memory/other_processes_bytes` | what other processes hold of the device (nvidia-ml-py) |
    | `memprec/memory/host_rss_bytes` | memory of the machine that this process has resident |

    Args:
        every_n_steps: Sample and log every so many steps. The first 20 steps are all sampled.
        tolerance: Error of the predicted peak, as a fraction of the measured one, above which it is a warning.
        calibrate: Whether to keep the measured difference for the next preflight of the same model.
        estimate_path: JSON file with the prediction, as `MemoryPreflight(report_path=...)` or
            `lightning-memprec estimate --json` writes it. By default it is that of the Trainer's `MemoryPreflight`.

    Raises:
        ValueError: If `every_n_steps` is below 1, `tolerance` is not above 0, or the file holds no estimate.
        OSError: If the file cannot be read.

    Example::

        Trainer(callbacks=[MemoryPreflight(), MemoryMonitor()])
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        tolerance: float = 0.05,
        calibrate: bool = True,
        estimate_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be a whole number of at least 1, got {every_n_steps!r}.")
        if not 0.0 < tolerance < float("inf"):
            raise ValueError(f"`tolerance` must be a finite number above 0, got {tolerance}.")
        self.every_n_steps = every_n_steps
        self.tolerance = tolerance
        self.calibrate = calibrate
        self.estimate_path = estimate_path
        self.estimate = None if estimate_path is None else _read_estimate(estimate_path)
        self.record = MemoryRecord()
        self._session: MemorySession | None = None
        self._trainer: Trainer | None = None
        self._is_broken = False
        self._is_fitting = True

    @property
    def events(self) -> list[MemoryEvent]:
        """What was told so far, oldest first."""
        return self.record.events

    @property
    def history(self) -> list[tuple[int, Reading]]:
        """Readings with their steps, thinned evenly in long runs."""
        return self.record.history

    @property
    def comparison(self) -> Comparison | None:
        """Predicted against measured; ``None`` until it was made."""
        return self.record.comparison

    def summary(self) -> str:
        """Put the run so far into words."""
        return self.record.summary()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.record.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # `trainer.test(ckpt_path="best")` must not put the events back to those of the best epoch.
        if not self._is_fitting:
            return
        try:
            self.record.load_state_dict(state_dict)
        except (ValueError, TypeError, KeyError) as error:
            rank_zero_warn(
                f"`MemoryMonitor` could not read its state in the checkpoint ({type(error).__name__}: {error}). "
                "Its events start anew."
            )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_fitting = stage == "fit"
        if self._is_fitting:
            self.record = MemoryRecord()
            self._session, self._is_broken = None, False
            self._guarded(self._open, trainer, pl_module)

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._reach("resume")

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._reach("checkpoint_save")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("sanity_validation" if trainer.sanity_checking else "validation")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._guarded(self._session.start)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._session is not None:
            self._guarded(self._session.end_batch, batch)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._guarded(self._session.finish)
            say(trainer, "MemoryMonitor, summary", self.summary())
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # After an error of the device it may not answer any more: the last reading is what is known.
        if self._session is not None and self.history:
            say(trainer, "MemoryMonitor, summary", self.summary())
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        self._is_fitting = True  # `load_state_dict` outside a Trainer restores.

    def _open(self, trainer: Trainer, pl_module: LightningModule) -> None:
        meter = meter_for(trainer.strategy.root_device)
        before = meter.read()
        self._trainer = trainer
        prediction = PredictionCheck(
            trainer,
            pl_module,
            meter,
            before,
            estimate=self.estimate,
            tolerance=self.tolerance,
            calibrate=self.calibrate,
            record=self.record,
            tell=self._tell,
        )
        self._session = MemorySession(
            trainer,
            pl_module,
            meter,
            before,
            prediction,
            every_n_steps=self.every_n_steps,
            monitor=self,
            tell=self._tell,
            keep=self.record.keep,
        )

    def _close(self) -> None:
        self._session = self._trainer = None

    def _reach(self, phase: str) -> None:
        if self._session is not None:
            self._session.prediction.occasional.add(phase)

    def _tell(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        event = self.record.tell(kind, step, figures)
        assert self._trainer is not None
        say(
            self._trainer,
            f"MemoryMonitor, step {step}, {kind}",
            event.message,
            warns=event.severity == "warning",
            every_rank=kind in _LOCAL_KINDS,
        )

    def _guarded(self, function: Callable[..., object], *args: Any) -> None:
        """Call what must not end a run when it fails; after a failure the run goes on unwatched."""
        if self._is_broken:
            return
        try:
            function(*args)
        except Warning:  # Raised where the user asked for that.
            raise
        except Exception as error:
            self._is_broken = True
            reason = f"{type(error).__name__}: {error}".rstrip(".: ")
            rank_zero_warn(f"`MemoryMonitor` failed and watches no longer: {reason}. Training goes on.")


def _read_estimate(path: str | Path) -> MemoryEstimate:
    estimate = read_report(path).estimate
    if estimate is None:
        raise ValueError(
            f"{str(path)!r} holds a verdict without an estimate. Name the report of a run that was estimated."
        )
    return estimate
