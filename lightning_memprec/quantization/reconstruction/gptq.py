"""GPTQ: round column by column and make up for each error in the columns that follow.

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", arXiv 2210.17323. All rows take the same order, so one Cholesky factor serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.hessian import Grid, inverse
from lightning_memprec.quantization.reconstruction.solving import Reconstruction

__all__ = ["GPTQ", "gptq"]


def gptq(
    matrix: Tensor, hessian: Tensor, grid: Grid, *, order: Tensor | None = None, block_size: int = 128
) -> Tensor:
    """Quantize a weight matrix in a fixed order of columns.

    Args:
        matrix: FP64 ``[R, K]``.
        hessian: Sum of the inputs' products, FP64 ``[K, K]``, positive definite.
        grid: The values that weights may take.
        order: Columns in the order to round them, ``[K]``; from left to right by default.
        block_size: Columns whose corrections reach the columns behind the block together; 128 in the paper. It decides
            speed, not the result.

    Returns:
        Integers, int8 ``[R, K]``.
    """
    columns = matrix.shape[1]
    order = torch.arange(columns, device=matrix.device) if order is None else order
    weight, grid = matrix[:, order].clone(), grid.columns(order)
    factor = torch.linalg.cholesky(inverse(hessian[order][:, order]), upper=True)
    integers = torch.empty_like(weight, dtype=torch.int8)
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        errors = torch.empty_like(weight[:, start:stop])
        for column in range(start, stop):
            own = grid.columns(column)
            integers[:, column] = own.round(weight[:, column])
            error = (weight[:, column] - own.real(integers[:, column])) / factor[column, column]
            weight[:, column + 1 : stop] -= error[:, None] * factor[column, column + 1 : stop]
            errors[:, column - start] = error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return integers[:, order.argsort()]


@dataclass(frozen=True)
class GPTQ(Reconstruction):
    """Solver of the method ``"gptq"``.

    Args:
        act_order: Round the columns with the largest inputs first, while the others can still make up for them.
        block_size: See :func:`gptq`.
    """

    act_order: bool = False
    block_size: int = 128

    def solve(self, matrix: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
        """Quantize a matrix."""
        order = hessian.diagonal().argsort(descending=True, stable=True) if self.act_order else None
        return gptq(matrix, hessian, grid, order=order, block_size=self.block_size)


register_method(Method("gptq", Scheme(), GPTQ(), needs_calibration=True))
