"""What is told of a run's memory: one table, from which every message is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_memprec._units import format_bytes

__all__ = ["MemoryEvent", "event_from_dict", "make_event"]

Severity = Literal["info", "warning"]

# By kind: severity, and what was seen, what it means and what to do. Figures in bytes are written with their unit.
_WORDS: dict[str, tuple[Severity, str]] = {
    "compared": ("info", "After {steps} steps: {comparison}"),
    "prediction_off": (
        "warning",
        "After {steps} steps: {comparison} That is more than the tolerance of {tolerance:.0%}; most of it lies in "
        "{part}. {remedy}",
    ),
    "above_prediction": (
        "warning",
        "A peak of {measured_bytes} was reached, and {predicted_bytes} were predicted. The batch of a step was larger "
        "than any that was looked at. Try: (1) describe the largest with `MemoryPreflight(batch_spec=...)`, or look at "
        "more with `sample_batches`; (2) limit the length of samples.",
    ),
    "not_compared": ("info", "The prediction of {predicted_bytes} was not held against this run: {reason}"),
    "no_peak": (
        "info",
        "torch tells no peak of tensors on this device ({device}). What it tells is logged; no prediction is judged.",
    ),
    "fragmentation": (
        "warning",
        "Tensors took {allocated_bytes} at most, and the allocator holds {reserved_bytes}: {lost_bytes} are lost to "
        "fragmentation, while the device has {free_bytes} left. {remedy}",
    ),
    "alloc_retries": (
        "warning",
        "The allocator ran out of memory and came through by giving its cache back (retries in this run: {retries}). "
        "That is slow, and the next step may fail. Try: (1) a smaller batch with accumulation; (2) activation "
        "checkpointing. {remedy}",
    ),
    "growth": (
        "warning",
        "Memory on the device keeps rising: from {from_bytes} at step {first_step} to {to_bytes} at step {last_step}, "
        "{rate_bytes} a step. {holder}",
    ),
    "cyclic_garbage": (
        "info",
        "Memory on the device rose from {from_bytes} at step {first_step} to {to_bytes} at step {last_step}; Python's "
        "garbage collector freed {freed_bytes} of it. Tensors sit in reference cycles and wait for the collector. "
        "Nothing is lost, but the peak is higher: end the cycles, or call `gc.collect()` now and then.",
    ),
    "host_growth": (
        "warning",
        "Resident memory of the process keeps rising: from {from_bytes} at step {first_step} to {to_bytes} at step "
        "{last_step}, {rate_bytes} a step. {holder}",
    ),
}


@dataclass(frozen=True)
class MemoryEvent:
    """Something worth telling about the memory of a run.

    Args:
        kind: Which of the kinds in the table of `docs/memory-monitor.md`.
        severity: ``"info"`` for what is normal, ``"warning"`` for what needs a person.
        step: Optimizer steps made when it was seen.
        message: What was seen, what it means, and what to do.
        figures: The numbers and names in the message; sizes in bytes.
    """

    kind: str
    severity: Severity
    step: int
    message: str
    figures: dict[str, float | int | str]


def make_event(kind: str, step: int, figures: Mapping[str, Any]) -> MemoryEvent:
    """Put an event into words.

    Args:
        kind: Its kind.
        step: Optimizer steps made.
        figures: What the words need.

    Example:
        >>> make_event("not_compared", 4, {"predicted_bytes": 1024, "reason": "No peak."}).message
        'The prediction of 1.00 KiB was not held against this run: No peak.'
    """
    severity, text = _WORDS[kind]
    words = {
        name: format_bytes(value) if name.endswith("_bytes") else value for name, value in figures.items()
    }
    return MemoryEvent(kind, severity, step, text.format(**words), dict(figures))


def event_from_dict(values: Mapping[str, Any]) -> MemoryEvent:
    """Read an event of a checkpoint.

    Raises:
        ValueError: If it is none.
        KeyError: If a field is missing.
        TypeError: If a field is of another type.
    """
    if values["severity"] not in ("info", "warning") or not isinstance(values["figures"], dict):
        raise ValueError(f"no event of memory: {str(values)[:80]!r}")
    return MemoryEvent(
        str(values["kind"]),
        values["severity"],
        int(values["step"]),
        str(values["message"]),
        values["figures"],
    )
