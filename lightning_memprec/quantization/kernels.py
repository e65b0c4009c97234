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

from functools import cache

import torch
from torch import Tensor

from lightning_memprec.quantization.kernels_base import Kernel, Operand
from lightning_memprec.quantization.kernels_int8 import BitsAndBytes, Fbgemm, IntMM, OneDNN

__all__ = ["KERNELS", "explain", "probe", "select"]

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


def _reason_against(layer: Operand) -> str | None:
    scheme = layer.scheme
    if scheme.activations == "float":
        return "activations stay in floating point"
    if scheme.mapping != "symmetric":
        return "zero points need the portable kernel"
    if scheme.weight_granularity == "group":
        return "scales of groups need the portable kernel"
    if type(layer.stored()) is not Tensor or not layer.stored().numel():
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
    device = layer.stored().device
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
    device = layer.stored().device
    for kernel in KERNELS:
        if kernel.device_type != device.type:
            continue
        reason = kernel.fits(layer) or probe(kernel, device)
        if reason is None:
            return f"{kernel.name} on {device.type}" + (f" ({'; '.join(refused)})" if refused else "")
        refused.append(f"not {kernel.name}: {reason}")
    return f"portable block-wise dequantization ({'; '.join(refused) or f'no int8 kernel for {device.type}'})"
