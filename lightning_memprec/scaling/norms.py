"""Norms of many tensors in few kernels, without waiting for the device."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["first_non_finite", "optimizer_parameters", "tensor_norms", "total_norm"]


def optimizer_parameters(optimizer: Any) -> list[Tensor]:
    """Return an optimizer's parameters in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, in FP32, on the device of the first.

    Of a sharded tensor only this rank's part is counted. FP16 and bf16 are summed in FP32.

    Args:
        tensors: Dense or sparse floating-point tensors; at least one.

    Returns:
        Norms, float32, shape ``(len(tensors),)``.
    """
    local = [_local(tensor) for tensor in tensors]
    device = local[0].device
    if all(tensor.dtype == torch.float32 and tensor.device == device for tensor in local):
        with torch.no_grad():
            return torch.stack(torch._foreach_norm(local, 2))
    return _mixed_norms(local)


def _mixed_norms(local: Sequence[Tensor]) -> Tensor:
    """Return the norms of tensors of several dtypes and devices, in their order."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, tensor in enumerate(local):
        groups[tensor.device, tensor.dtype].append(index)
    norms: list[Tensor] = list(local)
    with torch.no_grad():
        for (device, dtype), indices in groups.items():
            # Squares of FP16 overflow in FP16.
            options = {"dtype": torch.float32} if dtype.itemsize < 4 else {}
            found = torch._foreach_norm([local[index] for index in indices], 2, **options)
            for index, norm in zip(indices, found, strict=True):
                same = device == local[0].device and dtype != torch.float64
                norms[index] = norm if same else norm.to(local[0].device, torch.float32)
        return torch.stack(norms)


def _local(tensor: Tensor) -> Tensor:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_sparse:
        return tensor
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # A DTensor.
        tensor = tensor.to_local()
    # Duplicate indices must be summed before squares are taken.
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def total_norm(norms: Iterable[float]) -> float:
    """Return the L2 norm of all tensors together from the norms of each.

    Example:
        >>> total_norm([3.0, 4.0])
        5.0
    """
    return math.hypot(*norms)


def first_non_finite(norms: Sequence[float]) -> int | None:
    """Return the index of the first norm that is inf or NaN, ``None`` if all are finite.

    Example:
        >>> first_non_finite([1.0, float("nan"), float("inf")])
        1
    """
    return next((index for index, norm in enumerate(norms) if not math.isfinite(norm)), None)
