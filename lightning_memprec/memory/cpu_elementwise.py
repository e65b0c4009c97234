"""Copies that CPU kernels make to compute in another type than their inputs have.

Sources are paths in the PyTorch repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lightning_memprec.memory.losses import KEEPS_WHOLE_STORAGE, elements_bytes, is_mean, is_reduced

__all__ = ["elementwise_allocations"]

_aten = torch.ops.aten
_Rule = Callable[..., Iterable[int]]
_FLOAT32_BYTES = 4


def elementwise_allocations() -> dict[OpOverload, _Rule]:
    """Return rules as in :mod:`~lightning_memprec.memory.cpu_temporaries`, by operator."""
    rules: dict[OpOverload, _Rule] = {
        _aten.mean.default: _mean,
        _aten.mean.dim: _mean,
        _aten.where.self: lambda condition, first, second: _promoted(first, second, extra=condition),
        **{func: _loss(func) for func in _LOSSES},
        _aten.scatter_add_.default: _scatter,
        _aten.scatter_reduce_.two: _scatter,
        _aten.scatter_add.default: lambda data, *rest, **kwargs: _scatter(data, made=True),
        _aten.scatter_reduce.two: lambda data, *rest, **kwargs: _scatter(data, made=True),
    }
    for name in ("add", "sub", "mul", "div"):
        rules[getattr(_aten, name).Tensor] = _promoted
        rules[getattr(_aten, f"{name}_").Tensor] = _promoted_in_place
    return rules


# -- different types: `TensorIteratorBase::compute_types` in aten/src/ATen/TensorIterator.cpp -------------


def _copies(first: Any, second: Any) -> int:
    """Bytes of the copies of those inputs that are of another type than is computed in."""
    tensors = [each for each in (first, second) if isinstance(each, Tensor)]
    common = torch.result_type(first, second)
    return sum(each.numel() * common.itemsize for each in tensors if each.dtype != common)


def _promoted(
    first: Any, second: Any, *rest: Any, extra: Tensor | None = None, **kwargs: Any
) -> Iterable[int]:
    copies = _copies(first, second)
    if copies:
        shapes = [each.shape for each in (first, second, extra) if isinstance(each, Tensor)]
        whole: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        yield copies + whole.numel() * torch.result_type(first, second).itemsize


def _promoted_in_place(first: Tensor, second: Any, *rest: Any, **kwargs: Any) -> Iterable[int]:
    common = torch.result_type(first, second)
    # The result is computed in a tensor of its own where it is of another type.
    yield _copies(first, second) + (first.numel() * common.itemsize if first.dtype != common else 0)


# -- means: `mean_kernel_impl` in aten/src/ATen/native/ReduceOps.cpp ------------------------------------


def _float_copy_bytes(dtype: torch.dtype, count: int) -> int:
    """Bytes of the float32 copy that the mean of half-precision numbers is taken of."""
    return count * _FLOAT32_BYTES if dtype in (torch.bfloat16, torch.float16) else 0


def _mean(data: Tensor, *rest: Any, **kwargs: Any) -> Iterable[int]:
    yield _float_copy_bytes(data.dtype, data.numel())


# -- sums at indices: `create_acc_buffer` in aten/src/ATen/native/cpu/ScatterGatherKernel.cpp ----------


def _scatter(data: Tensor, *rest: Any, made: bool = False, **kwargs: Any) -> Iterable[int]:
    copy = _float_copy_bytes(data.dtype, data.numel())
    # Beside the output, where the operator makes one.
    yield copy + (data.numel() * data.itemsize if copy and made else 0)


# -- losses: aten/src/ATen/native/BinaryOps.cpp, Loss.cpp -----------------------------------------------

_LOSSES = (
    _aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default, _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
)  # fmt: skip


def _loss(func: OpOverload) -> _Rule:
    def rule(*args: Any, **kwargs: Any) -> Iterable[int]:
        if not is_reduced(func, args, kwargs):
            return
        elements = elements_bytes(args)
        # All elements before they are reduced, beside an output that is as large where it is shrunk afterwards.
        # `binary_cross_entropy` computes them in its output.
        shrunk = func in KEEPS_WHOLE_STORAGE and func is not _aten.binary_cross_entropy.default
        dtype = torch.result_type(args[0], args[1])
        copy = _float_copy_bytes(dtype, elements // dtype.itemsize) if is_mean(func, args, kwargs) else 0
        yield elements * (2 if shrunk else 1) + copy

    return rule
