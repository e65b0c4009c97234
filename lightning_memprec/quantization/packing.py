"""Integers of 2 to 4 bits, packed without gaps.

The layout is that of ``pack-quantized`` in compressed-tensors (``compressors/pack_quantized/helpers.py``,
https://github.com/vllm-project/compressed-tensors): an integer is raised by ``2^(bits-1)`` so that it is not negative,
and the integer in column ``i`` of a row takes the bits from ``i * bits`` on, in little-endian int32 words. Rows begin
with a word of their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["MOST_BITS", "is_packed", "pack", "unpack", "words"]

MOST_BITS = 4  # 5 to 7 bits would save little and cost as much to unpack; they stay in int8.

_TOGETHER = 8  # As many integers fill whole bytes, `bits` of them, whatever their width.
# How many are spread over as many bytes when they are unpacked, and the word in which that is done.
_CONTAINERS = {2: (4, torch.int32), 3: (8, torch.int64), 4: (2, torch.int16)}


def is_packed(bits: int) -> bool:
    """Tell whether integers of a width are packed."""
    return bits <= MOST_BITS


def words(columns: int, bits: int) -> int:
    """Return how many words a row takes.

    Args:
        columns: Integers in the row.
        bits: Their width.

    Example:
        >>> words(64, 4), words(65, 4), words(10, 3)
        (8, 9, 1)
    """
    return -(-columns * bits // 32)


def pack(integers: Tensor, bits: int) -> Tensor:
    """Pack rows of integers.

    Args:
        integers: int8 ``[R, K]``, from ``-2^(bits-1)`` to ``2^(bits-1) - 1``.
        bits: Their width, 2 to 4.

    Returns:
        int32 ``[R, words(K, bits)]``.

    Example:
        >>> hex(pack(torch.tensor([[-8, -7, 7]], dtype=torch.int8), 4).item())
        '0xf10'
    """
    rows, columns = integers.shape
    raised = (integers + 2 ** (bits - 1)).view(torch.uint8)
    raised = F.pad(raised, (0, -columns % _TOGETHER)).reshape(rows, -(-columns // _TOGETHER), _TOGETHER)
    joined = torch.zeros(raised.shape[:2], dtype=torch.int32, device=integers.device)
    for place in range(_TOGETHER):
        joined |= raised[..., place].int() << (place * bits)
    octets = joined[..., None].view(torch.uint8)[..., :bits].flatten(1)
    octets = octets[:, : 4 * words(columns, bits)]  # The bytes of columns that are only padding.
    octets = F.pad(
        octets, (0, -octets.shape[1] % 4)
    ).flatten()  # Flat, because a view of no columns is refused.
    return octets.view(torch.int32).reshape(rows, words(columns, bits))


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Undo :func:`pack`.

    Args:
        packed: int32 ``[*, words(K, bits)]``.
        bits: Width of the integers, 2 to 4.
        columns: K.

    Returns:
        int8 ``[*, K]``.
    """
    *outer, width = packed.shape
    octets = packed.reshape(-1).view(torch.uint8).reshape(math.prod(outer), 4 * width)
    together, container = _CONTAINERS[bits]
    if bits == 3:
        octets = F.pad(octets, (0, -octets.shape[1] % 3)).reshape(len(octets), -(-octets.shape[1] // 3), 3)
        joined = F.pad(octets, (0, together - 3)).view(container).flatten(1)
    else:
        joined = octets.to(container)
    # Move the upper half of the integers up to where it belongs, then the upper half of each half, and so on: a few
    # passes over whole words, where taking them out one by one would write with gaps.
    half = together // 2
    while half:
        joined.bitwise_or_(joined << (half * (8 - bits))).bitwise_and_(_mask(half, bits, together))
        half //= 2
    return joined.view(torch.int8).sub_(2 ** (bits - 1))[:, :columns].reshape(*outer, columns)


def _mask(half: int, bits: int, together: int) -> int:
    """Return ones for ``half`` integers in every ``half`` bytes of a word of ``together`` bytes."""
    ones: int = 2 ** (half * bits) - 1
    return sum(ones << (8 * half * place) for place in range(together // half))
