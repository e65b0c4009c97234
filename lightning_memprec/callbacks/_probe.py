"""Measure real steps with few samples where a run cannot be traced."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from lightning_memprec._isolation import unchanged
from lightning_memprec._progress import Progress
from lightning_memprec.callbacks._child import isolated
from lightning_memprec.callbacks._outcome import hook_after, in_words
from lightning_memprec.memory.probe import probe_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memprec._lightning import LightningModule, Trainer
    from lightning_memprec.callbacks._trainer_plan import FitPlan
    from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["hook_with_probe_after", "is_time_to_probe", "probe_fit"]


def is_time_to_probe(hook: str, error: Exception, device_type: str | None) -> bool:
    """Tell whether no later hook could still trace the run, so that a probe must do.

    On a device the model must be there: only the first batch is late enough.

    Args:
        hook: Where the trace failed.
        error: How it failed.
        device_type: Of the Trainer's device; ``None`` if no probe is allowed.
    """
    if device_type == "cpu":
        return hook_after(hook, error) is None
    return device_type is not None and hook == "on_train_batch_start"


def hook_with_probe_after(hook: str, error: Exception, device_type: str | None) -> str | None:
    """Return the hook in which a failed attempt could succeed, by a trace or by a probe; arguments as above."""
    later = hook_after(hook, error)
    if later is None and device_type not in (None, "cpu") and hook != "on_train_batch_start":
        return "on_train_batch_start"
    return later


def probe_fit(
    trainer: Trainer,
    pl_module: LightningModule,
    plan: Callable[[], FitPlan],
    refusal: Exception,
    hook: str,
    *,
    skip: tuple[object, ...],
) -> tuple[MemoryEstimate, tuple[str, ...]]:
    """Probe the run of ``trainer.fit``: on a CPU in a child process, on a device in place.

    Args:
        trainer: Trainer inside ``fit``.
        pl_module: Its module.
        plan: Reads the run.
        refusal: Why it could not be traced.
        hook: Where this happens.
        skip: Objects that are not looked into for state to put back.

    Returns:
        The estimate, and what a reader should know of it.
    """

    def measure() -> tuple[MemoryEstimate, tuple[str, ...]]:
        with unchanged(pl_module, getattr(trainer, "datamodule", None), skip=skip):
            fit = plan()
            estimate = probe_plan(fit.plan)
        measured = estimate.assumptions[0].text.partition(":")[0].rstrip(".")
        said = (
            f"Judged in `{hook}` by {fit.batch}, for device `{fit.plan.device}`: {measured[0].lower()}{measured[1:]}.",
            f"Measured because tracing failed: {in_words(refusal)}",
        )
        return estimate, (*said, *fit.remarks)

    progress = Progress("MemoryPreflight measures steps with few samples") if trainer.is_global_zero else None
    if trainer.strategy.root_device.type == "cpu":
        return isolated(measure, progress=progress)
    with progress or nullcontext():
        return measure()
