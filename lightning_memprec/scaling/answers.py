"""Questions that often follow the change to a half precision, answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_memprec._units import format_bytes

__all__ = ["Answer", "Estimate", "answers_for"]

_FIXED = ("parameters", "buffers", "gradients", "optimizer states")


class _Storage(Protocol):
    @property
    def size_bytes(self) -> int: ...
    @property
    def category(self) -> str | None: ...


class _Events(Protocol):
    @property
    def storages(self) -> Sequence[_Storage]: ...
    @property
    def order(self) -> Sequence[int]: ...


class Estimate(Protocol):
    """What is read of a ``MemoryEstimate``."""

    @property
    def events(self) -> _Events | None:
        """Births and deaths of its storages."""

    @property
    def minimum_device_bytes(self) -> int:
        """What the run needs, in bytes."""


@dataclass(frozen=True)
class Answer:
    """An answer to a question that comes up after the precision was changed.

    Args:
        question: The question.
        answer: What it means and what to do.
    """

    question: str
    answer: str


def answers_for(precision: str, memory: Mapping[str, Estimate]) -> tuple[Answer, ...]:
    """Answer what is asked after the change to a precision.

    Args:
        precision: The new precision.
        memory: Estimates of one run by precision; their figures are quoted.

    Returns:
        The answers; none for ``"32-true"``, which changes nothing.
    """
    if precision == "32-true":
        return ()
    answers = [
        Answer("Half is on, but the memory did not fall?", _memory_answer(memory)),
        Answer("Slower than before?", _SLOWER),
    ]
    if precision == "bf16-mixed":
        answers.append(Answer("bf16 converges worse than FP32?", _CONVERGES_WORSE))
    return tuple(answers)


def _memory_answer(memory: Mapping[str, Estimate]) -> str:
    text = (
        "In mixed precision parameters, gradients and optimizer states stay in FP32: 16 bytes a parameter "
        "with Adam, as before. Only activations shrink, and half copies of the weights come on top while a "
        "layer runs. A small batch or a large model shows no gain; a larger batch does."
    )
    names = [name for name in ("32-true", "bf16-mixed", "16-mixed") if name in memory]
    fixed = {n: _largest_fixed_bytes(events) for n in names if (events := memory[n].events) is not None}
    if not fixed:
        return text
    needed = ", ".join(f"{format_bytes(memory[n].minimum_device_bytes)} in {n}" for n in fixed)
    sizes = ", ".join(f"{format_bytes(size)} in {n}" for n, size in fixed.items())
    return (
        f"{text} Here parameters, buffers, gradients and optimizer states take at most {sizes}; the whole run needs "
        f"{needed}."
    )


def _largest_fixed_bytes(events: _Events) -> int:
    """Follow these parts alone: at the peak of all parts some of them can be gone, in each precision others."""
    total = largest = 0
    for event in events.order:
        storage = events.storages[event if event >= 0 else ~event]
        if storage.category in _FIXED:
            total += storage.size_bytes if event >= 0 else -storage.size_bytes
            largest = max(largest, total)
    return largest


_SLOWER = (
    "Each product first casts its FP32 weights and inputs. That pays for large products on matrix units; for "
    "small layers, element-wise chains and batches of a few samples the casts cost more than they save. Make "
    "the batch larger, keep sizes multiples of 8, fuse small operations by `torch.compile`, or cast once "
    "and for all with FP32 masters."
)

_CONVERGES_WORSE = (
    "bf16 has 8 significant bits: between 1 and 2 its numbers lie 2^-7 = 0.0078 apart, against 2^-10 in fp16 "
    "and 2^-23 in FP32. Weights or sums kept in bf16 lose small updates; products do far less harm. Make sure "
    "that weights are FP32 (mixed, or masters; not 'bf16-true'), compute losses, norms and long sums in FP32, "
    "and try '16-mixed', which has 11 bits. `compare_precisions` shows the gap on your model."
)
