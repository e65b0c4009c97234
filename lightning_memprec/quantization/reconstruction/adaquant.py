r"""AdaQuant: learn a change of the weights and the steps of weights and inputs, one layer at a time.

Minimises :math:`\|WX + b - (Q_{\Delta_w}(W + V)\,Q_{\Delta_x}(X) + \hat b)\|^2` over :math:`V`, :math:`\Delta_w`,
:math:`\Delta_x` and :math:`\hat b` by Adam, with gradients straight through the rounding.

Source: Hubara, Nahshan, Hanani, Banner, Soudry, "Improving Post Training Neural Quantization: Layer-wise Calibration
and Integer Programming", arXiv 2006.10518; code: https://github.com/itayhubara/CalibTIP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.methods import Method, Solution, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.progress import Progress
from lightning_memprec.quantization.reconstruction.adaquant_layer import Learned, LearningRates, learn
from lightning_memprec.quantization.reconstruction.adaquant_rows import Sample, StudentAndTeacher, collect
from lightning_memprec.quantization.reconstruction.adaquant_student import Problem, products
from lightning_memprec.quantization.reconstruction.blocks import Block, find_blocks
from lightning_memprec.quantization.reconstruction.paired_rows import survey
from lightning_memprec.quantization.reconstruction.prefix import Batches, Source, calls_of
from lightning_memprec.quantization.reconstruction.solving import by_block, left_out
from lightning_memprec.quantization.rounding import round_to_nearest
from lightning_memprec.quantization.targets import Target

__all__ = ["AdaQuant"]

_SEED = 0
_LEAST = 1e-3  # Norm of a row below which its weight grows no more, relative to the root mean square of all.
_NEAREST = "rounded to nearest: "


@dataclass(frozen=True)
class AdaQuant:
    """Solver of the method ``"adaquant"``.

    Linear layers and convolutions learn. What errs least on held-out rows is kept, and never more than rounding to
    nearest. Learning rates are relative to the layer's own steps, so that they suit weights of any size; those of the
    authors' code are absolute (weights 1e-5, biases and weight ranges 1e-3, input ranges 0.1).

    Args:
        iterations: Steps of Adam for each layer; 1000 in the authors' code.
        batch_rows: Rows (tokens, windows of a convolution) in a step.
        weight_rate: Learning rate of weights, in steps of their grid.
        step_rate: Learning rate of the weights' steps, relative.
        input_rate: Learning rate of the inputs' step, relative.
        bias_rate: Learning rate of biases, relative to the output.
        learn_inputs: Learn the step of static activations; otherwise it spans the extremes of the data.
        row_exponent: Divide the squared error of each row by this power of its output's norm: 0 is the paper's
            objective, 2 counts relative errors. With 0 a few rows with huge outputs, such as the first token of a
            language model, decide alone; with 2 they have no say, though the model may need them. 1 is between.
        sequential: Give each layer the inputs that it will see, from a model quantized up to there. In blocks that
            repeat, layers learn from recorded calls of the block; others take passes over the data. Otherwise give
            layers the inputs of the float model, many in a pass.
        memory_mib: Limit of the rows that are held at a time, on the CPU.
    """

    iterations: int = 1000
    batch_rows: int = 256
    weight_rate: float = 1e-2
    step_rate: float = 1e-3
    input_rate: float = 1e-2
    bias_rate: float = 1e-3
    learn_inputs: bool = True
    row_exponent: float = 0.0
    sequential: bool = True
    memory_mib: float = 256.0

    def __post_init__(self) -> None:
        for name, lowest in (("iterations", 1), ("batch_rows", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(
                    f"`{name}` must be a positive integer, got {value!r}. Use {getattr(AdaQuant, name)}."
                )
        if not 0 <= self.row_exponent <= 2:
            raise ValueError(
                f"`row_exponent` must lie between 0 and 2, got {self.row_exponent!r}. Use 0, as the paper."
            )
        for name in ("weight_rate", "step_rate", "input_rate", "bias_rate", "memory_mib"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(
                    f"`{name}` must be larger than 0 and finite, got {value!r}. Use {getattr(AdaQuant, name)}."
                )

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
        solution = Solution(round_to_nearest(targets), left_out(targets))
        learning = {target.name: target for target in targets if target.name not in solution.notes}
        whole = Source(model, Batches(batches or ()), forward)
        blocks = [block for block in find_blocks(model, targets) if len(block.targets) > 1]
        with calls_of(blocks, whole.batches) as calls:
            found = survey(*whole, {name: target.module for name, target in learning.items()})
        for name in learning.keys() - found.rows.keys():
            solution.notes[name] = f"{_NEAREST}no calibration data reached it"
        reached = {name: learning[name] for name in found.rows}
        with Progress(len(reached)) as progress:
            run = _Run(self, solution, found.rows, progress)
            if not self.sequential:
                for group in run.passes(reached):
                    run.learn_together(group, whole)
                return solution
            once = [block for block in blocks if calls[block.name] == list(range(len(whole.batches)))]
            with StudentAndTeacher(whole, solution) as models:
                models.finish(target for target in targets if target.name not in reached)
                units = [[reached[name] for name in group] for group in found.groups]
                # Once, so that the model stays in evaluation mode and random generators come back meanwhile.
                run_batches(model, [None], lambda model, batch: run.one_after_another(models, units, once))
        return solution


@dataclass(frozen=True)
class _Run:
    """One solution in the making.

    Attributes:
        method: How to learn.
        solution: What becomes better.
        rows: How many rows each layer sees.
        progress: Is told of each layer.
    """

    method: AdaQuant
    solution: Solution
    rows: Mapping[str, int]
    progress: Progress

    def passes(self, targets: Mapping[str, Target]) -> Iterator[list[Target]]:
        """Group the layers that share a pass over the float model: as many as memory holds."""
        group: list[Target] = []
        size = 0.0
        for target in targets.values():
            needed = min(self._bytes(target), self._budget)
            if group and size + needed > self._budget:
                yield group
                group, size = [], 0
            group.append(target)
            size += needed
        if group:
            yield group

    def learn_together(self, targets: list[Target], whole: Source) -> None:
        """Let layers learn from one pass over the float model."""
        for sample in collect(targets, self._shares(targets, self._budget), whole).values():
            self._learn(sample.target, sample, sample)

    def one_after_another(
        self, models: StudentAndTeacher, units: list[list[Target]], blocks: list[Block]
    ) -> None:
        """Let layers learn from what a model gives that is quantized up to them.

        Args:
            models: The float model and the quantized one.
            units: Layers that share their input, in the order of use.
            blocks: Those that every batch calls once.
        """
        for block, own in by_block(units, _closed(blocks, units)):
            with models.sources(block) as sources:
                for unit in own:
                    shares = self._shares(unit, self._budget / len(unit))
                    pairs = models.rows(unit, shares, sources)
                    for target in unit:
                        self._learn(target, *pairs.pop(target.name))
                    models.finish(unit)

    @property
    def _budget(self) -> float:
        return self.method.memory_mib * 2**20

    def _bytes(self, target: Target) -> int:
        return self.rows[target.name] * _bytes_of_row(target)

    def _shares(self, targets: list[Target], budget: float) -> dict[str, float]:
        return {target.name: min(1.0, budget / self._bytes(target)) for target in targets}

    def _learn(self, target: Target, exact: Sample, seen: Sample) -> None:
        self.progress.step(target.name)
        method, solution, notes = self.method, self.solution, []
        if exact.rows.blocks != seen.rows.blocks:
            # Routed by what it computes, such as a mixture of experts.
            notes.append("learned from inputs of the float model: the quantized one calls it with others")
            seen = exact
        problem = _problem(target, exact, seen, solution[target.name]["weight"], method.row_exponent)
        learned = learn(
            problem,
            LearningRates(method.weight_rate, method.step_rate, method.input_rate, method.bias_rate),
            iterations=method.iterations,
            batch_rows=method.batch_rows,
            learn_inputs=method.learn_inputs,
            seed=_SEED,
        )
        _keep(target, learned, solution)
        channels, columns, rows = *problem.matrix.shape, len(problem.rows[0])
        if learned.kept:
            notes.append(f"{learned.kept} of {channels} channels {_NEAREST}that errs less on held-out rows")
        if rows < columns:
            notes.append(f"learned from only {rows} rows for {columns} features")
        if notes:
            solution.notes[target.name] = "; ".join(notes)


def _problem(target: Target, exact: Sample, seen: Sample, nearest: Quantized, row_exponent: float) -> Problem:
    matrix = target.weights["weight"]().float()
    bias = cast("Tensor | None", target.module.bias)
    bias = None if bias is None else bias.detach().float()
    taken = exact.rows.take()
    on_cpu = matrix.cpu(), 0 if bias is None else bias.cpu()
    outputs = cast("tuple[Tensor, Tensor]", tuple(products(rows, on_cpu[0]) + on_cpu[1] for rows in taken))
    return Problem(
        matrix=matrix,
        bias=bias,
        scheme=target.scheme,
        nearest=nearest,
        inputs=target.inputs,
        outliers=exact.outliers,
        rows=taken if seen is exact else seen.rows.take(),
        outputs=outputs,
        importance=cast("tuple[Tensor, Tensor]", tuple(_importance(part, row_exponent) for part in outputs)),
    )


def _importance(outputs: Tensor, exponent: float) -> Tensor:
    """Return the weights of rows, FP32 ``[N]``; 1 for a row of typical norm."""
    norms = torch.linalg.vector_norm(outputs, dim=1)
    typical = float(norms.square().mean().sqrt())
    if not typical > 0:
        return torch.ones_like(norms)
    # Outputs of next to nothing would otherwise count without limit.
    return torch.pow(norms.clamp(min=_LEAST * typical) / typical, -exponent)


def _keep(target: Target, learned: Learned, solution: Solution) -> None:
    solution[target.name]["weight"] = learned.weight
    if learned.inputs is not None:
        solution.inputs[target.name] = learned.inputs
    if learned.bias is not None:
        solution.biases[target.name] = learned.bias


def _closed(blocks: list[Block], units: list[list[Target]]) -> list[Block]:
    """Return the blocks whose layers share no input with layers outside, as attention to an encoder's output does."""
    names = [{target.name for target in unit} for unit in units]
    inside = {block.name: {target.name for target in block.targets} for block in blocks}
    return [
        block
        for block in blocks
        if all(unit <= inside[block.name] or unit.isdisjoint(inside[block.name]) for unit in names)
    ]


def _bytes_of_row(target: Target) -> int:
    """Return what a row takes: inputs of the float model and of the quantized one, and outputs."""
    matrix = target.weights["weight"]()
    groups = getattr(target.module, "groups", 1)
    return int(2 * groups * matrix.shape[1] + matrix.shape[0]) * torch.float32.itemsize


register_method(Method("adaquant", Scheme(activations="static"), AdaQuant(), needs_calibration=True))
