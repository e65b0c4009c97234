"""One `fit` under observation: from readings to events."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_memprec._lightning import logged_step
from lightning_memprec.callbacks._memory_holders import holder_in_words, holders_of
from lightning_memprec.memory.observe.fragmentation import environment_line, find_fragmentation
from lightning_memprec.memory.observe.growth import DEVICE_RULE, HOST_RULE, Growth, GrowthWatch
from lightning_memprec.memory.tree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.callbacks._memory_prediction import PredictionCheck
    from lightning_memprec.memory.observe.holders import Holding
    from lightning_memprec.memory.observe.meters import DeviceMeter
    from lightning_memprec.memory.observe.reading import Reading

__all__ = ["MemorySession"]

# What is kept from the first step on shows in these, by the rule of growth; later steps are sampled as the user says.
_EARLY_STEPS = 20


class MemorySession:
    """Watches one `fit`.

    Args:
        trainer: The Trainer, in `setup`.
        pl_module: Its module.
        meter: Reads the device.
        before: What the device told before the run.
        prediction: Holds what was predicted against what is read.
        every_n_steps: Sample and log every so many steps.
        monitor: The callback, whose own memory does not count.
        tell: Called with the kind of an event, the step and its figures.
        keep: Called with the step and each reading.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        meter: DeviceMeter,
        before: Reading,
        prediction: PredictionCheck,
        *,
        every_n_steps: int,
        monitor: object,
        tell: Callable[[str, int, dict[str, Any]], None],
        keep: Callable[[int, Reading], None],
    ) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._meter = meter
        self._before = before
        self.prediction = prediction
        self._every_n_steps = every_n_steps
        self._monitor = monitor
        self._tell = tell
        self._keep = keep
        self._device_type = trainer.strategy.root_device.type
        self._floor, self._resident = GrowthWatch(DEVICE_RULE), GrowthWatch(HOST_RULE)
        self._holders: dict[str, Holding] | None = None  # When it was first suspicious.
        self._retries_before = before.alloc_retries_count or 0
        self._told: set[str] = set()
        self._batches = self._steps = 0
        self._last_step = -1

    def start(self) -> None:
        """Note at which step training begins, and say what the device cannot tell."""
        self._last_step = self._trainer.global_step
        if self._before.peak_allocated_bytes is None:
            self._tell("no_peak", self._last_step, {"device": self._device_type.upper()})

    def end_batch(self, batch: Any) -> None:
        """Sample, if a step was made that is to be looked at.

        Args:
            batch: The batch, which is still alive.
        """
        self._batches += 1
        step = self._trainer.global_step
        if step == self._last_step:
            return  # Gradients are accumulated.
        self._last_step, index = step, self._steps
        self._steps += 1
        is_due = index % self._every_n_steps == 0
        if is_due or index < _EARLY_STEPS:
            reading = self._meter.read()
            self._judge(step, reading)
            self._judge_growth(step, reading, batch)
            if is_due:
                self._log(reading)

    def finish(self) -> None:
        """Look once more at the end; a run may have been too short for a comparison before."""
        if self._steps >= 2:  # The second step has optimizer states beside activations.
            self._judge(self._last_step, self._meter.read(), at_end=True)

    def _judge(self, step: int, reading: Reading, *, at_end: bool = False) -> None:
        self._keep(step, reading)
        self.prediction.observe(step, reading, self._steps, self._batches, at_end=at_end)
        self._judge_allocator(step, reading)

    def _log(self, reading: Reading) -> None:
        if self._trainer.is_global_zero and self._trainer.loggers:
            metrics = reading.metrics()
            for logger in self._trainer.loggers:
                logger.log_metrics(metrics, step=logged_step(self._trainer))

    # --- what a reading shows ---

    def _judge_allocator(self, step: int, reading: Reading) -> None:
        """Tell of fragmentation and of pressure, each once."""
        retries = (reading.alloc_retries_count or 0) - self._retries_before
        if retries > 0 and "alloc_retries" not in self._told:
            self._told.add("alloc_retries")
            self._tell("alloc_retries", step, {"retries": retries, "remedy": _setting()})
        lost = find_fragmentation(reading)
        if lost is not None and "fragmentation" not in self._told:
            self._told.add("fragmentation")
            self._tell("fragmentation", step, {**asdict(lost), "remedy": _setting()})

    def _judge_growth(self, step: int, reading: Reading, batch: Any) -> None:
        """Tell of memory that grows, and who holds it; its holders are looked up in suspicious moments alone."""
        if reading.allocated_bytes is not None:
            growth = self._floor.observe(step, self._floor_of(reading, batch))
            if growth is not None and not self._is_garbage(step, growth, batch):
                self._tell_growth("growth", step, growth)
        if reading.host_rss_bytes is not None:
            growth = self._resident.observe(step, reading.host_rss_bytes)
            if growth is not None:
                self._tell_growth("host_growth", step, growth)
        if self._holders is None and (self._floor.is_suspicious or self._resident.is_suspicious):
            self._holders = holders_of(self._trainer, self._module, self._monitor)

    def _is_garbage(self, step: int, growth: Growth, batch: Any) -> bool:
        """Tell whether Python's collector frees most of what has grown, as it may only after hundreds of steps."""
        gc.collect()
        freed = growth.to_bytes - self._floor_of(self._meter.read(), batch)
        if freed <= (growth.to_bytes - growth.from_bytes) / 2:
            return False
        self._floor = GrowthWatch(DEVICE_RULE)  # A leak may still follow.
        if "cyclic_garbage" not in self._told:
            self._told.add("cyclic_garbage")
            self._tell("cyclic_garbage", step, {**asdict(growth), "freed_bytes": freed})
        return True

    def _tell_growth(self, kind: str, step: int, growth: Growth) -> None:
        after = holders_of(self._trainer, self._module, self._monitor)
        holder = holder_in_words(self._holders or {}, after)
        rate = round(growth.bytes_per_step)
        self._tell(kind, step, {**asdict(growth), "rate_bytes": rate, "holder": holder})

    def _floor_of(self, reading: Reading, batch: Any) -> int:
        """Return what is alive without the batch, which differs from step to step."""
        try:
            tensors = tensors_in(batch)
        except Exception:  # A container of another library that cannot be looked into.
            tensors = []
        size = sum(tensor.nbytes for tensor in tensors if tensor.device.type == self._device_type)
        return (reading.allocated_bytes or 0) - size


def _setting() -> str:
    """Say what mends fragmentation in this process."""
    line = environment_line()
    if line is None:
        return "Growing segments are on already: let batches differ less in size."
    return f"Set `{line}` in the environment before Python starts."
