"""Learn the weights of one block from its recorded calls, by Adam; what errs least on held-out calls is kept."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memprec.quantization.affine import Quantized, dequantize, spread
from lightning_memprec.quantization.reconstruction.blocks import Block, as_parameter
from lightning_memprec.quantization.reconstruction.recording import Call, replay
from lightning_memprec.quantization.targets import Target

__all__ = [
    "Errors",
    "Integers",
    "Learner",
    "Schedule",
    "errors",
    "learn",
    "real",
    "squared_error",
    "substitutes",
]

_CHECKS = 20  # Times that held-out calls are looked at, which costs each time what as many steps' forward passes do.
_NEAREST = "rounded to nearest: "
_EPSILON = (
    1e-15  # Of Adam; gradients of a mean shrink with the number of weights, often below its usual 1e-8.
)

Integers = Mapping[str, Mapping[str, Quantized]]


class Errors(NamedTuple):
    """How far the output of a block is from that of the float block.

    Attributes:
        weighted: Mean of the squared differences, weighted as the method wants.
        plain: Mean of the squared differences.
    """

    weighted: float
    plain: float


@dataclass(frozen=True)
class Schedule:
    """How to learn.

    Attributes:
        iterations: Steps; each takes one call.
        learning_rate: Of Adam.
        seed: Of the order in which calls are taken.
    """

    iterations: int
    learning_rate: float
    seed: int


class Learner(ABC):
    """The weights of a block while they are learned.

    Attributes:
        note: What is not as the method asks.
    """

    note: str | None = None

    @property
    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """What Adam changes."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return differentiable weights, by their names as parameters of the block."""

    @abstractmethod
    def quantized(self) -> Integers:
        """Return the quantized weights as they stand, by target and weight name."""

    def importance(self, call: Call) -> Tensor | None:
        """Return weights of the squared differences of an output, or ``None`` for a plain mean."""
        return None

    def penalty(self, progress: float) -> Tensor | float:
        """Return what is added to the relative error.

        Args:
            progress: Share of the steps that is done.
        """
        return 0.0


def squared_error(call: Call, output: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the mean of squared differences to what a call gave, without padding, in FP32.

    Args:
        call: A call of the float block.
        output: What the quantized block answers.
        importance: Weights of the squares, same shape.
    """
    squares = (output.float() - call.output.load().float()).square()
    if importance is not None:
        squares = squares * importance
    return call.without_padding(squares).mean()


def substitutes(block: Block, quantized: Integers) -> dict[str, Tensor]:
    """Return dequantized weights by their names as parameters of a block."""
    return {
        block.parameter_name(target, key): as_parameter(target, key, real(target, own))
        for target in block.targets
        for key, own in quantized.get(target.name, {}).items()
    }


def real(target: Target, quantized: Quantized) -> Tensor:
    """Return what the integers of a weight stand for, FP32 ``[R, K]``."""
    columns, size = quantized.values.shape[1], target.scheme.group_size
    zero_point = None if quantized.zero_point is None else spread(quantized.zero_point, columns, size)
    return dequantize(quantized.values, spread(quantized.scale, columns, size), zero_point)


def errors(block: Block, calls: Sequence[Call], learner: Learner, quantized: Integers) -> Errors:
    """Run calls with quantized weights."""
    weights = substitutes(block, quantized)
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for call in calls:
        output, importance = replay(block.module, call, weights), learner.importance(call)
        means = [squared_error(call, output, weighting) for weighting in (importance, None)]
        numbers = call.without_padding(output).numel()
        sums += torch.stack(means).double().cpu() * numbers
        count += numbers
    weighted, plain = (sums / max(1, count)).tolist()
    return Errors(weighted, plain)


def learn(
    block: Block, calls: Sequence[Call], start: Integers, learner: Learner, schedule: Schedule
) -> tuple[Integers, str | None]:
    """Learn the weights of a block.

    Args:
        block: The block; its layers round activations already if they shall.
        calls: Recorded calls. The last fifth judges: held-out calls are the same for each candidate.
        start: Weights rounded to nearest.
        learner: The weights that change.
        schedule: How to learn.

    Returns:
        The weights that err least on held-out calls, never more than at the start by either measure, and what was not
        as it should be.
    """
    taught, judging = _split(calls)
    first = best = errors(block, judging, learner, start)
    if not 0 < min(first) <= max(first) < math.inf:
        return start, f"{_NEAREST}its mean squared error on held-out batches is {first.plain:.3g}"
    kept = start
    optimizer = torch.optim.Adam(learner.parameters, lr=schedule.learning_rate, eps=_EPSILON)
    order = _order(len(taught), schedule)
    for step, index in enumerate(order, 1):
        progress = (step - 1) / len(order)
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * (1 - progress)
        if not _step(block, taught[index], learner, first.weighted, progress, optimizer):
            if step == 1:
                return start, f"{_NEAREST}no finite gradients reach its weights"
            break
        if step * _CHECKS // len(order) == (step - 1) * _CHECKS // len(order):
            continue
        candidate = learner.quantized()
        found = errors(block, judging, learner, candidate)
        if found.weighted < best.weighted and found.plain <= first.plain:
            kept, best = candidate, found
    if kept is start:
        return start, f"{_NEAREST}nothing that was tried errs less on held-out batches"
    return kept, "judged by the batch it learned from, the only one" if len(calls) == 1 else None


def _split(calls: Sequence[Call]) -> tuple[Sequence[Call], Sequence[Call]]:
    """Return calls to learn from and calls that judge: the last fifth, as in five-fold cross-validation."""
    held = max(1, len(calls) // 5) if len(calls) > 1 else 0
    taught = calls[: len(calls) - held]
    return taught, calls[len(calls) - held :] if held else taught


def _order(count: int, schedule: Schedule) -> list[int]:
    """Return which call each step takes: all in random order, then all again."""
    generator = torch.Generator().manual_seed(schedule.seed)
    order: list[int] = []
    while len(order) < schedule.iterations:
        order += torch.randperm(count, generator=generator).tolist()
    return order[: schedule.iterations]


def _step(
    block: Block,
    call: Call,
    learner: Learner,
    scale: float,
    progress: float,
    optimizer: torch.optim.Optimizer,
) -> bool:
    """Change the weights a little; return whether that was possible, as it is with finite gradients."""
    try:
        with torch.enable_grad():
            output = replay(block.module, call, learner.weights())
            error = squared_error(call, output, learner.importance(call))
            if not error.requires_grad:  # The block runs without gradients.
                return False
            loss = error / scale + learner.penalty(progress)
            gradients = torch.autograd.grad(loss, learner.parameters, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # It changes in place what gradients are made of, or holds inference tensors.
        return False
    if not all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
        return False
    for parameter, gradient in zip(learner.parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return True
