"""Products of activations and an int8 weight: which kernel runs where, and why.

A layer stores plain int8 and scales; a kernel may keep a packed copy beside them, which is never saved. Kernels are
tried in a fixed order, and each is *probed* on the device before it is trusted: it must return exactly 64 for
64 ones times 64 ones, and agree with float on random data. The ones matter. CPUs without VNNI instructions add pairs of
8-bit products in 16 bits and saturate: there fbgemm silently returns about 32 (which is why PyTorch lowers the width of
activations, https://github.com/pytorch/pytorch/issues/34692) and oneDNN (``torch._int_mm`` too) about 0.5
(https://github.com/pytorch/pytorch/issues/136746). Random data does not show it.

The order is fixed, not timed at run time, so that the same machine always computes the same bits.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_memprec._optional import is_installed

__all__ = ["KERNELS", "Kernel", "Operand", "explain", "portable", "probe", "select"]

# 4 MiB of FP32: two such blocks stay in the second-level cache of current CPUs.
_BLOCK_ELEMENTS = 2**20
_TINY = torch.finfo(torch.float32).tiny


class Operand(Protocol):
    """What a kernel needs to know of an int8 weight."""

    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None

    @property
    def scheme(self) -> Any:
        """The :class:`~lightning_memprec.quantization.modules.base.Scheme`."""

    def dequantize_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """FP32 rows ``start`` to ``stop`` of the weight matrix."""

    def channel_scale(self) -> Tensor | None:
        """FP32 ``[channels]`` or ``[1]``, if the weight is just its integers times that, else ``None``."""


class Kernel(ABC):
    """Multiplies symmetric int8 activations with a symmetric int8 weight. Equal kernels are hashed alike."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for people."""

    @property
    @abstractmethod
    def device_type(self) -> str:
        """Where it runs."""

    @property
    def traceable(self) -> bool:
        """Whether a compiler sees into it; then it needs no packed weight either."""
        return False

    @abstractmethod
    def fits(self, layer: Operand) -> str | None:
        """Say why the kernel cannot take a layer of this shape, or ``None`` if it can."""

    def pack(self, layer: Operand) -> Any:
        """Prepare the weight; called once."""
        return None

    @abstractmethod
    def run(self, values: Tensor, layer: Operand, packed: Any) -> Tensor:
        """Return FP32 ``[tokens, channels]`` for FP32 ``[tokens, features]``, without bias."""


