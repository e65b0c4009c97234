r"""What the methods share: the grid of a weight, and the error that inputs make of a difference.

All minimise :math:`\|WX - \hat WX\|^2 = \sum_r (w_r - \hat w_r)\,H\,(w_r - \hat w_r)^T` with :math:`H = XX^T` summed
over calibration inputs. Rows of the weight do not depend on each other. Everything is FP64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memprec.quantization.affine import Mapping, Quantized, dequantize, quantize, spread
from lightning_memprec.quantization.modules.base import Scheme

__all__ = ["Grid", "damped", "inverse", "row_errors"]


class Grid(NamedTuple):
    """The values that weights may take: scale and zero point are fixed, integers are what is looked for.

    Attributes:
        scale: FP64 ``[R, K]``.
        zero_point: Integers ``[R, K]``, or ``None``.
        bits: Width.
        mapping: Decides the range of the integers.
    """

    scale: Tensor
    zero_point: Tensor | None
    bits: int
    mapping: Mapping

    @classmethod
    def of(cls, quantized: Quantized, scheme: Scheme) -> Grid:
        """Return the grid of a quantized matrix."""
        shape = quantized.values.shape
        scale, zero_point = (
            None if part is None else spread(part, shape[1], scheme.group_size).expand(shape)
            for part in (quantized.scale, quantized.zero_point)
        )
        assert scale is not None
        return cls(scale.double(), zero_point, scheme.bits, scheme.mapping)

    def rows(self, index: slice) -> Grid:
        """Return the grid of some rows."""
        zero_point = None if self.zero_point is None else self.zero_point[index]
        return self._replace(scale=self.scale[index], zero_point=zero_point)

    def columns(self, index: int | Tensor) -> Grid:
        """Return the grid of one column, ``[R]``, or of several in another order."""
        zero_point = None if self.zero_point is None else self.zero_point[:, index]
        return self._replace(scale=self.scale[:, index], zero_point=zero_point)

    def round(self, values: Tensor) -> Tensor:
        """Return the nearest integers of the grid, int8."""
        return quantize(values, self.scale, self.zero_point, bits=self.bits, mapping=self.mapping)

    def real(self, integers: Tensor) -> Tensor:
        """Return what integers stand for, FP64."""
        return dequantize(integers, self.scale, self.zero_point)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """Add a share of the mean of the diagonal to the diagonal, which makes it positive definite.

    With fewer rows than features, or features that are always zero, it is not: weights would be free to run away
    where the calibration data sees nothing of it. In the GPTQ paper (arXiv 2210.17323, section 3.3) the share is 1 %.

    Args:
        hessian: FP64 ``[K, K]``.
        damping: Share, larger than 0.
    """
    mean = hessian.diagonal().mean()
    amount = torch.where(mean > 0, damping * mean, torch.ones_like(mean))
    return hessian + amount * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)


def inverse(hessian: Tensor) -> Tensor:
    """Invert a positive definite matrix by its Cholesky factor.

    Raises:
        ValueError: If it is not, which sums of FP32 products of few rows are not without enough damping.
    """
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if failed:
        raise ValueError(
            f"The inputs' products of {len(hessian)} features are not positive definite. Raise `damping`; 0.01 is"
            " usual."
        )
    return torch.cholesky_inverse(factor)


def row_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """Return the squared error of the output that each row of a difference of weights makes.

    Args:
        difference: FP64 ``[R, K]``.
        hessian: FP64 ``[K, K]``.

    Example:
        >>> row_errors(torch.tensor([[1.0, 2.0]]), torch.eye(2))
        tensor([5.])
    """
    return ((difference @ hessian) * difference).sum(1)
