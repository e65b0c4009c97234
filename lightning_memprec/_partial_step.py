"""Stepping an optimizer for some of its parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["chunks", "is_separable", "only"]

T = TypeVar("T")

# Each was compared bit for bit with its step over all parameters at once (`tests/plugins/test_low_memory.py`).
_SEPARABLE = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip

# A chunk holds at most this share of all elements, or one parameter: 4 bytes of FP32 gradient and, with
# `foreach`, 4 of temporaries, times 1/32, are 0.25 bytes a parameter.
_CHUNKS = 32


def is_separable(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer is known to treat every parameter on its own.

    Subclasses do not count: what they change is unknown. Optimizers that couple parameters (LBFGS) or count
    steps per group (schedule-free ones) would break silently.
    """
    return type(optimizer) in {getattr(torch.optim, name, None) for name in _SEPARABLE}


def chunks(items: Sequence[T], numel: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide parameters into chunks, the largest last: by then the others' gradients are gone.

    Args:
        items: Parameters, or what stands for them.
        numel: Tells the number of elements of one.
    """
    limit = sum(numel(item) for item in items) / _CHUNKS
    chunk: list[T] = []
    size = 0
    for item in sorted(items, key=numel):
        if chunk and size + numel(item) > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += numel(item)
    if chunk:
        yield chunk


@contextmanager
def only(optimizer: Optimizer, chosen: Sequence[Tensor]) -> Iterator[None]:
    """Let an optimizer see some of its parameters only."""
    everything = [group["params"] for group in optimizer.param_groups]
    wanted = {id(parameter) for parameter in chosen}
    try:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, everything, strict=True):
            group["params"] = parameters
