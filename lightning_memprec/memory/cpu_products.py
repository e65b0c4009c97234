"""Copies that batched products in half precision make of their factors on CPUs.

oneDNN takes factors that are contiguous or wholly transposed; others, such as a weight expanded to a batch of products
or permuted heads, are copied first. Source: ``use_mkldnn_matmul`` and ``is_mkldnn_optimized_format`` in
aten/src/ATen/native/mkldnn/Matmul.cpp of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["product_allocations"]

_aten = torch.ops.aten
_Rule = Callable[..., Iterable[int]]
_SMALLEST = 16**3  # `mkldnn_gemm_min_size`: smaller products are computed without oneDNN.


def product_allocations() -> dict[OpOverload, _Rule]:
    """Return rules as in :mod:`~lightning_memprec.memory.cpu_temporaries`, by operator."""
    return {
        _aten.bmm.default: _product,
        _aten.baddbmm.default: lambda added, first, second, **kwargs: _product(first, second),
    }


def _product(first: Tensor, second: Tensor) -> Iterable[int]:
    if not _uses_onednn(first.dtype) or first.numel() * second.size(2) <= _SMALLEST:
        return
    copies = sum(each.numel() * each.itemsize for each in (first, second) if not _is_dense(each))
    if copies:
        yield copies + first.size(0) * first.size(1) * second.size(2) * first.itemsize


def _uses_onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous()
