r"""BRECQ: whether each weight of a block rounds up or down is learned from what that does to the block's output.

Source: Li et al., "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction", arXiv 2102.05426,
with the rounding of AdaRound (Nagel et al., arXiv 2004.10568):

.. math::

    \min_V \; E[(z - \hat z)^T \mathrm{diag}(g^2)\, (z - \hat z)] + \lambda \sum (1 - |2 h(V) - 1|^\beta),
    \qquad \hat w = s \cdot \mathrm{clip}(\lfloor w / s \rfloor + h(V))

:math:`z` is the output of the block, :math:`g` the gradient of the task's loss with respect to it, of which the square
is the diagonal of the Fisher information. :math:`h` is a sigmoid, stretched and clipped to [0, 1]; the second term
drives it to 0 or 1, the more gently the larger :math:`\beta` is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memprec.quantization.affine import Quantized, integer_range, spread
from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.block_wise import BlockWise, Inputs
from lightning_memprec.quantization.reconstruction.blocks import Block, as_parameter
from lightning_memprec.quantization.reconstruction.learning import Integers, Learner, real
from lightning_memprec.quantization.reconstruction.recording import Call
from lightning_memprec.quantization.reconstruction.task_loss import task_loss

__all__ = [
    "BRECQ",
    "LearnedRounding",
    "annealed",
    "rectified_sigmoid",
    "rounding_penalty",
    "undo_rectified_sigmoid",
]

_ZETA, _GAMMA = 1.1, -0.1  # Of the stretched sigmoid: section 3.1 of AdaRound.
_BETA = (
    20.0,
    2.0,
)  # First and last exponent: `b_start` and `b_end` of github.com/yhhhli/BRECQ, main_imagenet.py.
_WARM_UP = 0.2  # Share of the steps without a penalty: `warmup` of the same.


def rectified_sigmoid(values: Tensor) -> Tensor:
    """Return ``clip(1.2 sigmoid(v) - 0.1, 0, 1)``, which reaches 0 and 1 and keeps a gradient close to them.

    Example:
        >>> rectified_sigmoid(torch.tensor([-3.0, 0.0, 3.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    return (torch.sigmoid(values) * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def undo_rectified_sigmoid(shares: Tensor) -> Tensor:
    """Return where :func:`rectified_sigmoid` takes values in [0, 1]."""
    return -torch.log((_ZETA - _GAMMA) / (shares - _GAMMA) - 1)


def rounding_penalty(shares: Tensor, beta: float) -> Tensor:
    """Return the sum of ``1 - |2 h - 1| ** beta``: 0 where all of ``h`` is 0 or 1."""
    return (1 - (2 * shares - 1).abs().pow(beta)).sum()


def annealed(progress: float) -> float | None:
    """Return the exponent of the penalty after a share of the steps, or ``None`` while there is no penalty.

    Example:
        >>> annealed(0.1), annealed(0.2), annealed(0.6), annealed(1.0)
        (None, 20.0, 11.0, 2.0)
    """
    if progress < _WARM_UP:
        return None
    first, last = _BETA
    return last + (first - last) * (1 - (progress - _WARM_UP) / (1 - _WARM_UP))


class LearnedRounding(Learner):
    """Weights that lie between the integers below and above, by a share that is learned.

    Args:
        block: The block.
        calls: Its recorded calls, with gradients of the task's loss.
        start: Weights rounded to nearest; their scales and zero points stay.
        regularization: Weight of the penalty's mean, relative to the error of rounding to nearest.
        damping: What is added to squared gradients that have a mean of 1.
    """

    def __init__(
        self, block: Block, calls: Sequence[Call], start: Integers, regularization: float, damping: float
    ) -> None:
        self._block, self._start = block, start
        self._regularization, self._damping = regularization, damping
        self._targets = {target.name: target for target in block.targets if target.name in start}
        self._below: dict[tuple[str, str], Tensor] = {}
        self._shares: dict[tuple[str, str], Tensor] = {}
        for name, target in self._targets.items():
            for key, quantized in start[name].items():
                matrix = target.weights[key]().float()
                steps = matrix / spread(quantized.scale, matrix.shape[1], target.scheme.group_size)
                self._below[name, key] = steps.floor()
                self._shares[name, key] = undo_rectified_sigmoid(steps - steps.floor()).requires_grad_()
        self._mean_square, self.note = _mean_square(calls)

    @property
    def parameters(self) -> list[Tensor]:
        """What Adam changes."""
        return list(self._shares.values())

    def _integers(self, name: str, key: str, shares: Tensor) -> Tensor:
        """Return integers, in floating point, with or without the fractions of the shares."""
        target, quantized = self._targets[name], self._start[name][key]
        steps = self._below[name, key] + shares
        if quantized.zero_point is not None:
            steps = steps + spread(quantized.zero_point, steps.shape[1], target.scheme.group_size)
        return steps.clamp(*integer_range(target.scheme.bits, target.scheme.mapping))

    def weights(self) -> dict[str, Tensor]:
        """Return weights between the integers."""
        found = {}
        for (name, key), shares in self._shares.items():
            target = self._targets[name]
            between = self._start[name][key]._replace(
                values=self._integers(name, key, rectified_sigmoid(shares))
            )
            found[self._block.parameter_name(target, key)] = as_parameter(target, key, real(target, between))
        return found

    def quantized(self) -> Integers:
        """Return the weights rounded to where they are closer to."""
        found: dict[str, dict[str, Quantized]] = {name: {} for name in self._targets}
        for (name, key), shares in self._shares.items():
            up = (rectified_sigmoid(shares.detach()) >= 0.5).float()
            integers = self._integers(name, key, up).to(torch.int8)
            found[name][key] = self._start[name][key]._replace(values=integers)
        return found

    def importance(self, call: Call) -> Tensor | None:
        """Return damped squared gradients."""
        if call.gradient is None or not self._mean_square:
            return None
        return call.gradient.load().float().square() / self._mean_square + self._damping

    def penalty(self, progress: float) -> Tensor | float:
        """Return the mean of the rounding penalty."""
        beta = annealed(progress)
        if beta is None:
            return 0.0
        total = torch.stack([rounding_penalty(rectified_sigmoid(v), beta) for v in self.parameters]).sum()
        return self._regularization * total / sum(v.numel() for v in self.parameters)


def _mean_square(calls: Sequence[Call]) -> tuple[float, str | None]:
    """Return the mean of the squared gradients of calls, and what they are gradients of."""
    squares = [call.gradient.load().double().square() for call in calls if call.gradient is not None]
    if not squares:
        return 0.0, "no gradient of a loss reached it, so all outputs count alike"
    mean = float(sum(part.sum() for part in squares) / max(1, sum(part.numel() for part in squares)))
    return mean, next((call.gradient_of for call in calls if call.gradient_of), None)


@dataclass(frozen=True)
class BRECQ(BlockWise):
    """Solver of the method ``"brecq"``.

    Args:
        regularization: Weight of the penalty that drives weights to integers, relative to the error of rounding to
            nearest.
        damping: Added to the squared gradients, which are scaled to a mean of 1. With 0 only the task's loss counts.
    """

    inputs: Inputs = "student"
    iterations: int = 1000
    learning_rate: float = 0.03
    regularization: float = 1000.0
    damping: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("regularization", self.regularization), ("damping", self.damping)):
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be at least 0 and finite, got {value!r}. Use 1.")

    def loss(self) -> Callable[[Any], tuple[str | None, Tensor] | None]:
        """Return the task's loss, or what stands for it."""
        return task_loss(self.seed)

    def learner(self, block: Block, calls: Sequence[Call], start: Integers) -> Learner:
        """Return the weights of a block while they are learned."""
        return LearnedRounding(block, calls, start, self.regularization, self.damping)


register_method(Method("brecq", Scheme(), BRECQ(), needs_calibration=True))
