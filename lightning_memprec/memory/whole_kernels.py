"""Operators that are one kernel on CPUs and GPUs alike, but several operators on meta tensors.

They are those of aten/src/ATen/native/native_functions.yaml with ``CompositeImplicitAutograd`` beside kernels for CPU
and CUDA and without one for ``Meta``; of these only Mish's backward pass allocates more than its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec.memory.interpose import Kernel

__all__ = ["whole_kernels"]


def whole_kernels() -> dict[OpOverload, Kernel]:
    """Return the kernels, for :class:`~lightning_memprec.memory.interpose.Interposer`."""
    return {torch.ops.aten.mish_backward.default: _mish_backward}


def _mish_backward(func: Any, grad: Tensor, data: Tensor) -> Any:
    if data.is_meta and not torch.is_grad_enabled():
        return torch.empty_like(data)
    return func(grad, data)  # A second derivative goes through the operators it is made of.
