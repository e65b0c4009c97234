r"""AdaQuant: learn a change of the weights and the steps of weights and inputs, one layer at a time.

Minimises :math:`\|WX + b - (Q_{\Delta_w}(W + V)\,Q_{\Delta_x}(X) + \hat b)\|^2` over :math:`V`, :math:`\Delta_w`,
:math:`\Delta_x` and :math:`\hat b` by Adam, with gradients straight through the rounding.

Source: Hubara, Nahshan, Hanani, Banner, Soudry, "Improving Post Training Neural Quantization: Layer-wise Calibration
and Integer Programming", arXiv 2006.10518; code: https://github.com/itayhubara/CalibTIP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.activations import outlier_columns
from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.calibration import feed
from lightning_memprec.quantization.methods import Method, Solution, register_method
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.progress import Progress
from lightning_memprec.quantization.reconstruction.adaquant_layer import Learned, LearningRates, learn
from lightning_memprec.quantization.reconstruction.adaquant_student import Problem, products
from lightning_memprec.quantization.reconstruction.paired_rows import RowSample, Survey, survey
from lightning_memprec.quantization.reconstruction.solving import left_out
from lightning_memprec.quantization.reconstruction.standing_in import standing_in
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
        sequential: Give each layer the inputs that it will see, from a model quantized up to there. Otherwise those of
            the float model, many layers in a pass.
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
        run = _Run(model, list(batches or ()), forward)
        found = survey(run.model, run.batches, run.forward, _modules(learning.values()))
        for name in learning.keys() - found.rows.keys():
            solution.notes[name] = f"{_NEAREST}no calibration data reached it"
        waiting = {name: learning[name] for name in found.rows}
        with Progress(len(waiting)) as progress:
            for group in self._passes(found, waiting):
                chosen = [waiting.pop(name) for name in group]
                # In their places stand the layers that are finished already; those to come answer in floating point.
                before = [
                    target for target in targets if target.name not in waiting and target.name not in group
                ]
                samples = self._sample(
                    run, chosen, found, solution.complete(before) if self.sequential else [], solution
                )
                for target in chosen:
                    progress.step(target.name)
                    self._learn(target, *samples.pop(target.name), solution)
        return solution

    def _passes(self, found: Survey, targets: Mapping[str, Target]) -> Iterator[list[str]]:
        """Group the layers that share a pass over the data: those of one input, or as many as memory holds."""
        if self.sequential:
            yield from found.groups
            return
        group: list[str] = []
        size = 0.0
        for name, rows in found.rows.items():
            needed = min(rows * _bytes_of_row(targets[name]), self._budget)
            if group and size + needed > self._budget:
                yield group
                group, size = [], 0.0
            group.append(name)
            size += needed
        if group:
            yield group

    @property
    def _budget(self) -> float:
        return self.memory_mib * 2**20

    def _sample(
        self, run: _Run, targets: list[Target], found: Survey, before: list[Target], solution: Solution
    ) -> dict[str, tuple[_Sample, _Sample]]:
        """Return rows of the float model and of the quantized prefix, the same ones."""
        budget = self._budget / len(targets) if self.sequential else self._budget
        shares = {
            target.name: min(1.0, budget / (found.rows[target.name] * _bytes_of_row(target)))
            for target in targets
        }
        exact = run.collect(targets, shares)
        if not before:
            return {name: (sample, sample) for name, sample in exact.items()}
        layers = {target.name: target.build(dict(solution[target.name])) for target in before}
        with standing_in(before, layers):
            rounded = run.collect(targets, shares)
        return {name: (exact[name], rounded[name]) for name in exact}

    def _learn(self, target: Target, exact: _Sample, seen: _Sample, solution: Solution) -> None:
        notes = []
        if exact.rows.blocks != seen.rows.blocks:
            # Routed by what it computes, such as a mixture of experts.
            notes.append("learned from inputs of the float model: the quantized one calls it with others")
            seen = exact
        problem = _problem(target, exact, seen, solution[target.name]["weight"], self.row_exponent)
        learned = learn(
            problem,
            LearningRates(self.weight_rate, self.step_rate, self.input_rate, self.bias_rate),
            iterations=self.iterations,
            batch_rows=self.batch_rows,
            learn_inputs=self.learn_inputs,
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


@dataclass(frozen=True)
class _Run:
    """A model and its data."""

    model: nn.Module
    batches: Sequence[Any]
    forward: Callable[[nn.Module, Any], Any]

    def collect(self, targets: list[Target], shares: Mapping[str, float]) -> dict[str, _Sample]:
        samples = {target.name: _Sample(target, RowSample(shares[target.name])) for target in targets}
        feed(
            self.model,
            self.batches,
            self.forward,
            _modules(targets),
            lambda name, block: samples[name].add(block),
        )
        return samples


@dataclass
class _Sample:
    """Rows of one layer, and the features that are outliers in any of its rows."""

    target: Target
    rows: RowSample
    outliers: Tensor | None = None

    def add(self, block: Tensor) -> None:
        self.rows.add(block)
        threshold = self.target.scheme.outlier_threshold
        if threshold is not None:
            found = outlier_columns(block[:, 0], threshold)
            self.outliers = found if self.outliers is None else self.outliers | found


def _problem(
    target: Target, exact: _Sample, seen: _Sample, nearest: Quantized, row_exponent: float
) -> Problem:
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


def _modules(targets: Iterable[Target]) -> dict[str, nn.Module]:
    return {target.name: target.module for target in targets}


def _bytes_of_row(target: Target) -> int:
    """Return what a row takes: inputs of the float model and of the quantized one, and outputs."""
    matrix = target.weights["weight"]()
    groups = getattr(target.module, "groups", 1)
    return int(2 * groups * matrix.shape[1] + matrix.shape[0]) * torch.float32.itemsize


register_method(Method("adaquant", Scheme(activations="static"), AdaQuant(), needs_calibration=True))
