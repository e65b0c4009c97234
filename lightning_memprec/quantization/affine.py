r"""Scales and zero points: the mathematics of uniform quantization, on matrices.

The convention is ``real = (integer - zero_point) * scale`` throughout. A *matrix* has one row per output channel
(of a weight) or per token (of an activation). A scale of shape ``[1]`` holds for the whole matrix, ``[R, 1]`` for
each row, ``[R, G]`` for each group of ``group_size`` neighbours in a row; the last group may be shorter.

* **symmetric** (absmax): :math:`q = \mathrm{round}(127\,x / \max|x|)` in :math:`[-127, 127]`, no zero point.
* **affine** (zero-point): the range is widened to contain 0, so that 0 is exact and the zero point is an int8;
  :math:`s = (\max - \min)/255`, the minimum goes to :math:`-128`.
* **affine_textbook**: the same without the widening. ``[5, 10]`` gets the zero point -383, so zero points are int32.

Other widths replace 127 by :math:`2^{b-1}-1` and 255 by :math:`2^b-1`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Granularity",
    "Mapping",
    "Quantized",
    "choose_parameters",
    "dequantize",
    "dequantize_matrix",
    "integer_range",
    "quantize",
    "quantize_matrix",
    "spread",
]

Mapping = Literal["symmetric", "affine", "affine_textbook"]
Granularity = Literal["tensor", "channel", "group"]

_TINY = torch.finfo(torch.float32).tiny  # Below it, a scale and its inverse lose digits or overflow.
_SPACING = torch.finfo(torch.float32).eps  # Relative distance between neighbours in FP32.


class Quantized(NamedTuple):
    """A quantized matrix.

    Attributes:
        values: Integers, int8 ``[R, K]``.
        scale: FP32, ``[1]``, ``[R, 1]`` or ``[R, G]``.
        zero_point: ``None`` for symmetric; int8 for affine, int32 for the textbook variant; shaped as ``scale``.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None


def integer_range(bits: int, mapping: Mapping) -> tuple[int, int]:
    """Return the smallest and the largest integer of a width.

    Args:
        bits: Width, 2 to 8.
        mapping: Symmetric ranges leave out the smallest integer, so that they have no bias.

    Raises:
        ValueError: If the width or the mapping is none of these.

    Example:
        >>> integer_range(8, "symmetric"), integer_range(4, "affine")
        ((-127, 127), (-8, 7))
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"`bits` must be an integer from 2 to 8, got {bits!r}. Use 8 for int8.")
    if mapping not in ("symmetric", "affine", "affine_textbook"):
        raise ValueError(
            f"`mapping` must be 'symmetric', 'affine' or 'affine_textbook', got {mapping!r}."
            " 'symmetric' is the usual choice for weights."
        )
    largest = 2 ** (bits - 1) - 1
    return (-largest if mapping == "symmetric" else -largest - 1), largest


def choose_parameters(
    smallest: Tensor, largest: Tensor, *, bits: int = 8, mapping: Mapping = "symmetric"
) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero point for values between ``smallest`` and ``largest``.

    A range of zeros gets the scale 1, so nothing is ever divided by zero.

    Args:
        smallest: Minima, FP32 of any shape, finite.
        largest: Maxima, FP32 of the same shape, finite.
        bits: Width of the integers, 2 to 8.
        mapping: See the module.

    Returns:
        FP32 scale, and the zero point or ``None``, both of the shape of ``smallest``.

    Example:
        >>> scale, zero_point = choose_parameters(torch.tensor(5.0), torch.tensor(10.0), mapping="affine_textbook")
        >>> zero_point.item()
        -383
    """
    low, high = integer_range(bits, mapping)
    if mapping == "symmetric":
        magnitude = torch.maximum(smallest.abs(), largest.abs())
        return _usable(magnitude / high, magnitude), None
    if mapping == "affine":
        smallest, largest = smallest.clamp(max=0), largest.clamp(min=0)
    magnitude = torch.maximum(smallest.abs(), largest.abs())
    steps = high - low
    scale = largest / steps - smallest / steps  # The difference itself could overflow.
    if mapping == "affine_textbook":
        # A constant has no width. Steps below FP32's own spacing distinguish nothing, and would give a zero point
        # beyond 2^24, where FP32 stops holding every integer.
        scale = torch.maximum(scale, magnitude * _SPACING)
    scale = _usable(scale, magnitude)
    zero_point = low - torch.round(smallest / scale)
    if mapping == "affine":
        return scale, zero_point.clamp(low, high).to(torch.int8)
    return scale, zero_point.to(torch.int32)


def _usable(scale: Tensor, magnitude: Tensor) -> Tensor:
    return torch.where(magnitude == 0, torch.ones_like(scale), scale.clamp(min=_TINY))


def spread(parameter: Tensor, columns: int, group_size: int | None) -> Tensor:
    """Repeat the scales (or zero points) of groups, so that they broadcast against a matrix.

    Args:
        parameter: ``[1]``, ``[R, 1]`` or ``[R, G]``.
        columns: Width of the matrix, K.
        group_size: Columns in a group, or ``None`` where there are no groups.

    Returns:
        ``parameter`` itself without groups, else ``[R, K]``.
    """
    if group_size is None:
        return parameter
    # An expanded view copied once: `repeat_interleave` gathers by index, which is slow.
    return parameter[:, :, None].expand(-1, -1, group_size).flatten(1)[:, :columns]


