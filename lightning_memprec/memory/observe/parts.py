"""Bytes of what can be told apart by walking tensors: weights, buffers, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memprec.memory.optimizers import state_tensors

__all__ = ["measure_parts"]


def measure_parts(
    module: nn.Module, optimizers: Iterable[Any], device: torch.device, granularity_bytes: int = 1
) -> dict[str, int]:
    """Measure the parts of a model that lie on a device, each storage once.

    Only shapes are read, so nothing waits for the device. FP32 masters, which an optimizer steps in the place of
    the module's parameters, count as optimizer states, as in an estimate.

    Args:
        module: The model.
        optimizers: Its optimizers.
        device: Count what lies on devices of this type.
        granularity_bytes: Every storage is rounded up to a multiple of it.

    Returns:
        Bytes by the names of an estimate's breakdown: ``"parameters"``, ``"buffers"``, ``"gradients"``,
        ``"optimizer states"``.

    Example:
        >>> linear = nn.Linear(4, 4, bias=False)
        >>> measure_parts(linear, [torch.optim.Adam(linear.parameters())], torch.device("cpu"))["parameters"]
        64
    """
    optimizers = list(optimizers)
    parameters = list(module.parameters())
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    groups: dict[str, Iterator[Tensor]] = {
        "parameters": iter(parameters),
        "buffers": module.buffers(),
        "gradients": (p.grad for p in (*parameters, *held) if p.grad is not None),
        "optimizer states": iter([*held, *(tensor for o in optimizers for _, tensor in state_tensors(o))]),
    }
    seen: set[int] = set()
    return {
        name: sum(_rounded(size, granularity_bytes) for size in _new_storages(tensors, device, seen))
        for name, tensors in groups.items()
    }


def _new_storages(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> Iterator[int]:
    """Yield the sizes of storages on the device that were not seen before."""
    for tensor in chain.from_iterable(map(_plain_tensors, tensors)):
        if tensor.device.type != device.type or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.nbytes()


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield what a tensor is made of: a rank's shard of a DTensor, codes and scales of a quantized one."""
    if not is_traceable_wrapper_subclass(tensor):
        if not is_lazy(tensor):  # Has no shape yet.
            yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain_tensors(getattr(tensor, name))


def _rounded(size_bytes: int, granularity_bytes: int) -> int:
    return -(-size_bytes // granularity_bytes) * granularity_bytes
