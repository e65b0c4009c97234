"""Stop a run that cannot fit before it starts."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_memprec._batch import largest_batch, parse_batch_spec
from lightning_memprec._errors import MemoryOverflowError, TraceError
from lightning_memprec._isolation import unchanged
from lightning_memprec._lightning import CallbackBase, end_run, train_loaders
from lightning_memprec._progress import Progress
from lightning_memprec.callbacks._calibration import find_calibration
from lightning_memprec.callbacks._capacity import choose_target
from lightning_memprec.callbacks._child import isolated
from lightning_memprec.callbacks._outcome import HOOKS, in_words, notes_on, publish
from lightning_memprec.callbacks._probe import hook_with_probe_after, is_time_to_probe, probe_fit
from lightning_memprec.callbacks._ranks import Finding, gather, merge
from lightning_memprec.callbacks._trainer_plan import (
    FitPlan,
    is_sharded,
    plan_from_trainer,
    plan_validation_of,
)
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.largest_batch import find_largest_batch, has_room
from lightning_memprec.memory.observe.residual import applied_ratio, calibrated
from lightning_memprec.memory.remedies import suggest_remedies
from lightning_memprec.memory.tree import map_tensors
from lightning_memprec.report.content import overflow_message
from lightning_memprec.report.verdict import Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.memory.plan import TrainingPlan
    from lightning_memprec.memory.result import LargestBatch, MemoryEstimate, Remedy

__all__ = ["MemoryPreflight"]

T = TypeVar("T")


class MemoryPreflight(CallbackBase):
    """Estimate what ``fit`` needs before it starts, and refuse a run that cannot fit.

    Training steps are traced without memory and without computing, on a copy of the module: its own `setup`,
    `configure_model`, `configure_optimizers` and `training_step`, with the Trainer's precision, accumulation and
    clipping; then `validation_step`, and how a checkpoint is gathered. The run itself is not changed: random generators, data and weights are as
    without the callback.

    The verdict is given in `setup`, before the model is moved to the device. Where a step cannot be traced
    there, for example because the train loader can only be opened once, it is given in the first later hook
    that can: `on_fit_start`, or the first `on_train_batch_start`. `verdict.when` names it.

    Logged once to every logger:

    | key | meaning |
    |---|---|
    | `memprec/preflight/<part>_bytes` | a part at the peak: parameters, buffers, gradients, optimizer_states, activations, temporaries, inputs, workspaces |
    | `memprec/preflight/peak_allocated_bytes` | largest sum of live tensors |
    | `memprec/preflight/minimum_device_bytes` | what the device must offer |
    | `memprec/preflight/peak_device_bytes` | what the driver shows if nothing limits the allocator's cache |
    | `memprec/preflight/capacity_bytes` | what it offers, if known |
    | `memprec/preflight/headroom_bytes` | capacity less need, if known |

    Args:
        device: Name of a device to plan for, such as "A100-80GB". By default the Trainer's own device.
        device_memory: Memory to judge against, in bytes or as text such as "24GiB". By default what the
            device has free plus what this process holds already. Without a device that can tell, the estimate
            is printed and the run goes on.
        safety_margin: Fraction of the memory to keep free. A run that would use it counts as overflow.
        on_overflow: What to do when the run does not fit: "raise" MemoryOverflowError, "warn", or "off".
        on_error: What to do when the run cannot be estimated: "warn" and go on, "raise" the error, or "off".
        remedies: Whether to look for changes that would make an overflowing run fit, and for the largest batch
            that fits. Each is estimated anew.
        batch_spec: The batch in words, where none can be read: dicts and lists of texts such as
            "float32[8, 3, 224, 224]", or "int64[8] = 128" where the step looks at the values.
        sample_batches: How many of the first batches of each loader to look at. The largest is estimated.
        stop_after: Whether to end the run after the verdict, before any training.
        report_path: File for the verdict, the estimate and the remedies: a page if it ends in ".html", a PyTorch
            memory snapshot of the predicted run if it ends in ".pickle", else JSON.
        probe: Whether to run real steps with one, two and a few samples where no step can be traced, and to judge
            by these. Everything is put back afterwards.
        calibrate: Whether to scale the estimate by what a MemoryMonitor measured in an earlier run of the model.

    Raises:
        ValueError: If the device is unknown, a size cannot be read, or an option is not one of its choices.

    Example::

        Trainer(callbacks=[MemoryPreflight(device_memory="12GiB")])
    """  # noqa: E501

    def __init__(
        self,
        device: str | None = None,
        device_memory: int | str | None = None,
        safety_margin: float = 0.05,
        on_overflow: Literal["raise", "warn", "off"] = "raise",
        on_error: Literal["warn", "raise", "off"] = "warn",
        remedies: bool = True,
        batch_spec: dict[str, Any] | list[Any] | str | None = None,
        sample_batches: int = 8,
        stop_after: bool = False,
        report_path: str | Path | None = None,
        calibrate: bool = True,
        probe: bool = False,
    ) -> None:
        super().__init__()
        choose_target(device, device_memory, torch.device("cpu"))
        judge(None, None, safety_margin=safety_margin)
        if batch_spec is not None:
            parse_batch_spec(batch_spec)
        if sample_batches < 1:
            raise ValueError(f"`sample_batches` must be at least 1, got {sample_batches}.")
        for name, value in (("on_overflow", on_overflow), ("on_error", on_error)):
            if value not in ("raise", "warn", "off"):
                raise ValueError(f"`{name}` must be 'raise', 'warn' or 'off', got {value!r}.")
        self.device = device
        self.device_memory = device_memory
        self.safety_margin = safety_margin
        self.on_overflow = on_overflow
        self.on_error = on_error
        self.remedies = remedies
        self.batch_spec = batch_spec
        self.sample_batches = sample_batches
        self.stop_after = stop_after
        self.report_path = report_path
        self.calibrate = calibrate
        self.probe = probe
        self.estimate: MemoryEstimate | None = None
        self.verdict: Verdict | None = None
        self.largest_batch_size: int | None = None
        self._next_hook: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.estimate = self.verdict = self._next_hook = self.largest_batch_size = None
            self._attempt(trainer, pl_module, "setup")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._next_hook == "on_fit_start":
            self._attempt(trainer, pl_module, "on_fit_start")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Another callback may have frozen or replaced parts of the model since `setup`.
        if any(gather(self._is_outdated(trainer, pl_module))):
            self._attempt(trainer, pl_module, "on_train_start")

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._next_hook == "on_train_batch_start":
            self._attempt(trainer, pl_module, "on_train_batch_start", batch)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._next_hook is not None:
            self._give_up(trainer, "setup", TraceError("no batch came to hand."))

    def _attempt(self, trainer: Trainer, pl_module: LightningModule, hook: str, batch: Any = None) -> None:
        """Trace a step; act on the verdict, or note in which hook to try again."""
        error: Exception | None = None
        estimate: MemoryEstimate | None = None
        plan: Callable[[], FitPlan] | None = None
        remarks: tuple[str, ...] = ()
        largest: LargestBatch | None = None
        # A probe runs on one device.
        probed_on = trainer.strategy.root_device.type if self.probe and not is_sharded(trainer) else None

        def trace(
            plan: Callable[[], FitPlan],
        ) -> tuple[MemoryEstimate, LargestBatch | None, tuple[str, ...]]:
            # Only counts where the process cannot fork.
            with unchanged(pl_module, getattr(trainer, "datamodule", None), skip=(trainer, self)):
                fit = plan()
                judged = f"Judged in `{hook}` by {fit.batch}, for device `{fit.plan.device}`."
                estimate = estimate_plan(fit.plan)
                ratio = find_calibration(trainer, pl_module, estimate) if self.calibrate else 1.0
                estimate = calibrated(estimate, ratio)
                capacity_bytes = without_context
                if target.total_bytes is None and capacity_bytes is not None:
                    capacity_bytes += estimate.outside_allocator_bytes
                largest = self._find_largest_batch(
                    replace(fit.plan, calibration=ratio), estimate, capacity_bytes
                )
                return estimate, largest, (judged, *fit.remarks)

        try:
            # The device is asked here: a forked child cannot reach it.
            target = self._target(trainer)
            without_context = target.capacity_bytes(0)
            plan = functools.partial(
                self._plan, trainer, pl_module, hook, _off_device(batch), target.estimate_for
            )
            progress = Progress("MemoryPreflight traces the run") if trainer.is_global_zero else None
            try:
                estimate, largest, remarks = isolated(functools.partial(trace, plan), progress=progress)
            except TraceError as refusal:
                if not is_time_to_probe(hook, refusal, probed_on):
                    raise
                real = functools.partial(self._plan, trainer, pl_module, hook, batch, target.estimate_for)
                estimate, remarks = probe_fit(trainer, pl_module, real, refusal, hook, skip=(trainer, self))
            finding = Finding(
                estimate.minimum_device_bytes, target.capacity_bytes(estimate.outside_allocator_bytes)
            )
        except Exception as caught:
            error = caught
            finding = Finding(
                problem=in_words(caught), next_hook=hook_with_probe_after(hook, caught, probed_on)
            )
        decision = merge(gather(finding), HOOKS)
        if estimate is not None and plan is not None and not decision.problem:
            self._next_hook = None
            self._conclude(trainer, plan, estimate, decision, hook, remarks, largest)
        elif self.verdict is None:
            self._next_hook = decision.next_hook
            if self._next_hook is None:
                self._give_up(trainer, hook, error or TraceError(decision.problem))
        error = None  # its traceback holds this frame, and with it the batch

    def _plan(
        self, trainer: Trainer, pl_module: LightningModule, hook: str, batch: Any, device: str
    ) -> FitPlan:
        on_device = hook == "on_train_batch_start"
        loaders = None
        source = "the first batch of the train loader"
        if self.batch_spec is not None:
            batch, on_device, source = parse_batch_spec(self.batch_spec), False, "`batch_spec`"
        elif not on_device:
            loaders = train_loaders(trainer)
            sample = largest_batch(loaders, count=self.sample_batches)
            batch, source = sample.batch, sample.describe("the train loader")
        if batch is None:
            raise TraceError("the train loader yields None. Let it yield tensors, or give `batch_spec`.")
        validation, remark = plan_validation_of(trainer, self.sample_batches)
        plan = plan_from_trainer(
            trainer,
            pl_module,
            batch,
            device=device,
            loaders=loaders,
            validation=validation,
            set_up=hook != "setup",
            on_device=on_device,
        )
        return FitPlan(plan, source, (remark,) if remark else ())

    def _target(self, trainer: Trainer) -> Any:
        return choose_target(self.device, self.device_memory, trainer.strategy.root_device)

    def _is_outdated(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        if self.estimate is None or self._next_hook is not None or is_sharded(trainer):
            return False
        parameters = list(pl_module.parameters())
        if any(is_lazy(parameter) for parameter in parameters):
            return False
        trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in parameters)
        return (trainable, total) != (self.estimate.trainable_parameters, self.estimate.total_parameters)

    def _conclude(
        self,
        trainer: Trainer,
        plan: Callable[[], FitPlan],
        estimate: MemoryEstimate,
        decision: Finding,
        hook: str,
        remarks: tuple[str, ...],
        largest: LargestBatch | None,
    ) -> None:
        """Report the verdict and act on it."""
        reason = (
            "" if decision.capacity_bytes is not None else "nothing tells how much memory the device has."
        )
        verdict = judge(
            decision.need_bytes,
            decision.capacity_bytes,
            safety_margin=self.safety_margin,
            when=hook,
            reason=reason,
        )
        notes = [*remarks, *notes_on(trainer, estimate.device, verdict)]
        exceeded = verdict.status in ("tight", "overflow")
        verdict = replace(verdict, largest_batch=_smallest(gather(largest)))
        self.estimate, self.verdict = estimate, verdict
        self.largest_batch_size = verdict.largest_batch.size if verdict.largest_batch else None
        remedies: tuple[Remedy, ...] = ()
        if exceeded and self.remedies and estimate.events is not None:  # What was measured cannot be traced.
            found = self._guarded("found no remedies", self._find_remedies, trainer, plan, estimate, verdict)
            remedies = found or ()
        self._report(trainer, estimate, remedies, notes)
        if exceeded and self.on_overflow != "off":
            message = overflow_message(estimate, verdict, remedies, self._target(trainer).name)
            if self.on_overflow == "raise":
                message += " To run all the same, pass `on_overflow='warn'`."
                raise MemoryOverflowError(message, estimate, verdict.capacity_bytes, remedies)
            rank_zero_warn(message)
        if self.stop_after:
            raise end_run(trainer)

    def _find_largest_batch(
        self, plan: TrainingPlan, estimate: MemoryEstimate, capacity_bytes: int | None
    ) -> LargestBatch | None:
        budget_bytes = int((capacity_bytes or 0) * (1.0 - self.safety_margin))
        need_bytes = estimate.minimum_device_bytes
        worth_it = need_bytes > budget_bytes or has_room(need_bytes, budget_bytes)
        if not (self.remedies and capacity_bytes and worth_it):
            return None
        try:
            return find_largest_batch(plan, estimate, budget_bytes)
        except Exception:  # It was a favor: the verdict stands without it.
            return None

    def _find_remedies(
        self, trainer: Trainer, plan: Callable[[], FitPlan], estimate: MemoryEstimate, verdict: Verdict
    ) -> tuple[Remedy, ...]:
        def search() -> tuple[Remedy, ...]:
            with unchanged():
                capacity_bytes = verdict.capacity_bytes or 0
                given = replace(plan().plan, calibration=applied_ratio(estimate))
                return suggest_remedies(given, estimate, capacity_bytes, safety_margin=self.safety_margin)

        text = "MemoryPreflight looks for changes that would help"
        return isolated(search, progress=Progress(text) if trainer.is_global_zero else None)

    def _report(
        self,
        trainer: Trainer,
        estimate: MemoryEstimate | None,
        remedies: Sequence[Remedy],
        notes: Sequence[str],
    ) -> None:
        """Publish on rank zero; every rank learns whether that failed, so that all go on or none does."""
        problem = ""
        assert self.verdict is not None
        try:
            publish(trainer, estimate, self.verdict, remedies, notes, self.report_path)
        except Exception as error:
            problem = in_words(error)
        problem = next(filter(None, gather(problem)), "")
        if problem and self.on_error == "raise":
            raise TraceError(
                f"`MemoryPreflight` could not report: {problem} Correct `report_path` or the loggers."
            )
        if problem and self.on_error == "warn":
            rank_zero_warn(f"`MemoryPreflight` could not report: {problem}")

    def _guarded(self, failure: str, function: Callable[..., T], *args: Any) -> T | None:
        """Call what must not end a run when it fails."""
        try:
            return function(*args)
        except Exception as error:
            if self.on_error == "raise":
                raise
            if self.on_error == "warn":
                rank_zero_warn(f"`MemoryPreflight` {failure}: {in_words(error)}")
            return None

    def _give_up(self, trainer: Trainer, hook: str, error: Exception) -> None:
        """Say that there will be no verdict."""
        self._next_hook = None
        self.verdict = judge(None, None, safety_margin=self.safety_margin, when=hook, reason=in_words(error))
        self._report(trainer, None, (), ())
        if self.on_error == "raise":
            raise error
        if self.on_error == "warn":
            measure = "" if self.probe else "let real steps be measured by `probe=True`, "
            rank_zero_warn(
                f"`MemoryPreflight` could not estimate this run: {in_words(error)} "
                f"{'It ends here' if self.stop_after else 'Training goes on'} without a verdict. "
                f"Give `batch_spec` if the batch is the obstacle, {measure}or hide this by `on_error='off'`."
            )
        if self.stop_after:
            raise end_run(trainer)


def _smallest(found: Sequence[LargestBatch | None]) -> LargestBatch | None:
    """Return what fits every rank: the smallest, or ``None`` if a rank knows none."""
    known = [largest for largest in found if largest is not None]
    return min(known, key=lambda largest: largest.size) if len(known) == len(found) else None


def _off_device(batch: Any) -> Any:
    """Take the values, but not the shapes, of a batch that lies on a device: a forked child cannot read them."""
    return map_tensors(lambda t: torch.empty_like(t, device="meta") if t.device.type == "cuda" else t, batch)