def quantize(
    values: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    bits: int = 8,
    mapping: Mapping = "symmetric",
) -> Tensor:
    """Round to integers, half to even, and clip to the range of the width.

    Args:
        values: Floating point, any shape.
        scale: FP32, broadcast against ``values``.
        zero_point: Integers, broadcast against ``values``, or ``None``.
        bits: Width, 2 to 8.
        mapping: Decides the range.

    Returns:
        int8 of the shape of ``values``.
    """
    low, high = integer_range(bits, mapping)
    integers = torch.round(values / scale)
    if zero_point is not None:
        integers = integers + zero_point
    return integers.clamp(low, high).to(torch.int8)


def dequantize(integers: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return ``(integers - zero_point) * scale`` in the dtype of ``scale``.

    Args:
        integers: int8.
        scale: Floating point, broadcast against ``integers``.
        zero_point: Integers, broadcast against ``integers``, or ``None``.
    """
    # Subtracted in floating point: int8 would wrap around.
    values = integers.to(scale.dtype)
    if values is integers:
        return (values if zero_point is None else values - zero_point) * scale
    # In place, because a second tensor of this size costs more than the products: its memory is new to the system.
    return (values if zero_point is None else values.sub_(zero_point)).mul_(scale)


def dequantize_matrix(
    integers: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int | None
) -> Tensor:
    """Dequantize a matrix, or some rows of it.

    Args:
        integers: int8 ``[R, K]``.
        scale: FP32 ``[1]``, ``[R, 1]`` or ``[R, G]``.
        zero_point: Integers shaped as ``scale``, or ``None``.
        group_size: Columns in a group, or ``None`` where there are no groups.

    Returns:
        FP32 ``[R, K]``.
    """
    if group_size is None:
        return dequantize(integers, scale, zero_point)
    rows, columns = integers.shape
    if columns % group_size or not columns:
        zero_point = None if zero_point is None else spread(zero_point, columns, group_size)
        return dequantize(integers, spread(scale, columns, group_size), zero_point)
    grouped = integers.reshape(rows, columns // group_size, group_size)
    return dequantize(
        grouped, scale[..., None], None if zero_point is None else zero_point[..., None]
    ).flatten(1)


def quantize_matrix(
    matrix: Tensor,
    *,
    bits: int = 8,
    mapping: Mapping = "symmetric",
    granularity: Granularity = "channel",
    group_size: int | None = None,
) -> Quantized:
    """Quantize a matrix by rounding to nearest.

    Args:
        matrix: Floating point ``[R, K]``.
        bits: Width, 2 to 8.
        mapping: See the module.
        granularity: One scale for the whole matrix, for each row, or for each group in a row.
        group_size: Columns in a group; needed for ``"group"`` only.

    Returns:
        Integers, scales and zero points.

    Raises:
        ValueError: If the matrix is no floating-point matrix or holds a NaN or an infinity, or if an argument is
            out of range.

    Example:
        >>> quantize_matrix(torch.tensor([[0.5, -1.0], [0.0, 0.0]])).values
        tensor([[  64, -127],
                [   0,    0]], dtype=torch.int8)
    """
    integer_range(bits, mapping)
    check_group_size(granularity, group_size)
    if matrix.dim() != 2 or not matrix.is_floating_point():
        raise ValueError(
            f"Expected a floating-point matrix, got {matrix.dtype} of shape {list(matrix.shape)}. Reshape it to 2-D."
        )
    if matrix.is_meta:
        raise ValueError("It is on the meta device, where tensors have no values. Load the weights first.")
    matrix = matrix.detach().float()
    smallest, largest = _extremes(matrix, granularity, group_size)
    if not bool((smallest.isfinite() & largest.isfinite()).all()):
        count = int((~matrix.isfinite()).sum())
        raise ValueError(
            f"{count} of {matrix.numel()} values are NaN or infinite (in FP32), which no integer can stand for."
            " Quantize weights from before the run diverged."
        )
    scale, zero_point = choose_parameters(smallest, largest, bits=bits, mapping=mapping)
    spread_zero = None if zero_point is None else spread(zero_point, matrix.shape[1], group_size)
    spread_scale = spread(scale, matrix.shape[1], group_size)
    integers = quantize(matrix, spread_scale, spread_zero, bits=bits, mapping=mapping)
    return Quantized(integers, scale, zero_point)


def check_group_size(granularity: str, group_size: int | None) -> None:
    """Refuse a granularity or a group size that does not exist, or one without the other."""
    if granularity not in ("tensor", "channel", "group"):
        raise ValueError(
            f"The granularity of weights must be 'tensor', 'channel' or 'group', got {granularity!r}."
            " 'channel' is the usual choice."
        )
    if granularity != "group":
        if group_size is not None:
            raise ValueError(
                f"`group_size` is {group_size!r}, but the granularity is {granularity!r}. Use 'group' or drop it."
            )
    elif isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(
            f"`group_size` must be a positive integer, got {group_size!r}. 64 is a common choice."
        )


def _extremes(matrix: Tensor, granularity: Granularity, group_size: int | None) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    if matrix.numel() == 0:
        groups = -(-columns // group_size) if group_size else 1
        empty = matrix.new_zeros(1) if granularity == "tensor" else matrix.new_zeros(rows, groups)
        return empty, empty
    if granularity == "tensor":
        smallest, largest = torch.aminmax(matrix)
        return smallest.reshape(1), largest.reshape(1)
    if group_size is None:
        smallest, largest = torch.aminmax(matrix, dim=1, keepdim=True)
        return smallest, largest
    missing = -columns % group_size
    if missing:
        # Repeating the last column changes no minimum and no maximum of the short last group.
        matrix = torch.cat([matrix, matrix[:, -1:].expand(rows, missing)], dim=1)
    smallest, largest = torch.aminmax(matrix.reshape(rows, -1, group_size), dim=2)
    return smallest, largest
