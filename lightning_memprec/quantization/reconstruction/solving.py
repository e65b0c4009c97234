"""From inputs to integers: what the methods that look at one layer at a time have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.calibration import InputProducts, feed, order_of_use, stand_in
from lightning_memprec.quantization.convert import round_to_nearest
from lightning_memprec.quantization.methods import Solution
from lightning_memprec.quantization.reconstruction.hessian import Grid, damped, row_errors
from lightning_memprec.quantization.targets import Target

__all__ = ["Reconstruction"]

_BUDGET = 2**30  # Bytes of FP64 products held together in parallel mode; a layer alone may need more.
_NEAREST = "rounded to nearest: "


@dataclass(frozen=True)
class Reconstruction(ABC):
    """Finds the integers of one layer at a time from the inputs it sees; called by ``quantize_``.

    Linear layers and convolutions learn. Scales and zero points are those of rounding to nearest. Each channel keeps
    what errs less on the held-out rows, the solution or rounding to nearest. What is rounded to nearest is named in
    the notes.

    Args:
        damping: Share of the mean of the Hessian's diagonal that is added to the diagonal; 1 % in the GPTQ paper.
        sequential: Give each layer the inputs that it will see, from a model quantized up to there, which takes a pass
            over the data for each layer. Otherwise those of the float model, many layers in a pass.
    """

    damping: float = 0.01
    sequential: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.damping < math.inf:
            raise ValueError(f"`damping` must be larger than 0 and finite, got {self.damping!r}. Use 0.01.")

    @abstractmethod
    def solve(self, matrix: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
        """Quantize a matrix.

        Args:
            matrix: FP64 ``[R, K]``.
            hessian: Sum of the inputs' products, damped, FP64 ``[K, K]``.
            grid: The values that weights may take.

        Returns:
            Integers, int8 ``[R, K]``.
        """

    def __call__(
        self,
        model: nn.Module,
        targets: list[Target],
        batches: Iterable[Any] | None,
        forward: Callable[[nn.Module, Any], Any],
    ) -> Solution:
        """Quantize the weights of targets; the model is not changed.

        Args:
            model: The float model.
            targets: What to quantize.
            batches: Calibration batches.
            forward: Runs one batch.

        Raises:
            ValueError: If a weight cannot be quantized, there are no batches, or one gives a layer a NaN.
        """
        data = list(batches or ())
        solution = Solution(round_to_nearest(targets), _left_out(targets))
        learning = {target.name: target for target in targets if target.name not in solution.notes}
        layers = {name: target.module for name, target in learning.items()}
        used = order_of_use(model, data, forward, layers)
        for name in learning.keys() - set(used):
            solution.notes[name] = f"{_NEAREST}no calibration data reached it"
        with ExitStack() as replaced:
            if self.sequential:
                for target in targets:
                    if target.name not in used:
                        _replace(replaced, target, solution)
            for group in self._passes([learning[name] for name in used]):
                products = {target.name: InputProducts() for target in group}
                chosen = {target.name: target.module for target in group}
                feed(model, data, forward, chosen, lambda name, block: products[name].add(block))  # noqa: B023
                for target in group:
                    self._learn(target, products.pop(target.name), solution)
                    if self.sequential:
                        _replace(replaced, target, solution)
        return solution

    def _passes(self, targets: list[Target]) -> Iterator[list[Target]]:
        """Group the layers that share a pass over the data."""
        group: list[Target] = []
        size = 0
        for target in targets:
            needed = _bytes_of_products(target)
            if group and (self.sequential or size + needed > _BUDGET):
                yield group
                group, size = [], 0
            group.append(target)
            size += needed
        if group:
            yield group

    def _learn(self, target: Target, products: InputProducts, solution: Solution) -> None:
        """Quantize the weight of a layer, each group of a convolution by itself."""
        nearest = solution[target.name]["weight"]
        device = products.learned_from.device
        matrix = target.weights["weight"]().to(device).double()
        zero_point = None if nearest.zero_point is None else nearest.zero_point.to(device)
        rounded = Quantized(nearest.values.to(device), nearest.scale.to(device), zero_point)
        grid, values = Grid.of(rounded, target.scheme), rounded.values.clone()
        kept = 0
        size = len(matrix) // len(products.learned_from)
        for group, (hessian, judge) in enumerate(zip(products.learned_from, products.judge, strict=True)):
            own = slice(group * size, (group + 1) * size)
            found = self.solve(matrix[own], damped(hessian, self.damping), grid.rows(own))
            before, after = (
                row_errors(matrix[own] - grid.rows(own).real(integers), judge)
                for integers in (values[own], found)
            )
            better = after <= before
            values[own] = torch.where(better[:, None], found, values[own])
            kept += int((~better).sum())
        solution[target.name]["weight"] = nearest._replace(values=values.to(nearest.values.device))
        notes = []
        if kept:
            notes.append(f"{kept} of {len(matrix)} channels {_NEAREST}that errs less on held-out rows")
        if products.rows < matrix.shape[1]:
            notes.append(f"learned from only {products.rows} rows for {matrix.shape[1]} features")
        if notes:
            solution.notes[target.name] = "; ".join(notes)


def _left_out(targets: list[Target]) -> dict[str, str]:
    """Say why some targets do not learn."""
    uses = Counter(id(parameter) for target in targets for parameter in target.module.parameters())
    notes = {}
    for target in targets:
        if set(target.weights) != {"weight"} or isinstance(target.module, (nn.Embedding, _ConvTransposeNd)):
            notes[target.name] = f"{_NEAREST}only linear layers and convolutions learn"
        elif uses[id(dict(target.module.named_parameters()).get("weight"))] > 1:
            notes[target.name] = f"{_NEAREST}its weight is tied to another layer's"
    return notes


def _replace(replaced: ExitStack, target: Target, solution: Solution) -> None:
    """Let the quantized layer stand in for a target in what follows."""
    replacement = target.build(dict(solution[target.name]))
    replaced.callback(stand_in(target.module, replacement).remove)


def _bytes_of_products(target: Target) -> int:
    groups = target.module.groups if isinstance(target.module, _ConvNd) else 1
    return 2 * groups * target.weights["weight"]().shape[1] ** 2 * torch.float64.itemsize
