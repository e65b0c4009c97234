r"""Layer-wise reconstruction: integers that minimise :math:`\|WX - \hat WX\|^2`, by coordinate descent.

:math:`X` are inputs of the calibration data. Along one weight the error is a parabola, so the best integer is the one
nearest to its vertex, in closed form: :math:`\hat w_j + ((w - \hat w) H)_j / H_{jj}`. No step can make the error
larger. Each row starts from GPTQ or from rounding to nearest, whichever errs less, so on the data it learns from it is
at least as good as both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.gptq import gptq
from lightning_memprec.quantization.reconstruction.hessian import Grid, row_errors
from lightning_memprec.quantization.reconstruction.solving import Reconstruction

__all__ = ["LayerWise", "descend"]

_BLOCK = 128  # Columns whose corrections reach the others together, as in GPTQ; it decides speed only.


def descend(matrix: Tensor, hessian: Tensor, grid: Grid, integers: Tensor, sweeps: int) -> Tensor:
    """Improve integers by coordinate descent.

    Args:
        matrix: FP64 ``[R, K]``.
        hessian: Sum of the inputs' products, FP64 ``[K, K]``, positive definite.
        grid: The values that weights may take.
        integers: Where to start, int8 ``[R, K]``.
        sweeps: Passes over the columns at most.

    Returns:
        Integers of a row error no larger than at the start, int8 ``[R, K]``.
    """
    integers = integers.clone()
    pull = (matrix - grid.real(integers)) @ hessian
    for _ in range(sweeps):
        before = integers.clone()
        for start in range(0, matrix.shape[1], _BLOCK):
            _sweep_block(hessian, grid, integers, pull, slice(start, start + _BLOCK))
        if torch.equal(integers, before):
            break
    return integers


def _sweep_block(hessian: Tensor, grid: Grid, integers: Tensor, pull: Tensor, block: slice) -> None:
    near = pull[:, block].clone()
    steps = torch.empty_like(near)
    for column in range(near.shape[1]):
        place = block.start + column
        own = grid.columns(place)
        now = own.real(integers[:, place])
        integers[:, place] = own.round(now + near[:, column] / hessian[place, place])
        steps[:, column] = own.real(integers[:, place]) - now
        near -= steps[:, column, None] * hessian[place, block]
    pull -= steps @ hessian[block]


@dataclass(frozen=True)
class LayerWise(Reconstruction):
    """Solver of the method ``"layer_wise"``.

    Args:
        sweeps: Passes over the columns at most, each as long as GPTQ. In ``benchmarks/rounding_orders.py`` the error
            falls by less than 1 % after the fifth.
    """

    sweeps: int = 5

    def solve(self, matrix: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
        """Quantize a matrix."""
        order = hessian.diagonal().argsort(descending=True, stable=True)
        starts = grid.round(matrix), gptq(matrix, hessian, grid, order=order)
        nearest, compensated = (row_errors(matrix - grid.real(integers), hessian) for integers in starts)
        start = torch.where((nearest < compensated)[:, None], *starts)
        return descend(matrix, hessian, grid, start, self.sweeps)


register_method(Method("layer_wise", Scheme(), LayerWise(), needs_calibration=True))
