"""Optimal Brain Quantization: each row rounds, one at a time, the weight that costs it least.

Source: Frantar, Singh, Alistarh, "Optimal Brain Compression", arXiv 2208.11580, section 5. It costs the cube of the
features for every row, so it is for small layers; GPTQ is the same with one order for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.hessian import Grid, inverse
from lightning_memprec.quantization.reconstruction.solving import Reconstruction

__all__ = ["OBQ", "obq"]

_NUMBERS = 2**25  # In the inverses of the rows that are worked on together: 256 MiB in FP64.


def obq(matrix: Tensor, hessian: Tensor, grid: Grid, *, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a weight matrix, each row in its own order.

    A weight that would miss its nearest integer by more than half a step lies outside of the grid. It goes first,
    while others can still make up for it (section 5 of the paper, "quantization outliers").

    Args:
        matrix: FP64 ``[R, K]``.
        hessian: Sum of the inputs' products, FP64 ``[K, K]``, positive definite.
        grid: The values that weights may take.
        order: Columns in the order to round them, ``[K]``, for all rows; by default each row chooses.

    Returns:
        Integers, int8 ``[R, K]``, and the orders that rows took, ``[R, K]``.
    """
    first = inverse(hessian)
    size = max(1, _NUMBERS // hessian.numel())
    parts = [
        _rows(matrix[start : start + size], first, grid.rows(slice(start, start + size)), order)
        for start in range(0, len(matrix), size)
    ]
    return torch.cat([integers for integers, _ in parts]), torch.cat([orders for _, orders in parts])


def _rows(matrix: Tensor, inverse: Tensor, grid: Grid, order: Tensor | None) -> tuple[Tensor, Tensor]:
    count, columns = matrix.shape
    weight, inverses = matrix.clone(), inverse.expand(count, -1, -1).clone()
    integers = torch.zeros_like(weight, dtype=torch.int8)
    orders = torch.empty(count, columns, dtype=torch.long, device=matrix.device)
    left = torch.ones_like(weight, dtype=torch.bool)
    every = torch.arange(count, device=matrix.device)
    for step in range(columns):
        rounded = grid.round(weight)
        misses = weight - grid.real(rounded)
        diagonal = inverses.diagonal(dim1=1, dim2=2)
        column = _cheapest(misses, diagonal, grid.scale, left) if order is None else order[step].expand(count)
        orders[:, step], left[every, column] = column, False
        integers[every, column] = rounded[every, column]
        row, pivot = inverses[every, column], diagonal[every, column]
        weight -= (misses[every, column] / pivot)[:, None] * row
        scaled = row / pivot.sqrt()[:, None]
        inverses -= scaled[:, :, None] * scaled[:, None, :]
    return integers, orders


def _cheapest(misses: Tensor, diagonal: Tensor, scale: Tensor, left: Tensor) -> Tensor:
    """Return the column that each row rounds next."""
    squares = misses.square().masked_fill(~left, 0)
    costs = (squares / diagonal).masked_fill(~left, torch.inf)
    outside = (squares > scale.square() / 4 * (1 + 1e-9)).any(1)  # Ties of half a step are inside.
    return torch.where(outside, squares.argmax(1), costs.argmin(1))


@dataclass(frozen=True)
class OBQ(Reconstruction):
    """Solver of the method ``"obq"``."""

    def solve(self, matrix: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
        """Quantize a matrix."""
        return obq(matrix, hessian, grid)[0]


register_method(Method("obq", Scheme(), OBQ(), needs_calibration=True))
