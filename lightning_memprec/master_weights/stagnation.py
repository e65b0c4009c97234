"""Count the updates that half-precision weights cannot take: those below half a unit in the last place.

A bfloat16 weight near 1 moves up only by more than 2⁻⁸ = 0.0039, a float16 weight by more than 2⁻¹¹ = 0.00049;
a smaller step is rounded away, however often it is repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["count_lost_updates", "count_unchanged", "sample"]


def sample(tensor: Tensor, limit: int) -> Tensor:
    """Copy at most ``limit`` elements of a tensor, evenly spaced, without a random generator.

    Args:
        tensor: Any shape; of a sharded one, this rank's part.
        limit: Largest number of elements.

    Returns:
        A new tensor of one dimension.

    Example:
        >>> sample(torch.arange(10), 4)
        tensor([0, 3, 6, 9])
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().reshape(-1)
    # An odd stride does not keep to a few columns of a matrix, whose width is often a power of two.
    stride = -(-flat.numel() // limit) | 1
    return flat[::stride].clone()


def count_lost_updates(before: Tensor, after: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Count the updates of FP32 weights that weights in ``dtype`` would have lost.

    Args:
        before: Weights before the step, float32 or float64.
        after: Weights after it, same shape and dtype.
        dtype: The half-precision dtype in question.

    Returns:
        ``(lost, intended)``, two int64 tensors without dimensions: the elements whose update, added to the
        rounded weight, rounds back to it; and all elements that the step changed.

    Example:
        >>> before = torch.ones(3)
        >>> lost, intended = count_lost_updates(before, before - torch.tensor([0.0, 1e-3, 1e-2]), torch.bfloat16)
        >>> lost.item(), intended.item()
        (1, 2)
    """
    half = before.to(dtype)
    taken = (half.to(before.dtype) + (after - before)).to(dtype) != half
    intended = before != after
    return (intended & ~taken).sum(), intended.sum()


def count_unchanged(before: Tensor, after: Tensor, has_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Count the weights with a gradient that a step left unchanged.

    The update that was rounded away is not known where the optimizer rounds in place; that the weight did not
    move, although it had a gradient, is.

    Args:
        before: Weights before the step.
        after: Weights after it, same shape and dtype.
        has_gradient: Boolean, same shape: where the gradient was not zero.

    Returns:
        ``(unchanged, with_gradient)``, two int64 tensors without dimensions.
    """
    return (has_gradient & (before == after)).sum(), has_gradient.sum()
