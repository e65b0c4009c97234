"""AdaQuant of one layer: learn a change of the weights, the steps and the bias from rows of inputs and outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.reconstruction.adaquant_student import (
    Inputs,
    Problem,
    Student,
    channel_errors,
)

__all__ = ["Learned", "LearningRates", "learn"]

_CHECKS = 20  # Times that the held-out rows are looked at.
_EPSILON = 1e-15  # Of Adam; gradients of a mean over many channels fall below its usual 1e-8.
_SEARCHED = 256  # Rows that decide from which step of the inputs to start.
# Half octaves, down to 1/4096: the largest input of a layer can be a thousand times the second largest, as in language
# models whose first token has massive activations (arXiv 2402.17762).
_STRETCHES = [-math.log(2) * half / 2 for half in range(25)]


@dataclass(frozen=True)
class LearningRates:
    """How far Adam goes in a step, at first; the rates fall linearly to zero.

    Args:
        weights: In steps of the weight's grid.
        steps: In natural logarithms of a step of weights.
        inputs: The same of the inputs' step.
        bias: In root mean squares of the layer's output.
    """

    weights: float
    steps: float
    inputs: float
    bias: float


class Learned(NamedTuple):
    """What was learned.

    Attributes:
        weight: The quantized weight.
        inputs: Scale and zero point of static activations.
        bias: FP32 ``[R]``, or ``None``.
        kept: Channels for which nothing errs less than rounding to nearest.
        error: Squared error on held-out rows relative to rounding to nearest; NaN if that has none.
    """

    weight: Quantized
    inputs: Inputs | None
    bias: Tensor | None
    kept: int
    error: float


def learn(
    problem: Problem, rates: LearningRates, *, iterations: int, batch_rows: int, learn_inputs: bool, seed: int
) -> Learned:
    """Learn one layer.

    What errs least on held-out rows is kept, rounding to nearest included: of each channel by itself where channels do
    not share a step, else of the layer. The step of inputs, which they do share, is therefore settled after half of the
    iterations.

    Args:
        problem: The layer and its rows.
        rates: Learning rates.
        iterations: Steps of Adam.
        batch_rows: Rows in a step.
        learn_inputs: Whether the step of static activations changes.
        seed: Of the order in which rows are taken.
    """
    student = Student(problem, learn_inputs=learn_inputs)
    best = _Best(student)
    start = float(best.errors.sum())
    if 0 < start < math.inf and learn_inputs and problem.inputs is not None:
        _search_inputs(student, seed)
        best.update()
    if not 0 < start < math.inf:
        return Learned(problem.nearest, problem.inputs, problem.bias, len(problem.matrix), math.nan)
    groups = [{"params": [part], "lr": getattr(rates, name)} for name, part in student.parts.items()]
    optimizer = torch.optim.Adam(groups, eps=_EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / iterations)
    order = _order(len(problem.rows[0]), batch_rows, iterations, seed)
    power = max(float(problem.outputs[0].square().mean()), torch.finfo(torch.float32).tiny)
    for iteration, chosen in enumerate(order, 1):
        _step(student, chosen, power, optimizer)
        schedule.step()
        if iteration * _CHECKS // iterations > (iteration - 1) * _CHECKS // iterations:
            best.update()
        if iteration == iterations // 2:
            best.restore()
            student.settle_inputs()
    best.restore()
    kept = (student.shift == 0).all(1) & (student.stretch.detach() == 0).reshape(
        student.stretch.shape[0], -1
    ).all(1)
    return _result(student, int(kept.sum()), float(best.errors.sum()) / start)


def _search_inputs(student: Student, seed: int) -> None:
    """Start from the step of inputs that errs least, of ever smaller ones; a wide range has no gradient to a narrow."""
    problem, device = student.problem, student.shift.device
    chosen = torch.randperm(len(problem.rows[0]), generator=torch.Generator().manual_seed(seed))[:_SEARCHED]
    rows, exact, importance = (
        part[0][chosen].to(device) for part in (problem.rows, problem.outputs, problem.importance)
    )
    with torch.no_grad():
        weight, errors = student.weight(), []
        for stretch in _STRETCHES:
            student.input_stretch.fill_(stretch)
            squares = (student.outputs(rows, weight) - exact).double().square()
            errors.append(float((squares * importance[:, None]).sum()))
        student.input_stretch.fill_(_STRETCHES[min(range(len(errors)), key=errors.__getitem__)])


class _Best:
    """The best state of a student so far, on held-out rows.

    Attributes:
        errors: Squared errors of channels, FP64 ``[R]``.
    """

    def __init__(self, student: Student) -> None:
        self._student = student
        self.errors = channel_errors(student)
        self._state = student.state()

    def update(self) -> None:
        """Take over what has become better."""
        errors = channel_errors(self._student)
        better = errors < self.errors
        if self._student.channels_depend():
            better = (errors.sum() < self.errors.sum()).expand_as(errors)
        self.errors = torch.where(better, errors, self.errors)
        better = better.to(self._student.shift.device)
        for name, part in self._student.state().items():
            # What channels share has one entry or is one row of a matrix.
            chosen = better[: len(part)]
            self._state[name] = torch.where(
                chosen[:, None] if part.dim() == 2 else chosen, part, self._state[name]
            )

    def restore(self) -> None:
        """Go back to it."""
        self._student.restore(self._state)


def _order(count: int, size: int, iterations: int, seed: int) -> list[Tensor]:
    """Return which rows each step takes: all in random order, then all again."""
    generator = torch.Generator().manual_seed(seed)
    order: list[Tensor] = []
    while len(order) < iterations:
        order += torch.split(torch.randperm(count, generator=generator), size)
    return order[:iterations]


def _step(student: Student, chosen: Tensor, power: float, optimizer: torch.optim.Optimizer) -> None:
    device = student.shift.device
    problem = student.problem
    rows, exact, importance = (
        part[0][chosen].to(device) for part in (problem.rows, problem.outputs, problem.importance)
    )
    with torch.enable_grad():
        squares = (student.outputs(rows, student.weight()) - exact).square()
        loss = (squares * importance[:, None]).mean() / power
        parts = list(student.parts.values())
        for part, gradient in zip(parts, torch.autograd.grad(loss, parts), strict=True):
            part.grad = gradient
    optimizer.step()


def _result(student: Student, kept: int, error: float) -> Learned:
    problem = student.problem
    inputs, bias = problem.inputs, problem.bias
    if inputs is not None:
        inputs = inputs[0] * student.input_stretch.detach().exp(), inputs[1]
    if bias is not None:
        bias = bias + student.unit * student.bias_shift.detach()
    return Learned(student.quantized(), inputs, bias, kept, error)
