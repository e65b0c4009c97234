"""A tensor that lies in a file, and the error for files that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memprec._errors import MemPrecError

__all__ = ["CheckpointError", "StoredTensor", "untie"]


class CheckpointError(MemPrecError, ValueError):
    """A checkpoint file is damaged, unsafe, or of a kind that cannot be read."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not yet read.

    Args:
        dtype: Element type in the file.
        shape: Shape.
        read: Reads the values from the file; shape and dtype as above, on the CPU.
        identity: Equal for names that share one tensor (tied weights); ``None`` where the file cannot tell.
    """

    dtype: torch.dtype
    shape: torch.Size
    read: Callable[[], Tensor]
    identity: Hashable | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the values in bytes."""
        return self.elements * self.dtype.itemsize


def untie(weights: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Separate names that share one tensor.

    Returns:
        The tensors, each under its first name, and the first name for each further one.
    """
    first: dict[object, str] = {}
    kept: dict[str, StoredTensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights.items():
        # Empty tensors share the position of whatever follows them in the file.
        identity = None if tensor.identity is None or not tensor.elements else (tensor.dtype, tensor.identity)
        owner = name if identity is None else first.setdefault(identity, name)
        if owner == name:
            kept[name] = tensor
        else:
            tied[name] = owner
    return kept, tied
