"""What CUDA kernels and libraries allocate that a trace on meta tensors does not show.

All of it comes from PyTorch's caching allocator, so that it counts as allocated and reserved memory. Sources are
paths in the PyTorch repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec._units import KIB, MIB
from lightning_memprec.memory.losses import elements_bytes, is_reduced

__all__ = ["CudaWorkspaces", "cublas_workspace_bytes", "cuda_kernel_allocations"]

_aten = torch.ops.aten
_Rule = Callable[..., Iterable[int]]
_FLOAT32_BYTES = 4

# -- libraries -----------------------------------------------------------------------------------------

_CUBLAS_OPERATORS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default}
)


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the workspace that one cuBLAS handle keeps for one stream.

    Args:
        capability: Compute capability of the device.

    Returns:
        ``CUBLAS_WORKSPACE_CONFIG``, if set (``:SIZE:COUNT`` pairs, sizes in KiB); else 32 MiB on Hopper and
        ``:4096:2:16:8`` elsewhere.

    References:
        ``parseChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp.

    Example:
        >>> import os
        >>> "CUBLAS_WORKSPACE_CONFIG" in os.environ or cublas_workspace_bytes((8, 0))
        8519680
    """
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * KIB
    return 32 * MIB if capability == (9, 0) else (4096 * 2 + 16 * 8) * KIB


class CudaWorkspaces:
    """Workspaces that stay: cuBLAS keeps one a handle, and every thread has its own handle.

    Autograd runs the backward pass of a device in a thread of its own, so that a training run has two. They are
    made at the first product of each thread and are never given back.

    Args:
        capability: Compute capability of the device.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._size_bytes = cublas_workspace_bytes(capability)
        self._threads: set[bool] = set()

    def first_use(self, func: OpOverload, in_backward: bool) -> int:
        """Return what an operator allocates for good: the workspace at a thread's first product, else 0.

        Args:
            func: Operator that is about to run.
            in_backward: Whether autograd's own thread would run it.
        """
        if func not in _CUBLAS_OPERATORS or in_backward in self._threads:
            return 0
        self._threads.add(in_backward)
        return self._size_bytes


# -- kernels -------------------------------------------------------------------------------------------


def cuda_kernel_allocations(func: OpOverload, args: Any, kwargs: Any) -> Iterable[int]:
    """Return sizes of what a CUDA kernel allocates and frees inside one call.

    Convolutions are in :mod:`~lightning_memprec.memory.convolution`.

    Args:
        func: Operator that runs.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Sizes in bytes, each live on its own beside the operator's outputs.

    Example:
        >>> ids = torch.empty(4096, dtype=torch.int64, device="meta")
        >>> grad = torch.empty(4096, 768, device="meta")
        >>> backward = torch.ops.aten.embedding_dense_backward.default
        >>> list(cuda_kernel_allocations(backward, (grad, ids, 50257, -1, False), {}))
        [12779520]
    """
    rule = _RULES.get(func)
    return () if rule is None else rule(*args, **kwargs)


def _dense_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_bytes(*tensors: Tensor) -> int:
    """Bytes of the dense copies that `contiguous()` makes of those that are not dense."""
    return sum(_dense_bytes(t) for t in tensors if not t.is_contiguous())


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# -- fused attention: aten/src/ATen/native/transformers/cuda -------------------------------------------


def _flash_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Iterable[int]:
    """The query's gradient summed in float32, a sum a row, and K's and V's gradients of every head.

    Source: `mha_bwd` in flash_attn/flash_api.cpp: lengths are rounded up to 128, head sizes to 32, above 192
    to 256.
    """
    batch, heads, length, head_size = query.shape
    rows = batch * heads * _up(length, 128)
    accumulator = rows * (_up(head_size, 32) if head_size <= 192 else 256) * _FLOAT32_BYTES
    expanded = 0
    if key.size(1) != heads:
        expanded = 2 * _dense_bytes(key) // key.size(1) * heads
    yield accumulator + rows * _FLOAT32_BYTES + expanded


def _efficient_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Iterable[int]:
    """A sum a row, and in half precision the query's gradient in float32.

    Source: `_efficient_attention_backward` in attention_backward.cu (`delta`) and `workspace_elements_gq` in
    mem_eff_attention/kernel_backward.h; blocks have 64 rows.
    """
    batch, heads, length, head_size = query.shape
    delta = batch * heads * length * _FLOAT32_BYTES
    accumulator = 0
    if query.element_size() < _FLOAT32_BYTES:
        accumulator = batch * heads * _up(length, 64) * _up(head_size, 64) * _FLOAT32_BYTES
    yield delta + accumulator


# -- embedding: aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu ----------------------

# Up to so many indices one kernel adds straight into the gradient (`embedding_dense_backward_cuda`).
_FEW_INDICES = 3072


def _embedding_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Iterable[int]:
    """Six arrays of indices (the counts make seven), and a row of partial sums in float32 for every index."""
    count = indices.numel()
    if count <= _FEW_INDICES and not scale_grad_by_freq:
        return
    arrays = (7 if scale_grad_by_freq else 6) * count * indices.element_size()
    partial = count * grad.size(-1) * max(_FLOAT32_BYTES, grad.element_size())
    yield arrays + partial + _copy_bytes(grad)


# -- layer norm: aten/src/ATen/native/cuda/layer_norm_kernel.cu ----------------------------------------


def _layer_norm(data: Tensor, *rest: Any) -> Iterable[int]:
    # `layer_norm_cuda` copies what is not dense.
    yield _copy_bytes(data)


def _layer_norm_backward(grad: Tensor, data: Tensor, *rest: Any) -> Iterable[int]:
    yield _copy_bytes(grad, data)


# -- losses: aten/src/ATen/native/BinaryOps.cpp, Loss.cpp ----------------------------------------------


def _loss(func: OpOverload) -> _Rule:
    def rule(*args: Any, **kwargs: Any) -> Iterable[int]:
        # All elements, before they are reduced to one number.
        if is_reduced(func, args, kwargs):
            yield elements_bytes(args)

    return rule


_LOSSES = (
    _aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default, _aten.soft_margin_loss.default,
)  # fmt: skip

_RULES: dict[OpOverload, _Rule] = {
    **{func: _loss(func) for func in _LOSSES},
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}
