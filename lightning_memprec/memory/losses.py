"""What losses allocate inside, and what their results keep alive. Sources are paths in the PyTorch repository."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["COMPOSED", "KEEPS_WHOLE_STORAGE", "elements_bytes", "is_mean", "is_reduced", "with_whole_storage"]

_aten = torch.ops.aten
_MEAN = 1  # at::Reduction in ATen/core/Reduction.h: none, mean, sum.
_REDUCTION = {
    _aten.mse_loss.default: 2, _aten.smooth_l1_loss.default: 2, _aten.huber_loss.default: 2,
    _aten.soft_margin_loss.default: 2, _aten.binary_cross_entropy.default: 3,
}  # fmt: skip

# Their output is made for every element and then shrunk to one number, which leaves the storage as it is: the loss
# keeps it alive. `TORCH_META_FUNC(mse_loss)` in aten/src/ATen/native/BinaryOps.cpp, `binary_cross_entropy_out_cpu` in
# Loss.cpp, `binary_cross_entropy_out_cuda` in cuda/Loss.cu. The kernels for meta tensors make one number at once.
KEEPS_WHOLE_STORAGE = frozenset(
    {_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.binary_cross_entropy.default}
)

# Operators of the same smaller operators on every device, which the kernel for meta tensors does not show
# (`CompositeExplicitAutograd` in aten/src/ATen/native/native_functions.yaml).
COMPOSED = ("aten::binary_cross_entropy_with_logits", "aten::_safe_softmax")


def _reduction(func: OpOverload, args: Any, kwargs: Any) -> int:
    index = _REDUCTION[func]
    return int(args[index] if len(args) > index else kwargs.get("reduction", _MEAN))


def is_reduced(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return whether a loss is one number.

    Args:
        func: Operator of the loss.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    return _reduction(func, args, kwargs) != 0


def is_mean(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return whether a loss is a mean; arguments as for :func:`is_reduced`."""
    return _reduction(func, args, kwargs) == _MEAN


def _shape(args: Any) -> torch.Size:
    return torch.Size(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]


def elements_bytes(args: Any) -> int:
    """Return the bytes of a loss of every element of input and target.

    Args:
        args: Positional arguments of the loss, input and target first.
    """
    return _shape(args).numel() * torch.result_type(args[0], args[1]).itemsize


def with_whole_storage(out: Tensor, args: Any) -> Tensor:
    """Return a loss on the storage that its kernel made for all elements.

    Args:
        out: What the kernel for meta tensors returned.
        args: Positional arguments of the loss, input and target first.
    """
    whole = torch.empty(_shape(args), dtype=out.dtype, device=out.device)
    return whole if whole.shape == out.shape else whole.resize_(out.shape)
