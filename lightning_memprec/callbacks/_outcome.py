"""What a preflight says about its outcome, and what it does when there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_memprec._batch import BatchUnavailableError
from lightning_memprec._errors import DataDependentError, TraceError
from lightning_memprec._optional import is_installed
from lightning_memprec.report.file import save_report
from lightning_memprec.report.text import format_estimate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lightning_memprec.memory.result import MemoryEstimate, Remedy
    from lightning_memprec.report.verdict import Verdict

__all__ = ["HOOKS", "hook_after", "in_words", "notes_on", "publish"]

# Hooks in which a verdict can be given, in the order in which they come.
HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_batch_start")

# Lightning's callbacks that hold averaged weights; callbacks are not traced.
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")


def in_words(error: Exception) -> str:
    """Write an error as a sentence; the package's own need no type name."""
    text = str(error) or type(error).__name__
    known = isinstance(error, (TraceError, BatchUnavailableError))
    text = text if known else f"{type(error).__name__}: {text}"
    return text if text.endswith(".") else f"{text}."


def hook_after(hook: str, error: Exception) -> str | None:
    """Return the hook in which a failed attempt could succeed."""
    if hook == "on_train_batch_start" or isinstance(error, DataDependentError):
        return None
    # What can be opened only once is left to the Trainer. Anything else may be cured by the module's `setup`.
    once = isinstance(error, BatchUnavailableError)
    return "on_train_batch_start" if once or hook != "setup" else "on_fit_start"


def notes_on(trainer: Any, device: str, verdict: Verdict) -> list[str]:
    """List what a reader should know of the run that the estimate does not."""
    notes = []
    if device == "cpu" and verdict.capacity_bytes is not None:
        notes.append("Judged by the rules of the CPU. To plan for a GPU, name one with `device`.")
    for callback in trainer.callbacks:
        if any(base.__name__ in _AVERAGING for base in type(callback).__mro__):
            notes.append(f"`{type(callback).__name__}` keeps a copy of the weights, which is not counted.")
    return notes


def publish(
    trainer: Any,
    estimate: MemoryEstimate | None,
    verdict: Verdict,
    remedies: Sequence[Remedy],
    notes: Sequence[str],
    path: str | Path | None,
) -> None:
    """Print, log and write a verdict, on rank zero.

    Args:
        trainer: Trainer whose loggers are told.
        estimate: The estimate, ``None`` if there is none; then only the file is written.
        verdict: The verdict.
        remedies: Changes that would help.
        notes: Remarks for the reader.
        path: File to write, in the form that its ending names; ``None`` for none.
    """
    if not trainer.is_global_zero:
        return
    if estimate is not None:
        if is_installed("rich"):
            from rich import get_console

            from lightning_memprec.report.rich_table import render_estimate

            get_console().print(render_estimate(estimate, verdict, remedies, notes))
        else:
            rank_zero_info("\n" + format_estimate(estimate, verdict, remedies, notes))
        for logger in trainer.loggers:
            logger.log_metrics(_metrics(estimate, verdict), step=trainer.global_step)
    if path is not None:
        save_report(path, estimate, verdict, remedies, notes)


def _metrics(estimate: MemoryEstimate, verdict: Verdict) -> dict[str, float]:
    sizes = {name.replace(" ", "_"): size for name, size in estimate.breakdown.items()}
    sizes["peak_allocated"] = estimate.peak_allocated_bytes
    sizes["peak_device"] = estimate.peak_device_bytes
    sizes["minimum_device"] = estimate.minimum_device_bytes
    if verdict.capacity_bytes is not None and verdict.headroom_bytes is not None:
        sizes["capacity"], sizes["headroom"] = verdict.capacity_bytes, verdict.headroom_bytes
    return {f"memprec/preflight/{name}_bytes": float(size) for name, size in sizes.items()}
