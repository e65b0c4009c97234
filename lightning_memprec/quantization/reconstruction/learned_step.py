r"""Rounding whose gradient passes through, to the values and to the step.

With :math:`n = z/\Delta` the rounded value is :math:`\Delta\,(\mathrm{clip}(\mathrm{round}(n) + zero) - zero)`. The
straight-through estimator takes the derivative of ``round`` for 1, which gives
:math:`\partial/\partial z = 1` and :math:`\partial/\partial\Delta = \mathrm{round}(n) - n` inside of the range, and 0
and the end of the range where a value is clipped (AdaQuant, arXiv 2006.10518; LSQ, arXiv 1902.08153, equation 3).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["round_through"]


def round_through(values: Tensor, step: Tensor, zero_point: Tensor | None, low: int, high: int) -> Tensor:
    """Round to a grid; gradients reach the values and the step.

    Args:
        values: Floating point, any shape.
        step: Distance between neighbours of the grid, larger than 0, broadcast against ``values``.
        zero_point: Integer that stands for 0, broadcast against ``values``; 0 for ``None``.
        low: Smallest integer.
        high: Largest integer.

    Returns:
        Values of the grid, in the shape of ``values``.

    Example:
        >>> values = torch.tensor([0.6, 9.0], requires_grad=True)
        >>> step = torch.tensor(0.5, requires_grad=True)
        >>> rounded = round_through(values, step, None, -7, 7)
        >>> rounded
        tensor([0.5000, 3.5000], grad_fn=<_RoundBackward>)
        >>> rounded.sum().backward()
        >>> values.grad, step.grad
        (tensor([1., 0.]), tensor(6.8000))
    """
    return cast("Tensor", _Round.apply(values, step, zero_point, low, high))  # type: ignore[no-untyped-call]


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, step: Tensor, zero_point: Tensor | None, low: int, high: int
    ) -> Tensor:
        exact = values / step
        integers = torch.round(exact)
        if zero_point is None:
            clipped = integers.clamp(low, high)
        else:
            clipped = (integers + zero_point).clamp(low, high) - zero_point
        inside = clipped == integers
        ctx.save_for_backward(inside, torch.where(inside, integers - exact, clipped))
        ctx.step_shape = step.shape
        return clipped * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # type: ignore[override]
        inside, slope = ctx.saved_tensors
        of_step = (gradient * slope).sum_to_size(ctx.step_shape) if ctx.needs_input_grad[1] else None
        return gradient * inside, of_step, None, None, None
