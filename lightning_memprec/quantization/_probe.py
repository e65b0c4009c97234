"""Known answers for int8 kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_memprec.quantization.modules.base import Int8Module, Scheme

if TYPE_CHECKING:
    from lightning_memprec.quantization.kernels_base import Kernel

__all__ = ["check"]

_FEATURES = 64
# int8 activations and 7-bit weights each round by half a step of the largest value: on Gaussian rows of 64 features
# the product is off by 1 to 2 %. Saturation is off by 50 %.
_TOLERANCE = 0.05


def check(kernel: Kernel, device: torch.device) -> str | None:
    """Return what is wrong with a kernel's answers, or ``None``.

    Args:
        kernel: The kernel.
        device: Where to run it.
    """
    with torch.inference_mode(False), torch.no_grad():
        ones = torch.ones(3, _FEATURES, device=device)
        answer = _answer(kernel, torch.ones(8, _FEATURES, device=device), ones)
        worst = answer.flatten()[(answer - _FEATURES).abs().argmax()].item()
        if not abs(worst - _FEATURES) <= 1e-3:  # Also if it is NaN.
            return f"it saturates: {_FEATURES} times 1 gave {worst:.4g}"
        generator = torch.Generator().manual_seed(0)
        weight, values = (
            torch.randn(16, _FEATURES, generator=generator),
            torch.randn(5, _FEATURES, generator=generator),
        )
        exact = values @ weight.t()
        error = (_answer(kernel, weight.to(device), values.to(device)).cpu() - exact).norm() / exact.norm()
        return None if error < _TOLERANCE else f"it is wrong: {error:.0%} off on random data"


def _answer(kernel: Kernel, weight: Tensor, values: Tensor) -> Tensor:
    scheme = Scheme(activations="token")
    layer = Int8Module(scheme.quantize(weight), None, scheme, torch.float32)
    return kernel.run(values, layer, kernel.pack(layer))
