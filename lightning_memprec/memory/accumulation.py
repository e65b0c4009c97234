"""Sums of gradients, which autograd adds up in place where nobody else holds them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["sums_in_place"]

_ADD = torch.ops.aten.add.Tensor
# The tensor's own reference and that of the handle that is asked for the number.
_SOLE_STORAGE_REFERENCES = 2
# Of a tensor that C++ code alone passes on: the tuple of arguments, the local variable here, the call of
# `getrefcount`, and the dispatcher's. A variable of a Python function or a hook is one more at least.
_SOLE_PYTHON_REFERENCES = 4


def sums_in_place(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an addition is one of autograd's that would run in place without a dispatch mode.

    Where a tensor was used more than once, autograd sums its gradients, into the first one if that is dense and
    nothing else refers to it. Under any ``TorchDispatchMode`` it takes every tensor for a subclass and makes a new
    sum, which the real run does not. Source: ``accumulate`` and ``can_accumulate_inplace`` in
    torch/csrc/autograd/input_buffer.cpp.

    Args:
        func: Operator that is about to run.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if func is not _ADD or kwargs or len(args) != 2 or torch.is_grad_enabled():
        return False
    first: Tensor = args[0]
    return bool(
        isinstance(args[1], Tensor)
        and first.shape == args[1].shape
        and first.dtype is args[1].dtype
        and first.layout is torch.strided
        and torch._C._current_autograd_node() is not None
        and sys.getrefcount(first) <= _SOLE_PYTHON_REFERENCES
        and torch._C._storage_Use_Count(first.untyped_storage()._cdata) == _SOLE_STORAGE_REFERENCES  # type: ignore[attr-defined]
        and torch.ops.aten.is_non_overlapping_and_dense.default(first)
    )
