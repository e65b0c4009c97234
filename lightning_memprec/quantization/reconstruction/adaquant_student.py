"""A quantized layer that is differentiable by its weights, its bias and the steps of weights and inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memprec.quantization.activations import fake_quantize
from lightning_memprec.quantization.affine import Quantized, integer_range, quantize, spread
from lightning_memprec.quantization.modules.base import Scheme
from lightning_memprec.quantization.reconstruction.learned_step import round_through

__all__ = ["Inputs", "Problem", "Student", "channel_errors", "products"]

_BLOCK = 4096  # Rows whose outputs are computed together where nothing is learned.

Inputs = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Problem:
    """What a layer learns from.

    Attributes:
        matrix: Weight, FP32 ``[R, K]``.
        bias: FP32 ``[R]``, or ``None``.
        scheme: How to quantize.
        nearest: The weight rounded to nearest.
        inputs: Scale and zero point of static activations, else ``None``.
        outliers: bool ``[K]``: features that multiply in floating point.
        rows: Inputs to learn from, FP32 ``[N, G, K]``, and held-out ones.
        outputs: What the float layer gives for them, FP32 ``[N, R]``.
        importance: Weights of the rows' squared errors, FP32 ``[N]``.
    """

    matrix: Tensor
    bias: Tensor | None
    scheme: Scheme
    nearest: Quantized
    inputs: Inputs | None
    outliers: Tensor | None
    rows: tuple[Tensor, Tensor]
    outputs: tuple[Tensor, Tensor]
    importance: tuple[Tensor, Tensor]


class Student:
    r"""A layer with :math:`Q_{\Delta_w}(W + V)\,Q_{\Delta_x}(X) + b`, differentiable by all of it.

    Args:
        problem: The layer.
        learn_inputs: Whether the step of static activations changes.
    """

    def __init__(self, problem: Problem, *, learn_inputs: bool) -> None:
        self.problem = problem
        device, size, columns = problem.matrix.device, problem.scheme.group_size, problem.matrix.shape[1]
        self.step = spread(problem.nearest.scale, columns, size).to(device)
        zero_point = problem.nearest.zero_point
        self.zero_point = None if zero_point is None else spread(zero_point, columns, size).to(device)
        self.shift = torch.zeros_like(problem.matrix).requires_grad_()
        self.stretch = torch.zeros_like(problem.nearest.scale).requires_grad_()
        self.parts = {"weights": self.shift, "steps": self.stretch}
        self.input_stretch = torch.zeros(1, device=device)
        if learn_inputs and problem.inputs is not None:
            self.parts["inputs"] = self.input_stretch.requires_grad_()
        self.bias_shift = torch.zeros(len(problem.matrix), device=device)
        self.unit = (
            problem.outputs[0].square().mean().sqrt().to(device).clamp(min=torch.finfo(torch.float32).tiny)
        )
        if problem.bias is not None:
            self.parts["bias"] = self.bias_shift.requires_grad_()

    def weight(self) -> Tensor:
        """Return the weight as it would be stored, ``[R, K]``."""
        problem = self.problem
        factor = spread(self.stretch.exp(), problem.matrix.shape[1], problem.scheme.group_size)
        limits = integer_range(problem.scheme.bits, problem.scheme.mapping)
        rounded = round_through(self._moved(), self.step * factor, self.zero_point, *limits)
        return rounded if problem.outliers is None else torch.where(problem.outliers, problem.matrix, rounded)

    def _moved(self) -> Tensor:
        return torch.addcmul(self.problem.matrix, self.shift, self.step.expand_as(self.shift))

    def _rounded(self, rows: Tensor) -> Tensor:
        problem = self.problem
        if problem.inputs is not None:
            scale, zero_point = problem.inputs
            limits = integer_range(8, problem.scheme.mapping)
            rounded = round_through(rows, scale * self.input_stretch.exp(), zero_point, *limits)
        elif problem.scheme.activations == "token" and rows.shape[1] == 1:
            flat = rows[:, 0]
            rounded = fake_quantize(
                flat, per_token=True, mapping=problem.scheme.mapping, outliers=problem.outliers
            )[:, None]
        else:
            return rows
        return rounded if problem.outliers is None else torch.where(problem.outliers, rows, rounded)

    def outputs(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return what the layer gives.

        Args:
            rows: FP32 ``[N, G, K]``.
            weight: What :meth:`weight` returned.

        Returns:
            FP32 ``[N, R]``.
        """
        product = products(self._rounded(rows), weight)
        if self.problem.bias is None:
            return product
        return product + (self.problem.bias + self.unit * self.bias_shift)

    def channels_depend(self) -> bool:
        """Tell whether channels share something that changes."""
        return "inputs" in self.parts or self.problem.scheme.weight_granularity == "tensor"

    def settle_inputs(self) -> None:
        """Leave the step of inputs as it is from now on."""
        settled = self.parts.pop("inputs", None)
        if settled is not None:
            settled.grad = None  # Else the optimizer would go on with it.
            self.input_stretch = settled.detach().clone()

    def state(self) -> dict[str, Tensor]:
        """Return a copy of what is learned."""
        return {name: part.detach().clone() for name, part in self.parts.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go back to a state."""
        for name, part in self.parts.items():
            part.data.copy_(state[name])

    def quantized(self) -> Quantized:
        """Return the weight as integers and scales."""
        problem, nearest = self.problem, self.problem.nearest
        scale = (nearest.scale * self.stretch.detach().exp()).contiguous()
        columns, size = problem.matrix.shape[1], problem.scheme.group_size
        spread_scale = spread(scale, columns, size)
        values = quantize(
            self._moved().detach(),
            spread_scale,
            self.zero_point,
            bits=problem.scheme.bits,
            mapping=problem.scheme.mapping,
        )
        return Quantized(values, scale, nearest.zero_point)


def products(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows with a weight, each group of a convolution by itself.

    Args:
        rows: ``[N, G, K]``.
        weight: ``[R, K]``, channels of a group next to each other.

    Returns:
        ``[N, R]``.
    """
    count, groups, columns = rows.shape
    if groups == 1:
        return rows[:, 0] @ weight.t()
    by_group = torch.bmm(rows.transpose(0, 1), weight.view(groups, -1, columns).transpose(1, 2))
    return by_group.transpose(0, 1).reshape(count, -1)


def channel_errors(student: Student) -> Tensor:
    """Return the squared error of each channel on held-out rows, FP64 ``[R]``."""
    problem, device = student.problem, student.shift.device
    with torch.no_grad():
        weight = student.weight()
        total = torch.zeros(len(weight), dtype=torch.float64)
        for index in torch.split(torch.arange(len(problem.rows[1])), _BLOCK):
            rows, exact, importance = (
                part[1][index].to(device) for part in (problem.rows, problem.outputs, problem.importance)
            )
            squares = (student.outputs(rows, weight) - exact).double().square()
            total += (squares * importance[:, None]).sum(0).cpu()
    return total
