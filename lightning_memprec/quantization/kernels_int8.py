"""Kernels that multiply integers: ``torch._int_mm``, bitsandbytes, oneDNN and fbgemm."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_memprec._optional import is_installed
from lightning_memprec.quantization.kernels_base import Kernel, Operand

__all__ = ["BitsAndBytes", "Fbgemm", "IntMM", "OneDNN"]

_TINY = torch.finfo(torch.float32).tiny


def _activation_scale(values: Tensor, layer: Operand) -> Tensor:
    if layer.input_scale is not None:
        return layer.input_scale[:, None]
    # As `activations.activation_parameters`, whose guards and temporaries take longer than a small product.
    if layer.scheme.activations == "token":
        smallest, largest = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    else:
        smallest, largest = (edge.reshape(1, 1) for edge in torch.aminmax(values))
    # Zeros get a tiny scale here, which gives zeros just as well as 1.
    return torch.maximum(largest, smallest.neg()).div_(127).clamp_(min=_TINY)


def _round_activations(values: Tensor, layer: Operand) -> tuple[Tensor, Tensor]:
    scale = _activation_scale(values, layer)
    # Into a new tensor, whose strides are right even for a single token (`IntMM.fits` says why).
    integers = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    rounded = (values / scale).round_()
    if layer.input_scale is not None:
        rounded = rounded.clamp_(-127, 127)
    # Else nothing to clip: the largest magnitude gives 127 or, by the rounding of the scale, next to it.
    return integers.copy_(rounded), scale


def _rescale(sums: Tensor, scale: Tensor, layer: Operand) -> Tensor:
    # In FP32: float16 ends at 65504, which sums of products pass.
    return (sums * scale).mul_(layer.weight_scale.flatten())


@dataclass(frozen=True)
class IntMM(Kernel):
    """``torch._int_mm``: exact int32 sums.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """

    device: Literal["cpu", "cuda"]
    name = "torch._int_mm"
    traceable = True

    @property
    def device_type(self) -> str:
        """See :class:`Kernel`."""
        return self.device

    def fits(self, layer: Operand) -> str | None:
        """See :class:`Kernel`."""
        if self.device == "cuda" and (any(size % 8 for size in layer.matrix_shape)):
            return "its CUDA form needs dimensions that are multiples of 8"
        if self.device == "cpu" and 1 in layer.matrix_shape:
            return "wrong numbers for a dimension of 1 (https://github.com/pytorch/pytorch/issues/195066)"
        if self.device == "cpu" and not _has_vnni():
            # Where it does not saturate, it has no fast code.
            return "slower than float on a CPU without VNNI"
        return None

    def run(self, values: Tensor, layer: Operand, packed: Any) -> Tensor:
        """See :class:`Kernel`."""
        integers, scale = _round_activations(values, layer)
        tokens = integers.shape[0]
        if self.device == "cuda" and tokens <= 16:
            # Its CUDA form needs more than 16 rows.
            integers = torch.nn.functional.pad(integers, (0, 0, 0, 32 - tokens))
        return _rescale(torch._int_mm(integers, layer.weight.t())[:tokens], scale, layer)


@dataclass(frozen=True)
class BitsAndBytes(Kernel):
    """``bitsandbytes``' int8 product on CUDA, exact int32 sums."""

    name = "bitsandbytes"
    device_type = "cuda"

    def fits(self, layer: Operand) -> str | None:
        """See :class:`Kernel`."""
        return None if is_installed("bitsandbytes") else "bitsandbytes is not installed"

    def run(self, values: Tensor, layer: Operand, packed: Any) -> Tensor:
        """See :class:`Kernel`."""
        from bitsandbytes.functional import int8_linear_matmul

        integers, scale = _round_activations(values, layer)
        return _rescale(int8_linear_matmul(integers, layer.weight), scale, layer)


