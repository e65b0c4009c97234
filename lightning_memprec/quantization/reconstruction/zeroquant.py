r"""ZeroQuant: weights in groups, activations by token, and layer-by-layer knowledge distillation.

Source: Yao et al., "ZeroQuant: Efficient and Affordable Post-Training Quantization for Large-Scale Transformers",
arXiv 2206.01861. Block k learns :math:`\min \| L_k(L_{k-1} \dots L_1(x)) - \hat L_k(L_{k-1} \dots L_1(x)) \|^2`: its
input and the output it should give are the teacher's, which is the float model. No labels are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memprec.quantization.affine import Quantized, spread
from lightning_memprec.quantization.methods import Method, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.block_wise import BlockWise, Inputs
from lightning_memprec.quantization.reconstruction.blocks import Block, as_parameter
from lightning_memprec.quantization.reconstruction.learning import Integers, Learner, real
from lightning_memprec.quantization.reconstruction.recording import Call

__all__ = ["MasterWeights", "ZeroQuant"]


class MasterWeights(Learner):
    """Float weights that are rounded afresh, with new scales, at each step; gradients pass straight through.

    They are kept in units of the first scales, so that a learning rate means the same for every group.

    Args:
        block: The block.
        start: Weights rounded to nearest, of the targets that learn.
    """

    def __init__(self, block: Block, start: Integers) -> None:
        self._block = block
        self._targets = {target.name: target for target in block.targets if target.name in start}
        self._scales: dict[tuple[str, str], Tensor] = {}
        self._masters: dict[tuple[str, str], Tensor] = {}
        for name, target in self._targets.items():
            for key, quantized in start[name].items():
                matrix = target.weights[key]().float()
                scale = spread(quantized.scale, matrix.shape[1], target.scheme.group_size)
                self._scales[name, key] = scale
                self._masters[name, key] = (matrix / scale).requires_grad_()

    @property
    def parameters(self) -> list[Tensor]:
        """What Adam changes."""
        return list(self._masters.values())

    def _quantize(self, name: str, key: str) -> tuple[Tensor, Quantized]:
        matrix = self._masters[name, key] * self._scales[name, key]
        return matrix, self._targets[name].scheme.quantize(matrix)

    def weights(self) -> dict[str, Tensor]:
        """Return rounded weights; their gradient is that of the float weights."""
        found = {}
        for name, key in self._masters:
            target = self._targets[name]
            matrix, quantized = self._quantize(name, key)
            rounded = matrix + (real(target, quantized) - matrix).detach()
            found[self._block.parameter_name(target, key)] = as_parameter(target, key, rounded)
        return found

    def quantized(self) -> Integers:
        """Return the quantized weights as they stand."""
        found: dict[str, dict[str, Quantized]] = {name: {} for name in self._targets}
        for name, key in self._masters:
            with torch.no_grad():
                found[name][key] = self._quantize(name, key)[1]
        return found


@dataclass(frozen=True)
class ZeroQuant(BlockWise):
    """Solver of the method ``"zeroquant"``.

    Without calibration data, weights are rounded to nearest in groups, and the report says so. Any data will do that
    the model takes: the paper gains from random tokens, too (Table 10).
    """

    inputs: Inputs = "teacher"
    iterations: int = 200
    learning_rate: float = 0.003

    def learner(self, block: Block, calls: Sequence[Call], start: Integers) -> Learner:
        """Return the weights of a block while they are learned."""
        return MasterWeights(block, start)


# Activations by token and symmetric weights as in section 4.1 of the paper. It splits a matrix in 48 or 64 groups of
# several rows; here a group is a part of one row, which fits the files and is finer.
register_method(
    Method("zeroquant", Scheme(weight_granularity="group", group_size=64, activations="token"), ZeroQuant())
)