def blocks(layer: Operand) -> Iterator[tuple[int, int]]:
    """Yield ranges of output channels whose FP32 weights fit into the cache together."""
    channels = layer.weight.shape[0]
    step = max(1, _BLOCK_ELEMENTS // max(1, layer.weight[0].numel() if channels else 1))
    for start in range(0, channels, step):
        yield start, min(start + step, channels)


def portable(values: Tensor, layer: Operand) -> Tensor:
    """Multiply with the weight, a block of output channels dequantized at a time.

    Args:
        values: Floating point ``[tokens, features]``, already rounded to int8's grid where activations are quantized.
        layer: The int8 weight.

    Returns:
        ``[tokens, channels]`` in the dtype of ``values``.
    """
    product = values.new_empty(values.shape[0], layer.weight.shape[0])
    scale = layer.channel_scale()
    if (
        scale is None or values.dtype == torch.float16
    ):  # Products of bare integers could pass float16's 65504.
        for start, stop in blocks(layer):
            torch.mm(
                values, layer.dequantize_rows(start, stop).to(values.dtype).t(), out=product[:, start:stop]
            )
        return product
    # Scaling the product instead of the weight, and using one buffer, takes half the time for a single token.
    buffer = values.new_empty(0)
    for start, stop in blocks(layer):
        if start == 0:
            buffer = values.new_empty(stop, values.shape[1])
        block = buffer[: stop - start].copy_(layer.weight[start:stop])
        torch.mm(values, block.t(), out=product[:, start:stop])
    return product.mul_(scale)


def _activation_scale(values: Tensor, layer: Operand) -> Tensor:
    # As `activations.activation_parameters`, whose guards and temporaries take longer than a small product.
    if layer.scheme.activations == "token":
        smallest, largest = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    else:
        smallest, largest = (edge.reshape(1, 1) for edge in torch.aminmax(values))
    # Zeros get a tiny scale here, which gives zeros just as well as 1.
    return torch.maximum(largest, smallest.neg()).div_(127).clamp_(min=_TINY)


def _round_activations(values: Tensor, layer: Operand) -> tuple[Tensor, Tensor]:
    scale = _activation_scale(values, layer)
    # Into a new tensor, whose strides are right even for a single token (`IntMM.fits` says why). Nothing to clip: the
    # largest magnitude gives 127 or, by the rounding of the scale, next to it.
    integers = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    return integers.copy_((values / scale).round_()), scale


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
        if self.device == "cuda" and (layer.weight.shape[0] % 8 or layer.weight.shape[1] % 8):
            return "its CUDA form needs dimensions that are multiples of 8"
        if self.device == "cpu" and 1 in layer.weight.shape:
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
        channels = layer.weight.shape[0]
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
        return None if "fbgemm" in torch.backends.quantized.supported_engines else "this build has no fbgemm"

    def pack(self, layer: Operand) -> Any:
        """See :class:`Kernel`."""
        channels = layer.weight.shape[0]
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


# Exact sums first, and of those the faster (`benchmarks/int8_speed.py`); fbgemm is what is right without VNNI, with 7
# bits where 8 fail the probe.
KERNELS: tuple[Kernel, ...] = (
    BitsAndBytes(),
    IntMM("cuda"),
    OneDNN(),
    IntMM("cpu"),
    Fbgemm(),
    Fbgemm(weight_bits=7),
)


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


def _reason_against(layer: Operand) -> str | None:
    scheme = layer.scheme
    if scheme.activations == "float":
        return "activations stay in floating point"
    if scheme.mapping != "symmetric":
        return "zero points need the portable kernel"
    if scheme.weight_granularity == "group":
        return "scales of groups need the portable kernel"
    if type(layer.weight) is not Tensor or not layer.weight.numel():
        return "the weight is empty or not a plain tensor"
    return None


def select(layer: Operand, *, traceable: bool = False) -> Kernel | None:
    """Return the first kernel that takes the layer and has passed its probe, or ``None`` for the portable one.

    Args:
        layer: An int8 linear layer.
        traceable: Only kernels that a compiler sees into.
    """
    if _reason_against(layer) is not None:
        return None
    device = layer.weight.device
    for kernel in KERNELS:
        if kernel.device_type != device.type or (traceable and not kernel.traceable):
            continue
        if kernel.fits(layer) is None and probe(kernel, device) is None:
            return kernel
    return None


@cache
def probe(kernel: Kernel, device: torch.device) -> str | None:
    """Compare a kernel's answers with known ones.

    Args:
        kernel: The kernel.
        device: Where to run it.

    Returns:
        ``None`` if it is right, else what is wrong.
    """
    from lightning_memprec.quantization._probe import check

    try:
        return check(kernel, device)
    except Exception as error:  # Whatever an optional kernel raises, the portable one is there.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def explain(layer: Operand) -> str:
    """Say in one line which kernel a layer's products run on, and why not on those before it.

    Args:
        layer: An int8 linear layer.
    """
    reason = _reason_against(layer)
    if reason is not None:
        return f"portable block-wise dequantization ({reason})"
    refused: list[str] = []
    device = layer.weight.device
    for kernel in KERNELS:
        if kernel.device_type != device.type:
            continue
        reason = kernel.fits(layer) or probe(kernel, device)
        if reason is None:
            return f"{kernel.name} on {device.type}" + (f" ({'; '.join(refused)})" if refused else "")
        refused.append(f"not {kernel.name}: {reason}")
    return f"portable block-wise dequantization ({'; '.join(refused) or f'no int8 kernel for {device.type}'})"