@dataclass(frozen=True)
class OneDNN(Kernel):
    """oneDNN's product of uint8 and int8, exact int32 sums; activations are shifted by 128."""

    name = "oneDNN"
    device_type = "cpu"

    def fits(self, layer: Operand) -> str | None:
        """See :class:`Kernel`."""
        return None if torch.backends.mkldnn.is_available() else "this build has no oneDNN"  # type: ignore[no-untyped-call]

    def pack(self, layer: Operand) -> Any:
        """See :class:`Kernel`."""
        channels = layer.matrix_shape[0]
        scale = layer.weight_scale.flatten().expand(channels).contiguous()
        packed = torch.ops.onednn.qlinear_prepack(layer.weight.contiguous(), None)
        return packed, scale, torch.zeros(channels, dtype=torch.int64)

    def run(self, values: Tensor, layer: Operand, packed: Any) -> Tensor:
        """See :class:`Kernel`."""
        weight, weight_scale, weight_zero_point = packed
        integers, scale = _round_activations(values, layer)
        # Adds 128; a conversion from FP32 to uint8 takes several times as long as one to int8.
        integers = integers.view(torch.uint8).bitwise_xor_(128)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            integers,
            1.0,
            128,
            weight,
            weight_scale,
            weight_zero_point,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return product.mul_(scale)


@dataclass(frozen=True)
class Fbgemm(Kernel):
    """``quantized::linear_dynamic`` with fbgemm.

    It has one activation range for the whole tensor. For ranges by token each row is divided by its largest
    magnitude first and multiplied by it afterwards.

    Args:
        weight_bits: 7 keeps the sum of two products below 2^15 (2 · 255 · 64 = 32640), which no CPU saturates;
            weights are rounded again for the packed copy only.
    """

    weight_bits: int = 8
    device_type = "cpu"

    @property
    def name(self) -> str:
        """See :class:`Kernel`."""
        return "fbgemm" if self.weight_bits == 8 else f"fbgemm with {self.weight_bits}-bit weights"

    def fits(self, layer: Operand) -> str | None:
        """See :class:`Kernel`."""
        if layer.input_scale is not None:
            return "it measures the scale of activations anew"
        return None if "fbgemm" in torch.backends.quantized.supported_engines else "this build has no fbgemm"

    def pack(self, layer: Operand) -> Any:
        """See :class:`Kernel`."""
        channels = layer.matrix_shape[0]
        integers, scale = layer.weight, layer.weight_scale.flatten().expand(channels)
        if layer.scheme.bits > self.weight_bits:
            narrow, wide = 2 ** (self.weight_bits - 1) - 1, 2 ** (layer.scheme.bits - 1) - 1
            integers = torch.round(integers.float() * (narrow / wide)).to(torch.int8)
            scale = scale * (wide / narrow)
        zero_points = torch.zeros(channels, dtype=torch.int64)
        with _engine("fbgemm"), _quiet():
            tensor = torch._make_per_channel_quantized_tensor(
                integers.contiguous(), scale.double(), zero_points, 0
            )
            return torch.ops.quantized.linear_prepack(tensor, None)

    def run(self, values: Tensor, layer: Operand, packed: Any) -> Tensor:
        """See :class:`Kernel`."""
        with _engine("fbgemm"):
            if layer.scheme.activations == "tensor":
                return torch.ops.quantized.linear_dynamic(values, packed, False)  # type: ignore[no-any-return]
            magnitude = torch.maximum(
                values.amax(dim=1, keepdim=True), values.amin(dim=1, keepdim=True).neg()
            )
            unit = values / magnitude.clamp(min=_TINY)
            product: Tensor = torch.ops.quantized.linear_dynamic(unit, packed, False)
        return product.mul_(magnitude)


@contextmanager
def _engine(name: str) -> Iterator[None]:
    # The engine is a switch of the whole process, and packed weights work with their own engine only.
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Nothing of these tensor types is stored; should they go, the probe fails and another kernel runs.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*deprecated")
        yield


@cache
def _has_vnni() -> bool:
    return bool(torch.cpu._is_vnni_supported())
