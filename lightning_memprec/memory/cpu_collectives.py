"""What gloo, the process group of CPU runs, allocates and frees inside one collective.

Told from the allocator's events of two and four ranks with torch 2.14. An all-reduce and a broadcast work in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["cpu_collective_allocations"]


def _first(target: Tensor, source: Any, *rest: Any, **kwargs: Any) -> Iterable[int]:
    yield target.numel() * target.element_size()


def _second(target: Any, source: Tensor, *rest: Any, **kwargs: Any) -> Iterable[int]:
    yield source.numel() * source.element_size()


def _listed(targets: list[list[Tensor]], *rest: Any, **kwargs: Any) -> Iterable[int]:
    yield sum(tensor.numel() * tensor.element_size() for tensor in targets[0])


def cpu_collective_allocations() -> dict[OpOverload, Callable[..., Iterable[int]]]:
    """Return sizes of temporaries, in bytes, by collective: gathered and scattered tensors are copied whole."""
    if not torch.distributed.is_available():
        return {}
    c10d = torch.ops.c10d
    return {
        c10d._allgather_base_.default: _first,
        c10d.allgather_.default: _listed,
        c10d._reduce_scatter_base_.default: _second,
    }
