"""From inputs to integers: what the methods that look at one layer at a time have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.calibration import InputProducts, feed, stand_in
from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.methods import Solution
from lightning_memprec.quantization.progress import Progress
from lightning_memprec.quantization.reconstruction.blocks import Block, find_blocks
from lightning_memprec.quantization.reconstruction.hessian import Grid, damped, row_errors
from lightning_memprec.quantization.reconstruction.paired_rows import survey
from lightning_memprec.quantization.reconstruction.prefix import Batches, Prefix, Source, calls_of
from lightning_memprec.quantization.reconstruction.recording import temporary_store
from lightning_memprec.quantization.rounding import round_to_nearest
from lightning_memprec.quantization.targets import Target

__all__ = ["Reconstruction", "by_block", "left_out"]

_Unit = list[Target]  # Layers that see the same rows.
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
        sequential: Give each layer the inputs that it will see, from a model quantized up to there. In blocks that
            repeat, layers learn from recorded calls of the block; others take a pass over the data each. Otherwise
            give layers the inputs of the float model, many in a pass.
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
        run = _Run(self, targets)
        run.solve(Source(model, Batches(batches or ()), forward))
        return run.solution


class _Run:
    """One solution in the making."""

    def __init__(self, method: Reconstruction, targets: list[Target]) -> None:
        self.solution = Solution(round_to_nearest(targets), left_out(targets))
        self._method, self._targets = method, targets
        self._progress = Progress(0)

    def solve(self, whole: Source) -> None:
        """Let all layers learn that can."""
        model, data, forward = whole
        learning = {target.name: target for target in self._targets if target.name not in self.solution.notes}
        blocks = [block for block in find_blocks(model, self._targets) if len(block.targets) > 1]
        with calls_of(blocks, data) as calls:
            found = survey(model, data, forward, {name: target.module for name, target in learning.items()})
        for name in learning.keys() - found.rows.keys():
            self.solution.notes[name] = f"{_NEAREST}no calibration data reached it"
        units = [unit for group in found.groups for unit in _units([learning[name] for name in group])]
        with Progress(len(found.rows)) as self._progress:
            if self._method.sequential:
                alone = [block for block in blocks if calls[block.name] == list(range(len(data)))]
                # Once, so that the model stays in evaluation mode and random generators come back meanwhile.
                run_batches(model, [None], lambda model, batch: self._one_after_another(whole, units, alone))
            else:
                for group in _passes(units):
                    self._learn_units(group, whole)

    def _one_after_another(self, whole: Source, units: list[_Unit], blocks: list[Block]) -> None:
        """Let layers learn from the inputs of a model that is quantized up to them.

        Args:
            whole: The model and its data.
            units: The layers, in the order of use.
            blocks: Those that every batch calls once.
        """
        learning = {target.name for unit in units for target in unit}
        with ExitStack() as replaced, Prefix(whole, _BUDGET) as prefix:
            for target in self._targets:
                if target.name not in learning:
                    self._replace(target, replaced)
            for block, own in by_block(units, blocks):
                with temporary_store(_BUDGET) as store:
                    source = None if block is None else prefix.calls(block, store)
                    for unit in own:
                        self._learn_units([unit], source or whole)
                        for target in unit:
                            self._replace(target, replaced)
                    if source is not None:
                        prefix.finish(source)

    def _replace(self, target: Target, replaced: ExitStack) -> None:
        """Let the quantized layer stand in for a target in what follows."""
        replacement = target.build(dict(self.solution[target.name]))
        replaced.callback(stand_in(target.module, replacement).remove)

    def _learn_units(self, units: list[_Unit], source: Source) -> None:
        """Quantize layers in one pass over the data; those of a unit share the products of their input."""
        products = {unit[0].name: InputProducts() for unit in units}
        layers = {unit[0].name: unit[0].module for unit in units}
        feed(*source, layers, lambda name, rows: products[name].add(rows))
        for unit in units:
            seen = products.pop(unit[0].name)
            for target in unit:
                self._progress.step(target.name)
                self._learn(target, seen)

    def _learn(self, target: Target, products: InputProducts) -> None:
        """Quantize the weight of a layer, each group of a convolution by itself."""
        method, nearest = self._method, self.solution[target.name]["weight"]
        device = products.learned_from.device
        matrix = target.weights["weight"]().to(device).double()
        zero_point = None if nearest.zero_point is None else nearest.zero_point.to(device)
        rounded = Quantized(nearest.values.to(device), nearest.scale.to(device), zero_point)
        grid, values = Grid.of(rounded, target.scheme), rounded.values.clone()
        kept = 0
        size = len(matrix) // len(products.learned_from)
        for group, (hessian, judge) in enumerate(zip(products.learned_from, products.judge, strict=True)):
            own = slice(group * size, (group + 1) * size)
            found = method.solve(matrix[own], damped(hessian, method.damping), grid.rows(own))
            before, after = (
                row_errors(matrix[own] - grid.rows(own).real(integers), judge)
                for integers in (values[own], found)
            )
            better = after <= before
            values[own] = torch.where(better[:, None], found, values[own])
            kept += int((~better).sum())
        self.solution[target.name]["weight"] = nearest._replace(values=values.to(nearest.values.device))
        notes = []
        if kept:
            notes.append(f"{kept} of {len(matrix)} channels {_NEAREST}that errs less on held-out rows")
        if products.rows < matrix.shape[1]:
            notes.append(f"learned from only {products.rows} rows for {matrix.shape[1]} features")
        if notes:
            self.solution.notes[target.name] = "; ".join(notes)


def left_out(targets: list[Target]) -> dict[str, str]:
    """Say why some targets do not learn."""
    uses = Counter(id(parameter) for target in targets for parameter in target.module.parameters())
    notes = {}
    for target in targets:
        if set(target.weights) != {"weight"} or isinstance(target.module, (nn.Embedding, _ConvTransposeNd)):
            notes[target.name] = f"{_NEAREST}only linear layers and convolutions learn"
        elif uses[id(dict(target.module.named_parameters()).get("weight"))] > 1:
            notes[target.name] = f"{_NEAREST}its weight is tied to another layer's"
    return notes


def _units(targets: list[Target]) -> Iterator[_Unit]:
    """Split layers of one input into those that also see the same rows of it; windows of convolutions may differ."""
    linear = [target for target in targets if not isinstance(target.module, _ConvNd)]
    if linear:
        yield linear
    yield from ([target] for target in targets if isinstance(target.module, _ConvNd))


def _passes(units: list[_Unit]) -> Iterator[list[_Unit]]:
    """Group the layers that share a pass over the data."""
    group: list[_Unit] = []
    size = 0
    for unit in units:
        needed = _bytes_of_products(unit[0])
        if group and size + needed > _BUDGET:
            yield group
            group, size = [], 0
        group.append(unit)
        size += needed
    if group:
        yield group


def by_block(units: list[_Unit], blocks: list[Block]) -> Iterator[tuple[Block | None, list[_Unit]]]:
    """Group neighbouring units by the block they are in; ``None`` without one, or if it is left and entered again.

    Args:
        units: Layers that see the same input, in the order of use.
        blocks: Blocks of the model.
    """
    owners = {target.name: block for block in blocks for target in block.targets}
    runs = [(block, list(own)) for block, own in groupby(units, key=lambda unit: owners.get(unit[0].name))]
    visits = Counter(None if block is None else block.name for block, _ in runs)
    for block, own in runs:
        yield (block if block is not None and visits[block.name] == 1 else None), own


def _bytes_of_products(target: Target) -> int:
    groups = target.module.groups if isinstance(target.module, _ConvNd) else 1
    return 2 * groups * target.weights["weight"]().shape[1] ** 2 * torch.float64.itemsize
