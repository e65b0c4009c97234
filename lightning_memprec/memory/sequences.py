"""The length of token sequences in a batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lightning_memprec.memory.tree import map_tensors, tensors_in

__all__ = ["resequenced", "sequence_length_of"]


def sequence_length_of(batch: Any) -> int | None:
    """Return the second dimension of a batch's token ids; ``None`` if it holds no matrix of integers.

    Example:
        >>> sequence_length_of({"input_ids": torch.zeros(4, 128, dtype=torch.int64)})
        128
    """
    lengths = Counter(
        tensor.shape[1]
        for tensor in tensors_in(batch)
        if tensor.ndim == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool
    )
    return lengths.most_common(1)[0][0] if lengths else None


def resequenced(batch: Any, length: int, wanted: int) -> Any:
    """Cut, or repeat, what is as long as a batch's sequences.

    Args:
        batch: Tree of tensors, which stay as they are.
        length: The length of its sequences.
        wanted: The new length.
    """

    def resize(tensor: Tensor) -> Tensor:
        for axis in range(1, tensor.ndim):  # A mask of attention has the length twice.
            if tensor.shape[axis] == length:
                repeats = [1] * tensor.ndim
                repeats[axis] = -(-wanted // length)
                tensor = tensor.repeat(*repeats).narrow(axis, 0, wanted)
        return tensor

    return map_tensors(resize, batch)
