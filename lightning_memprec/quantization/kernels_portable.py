"""The product for every scheme and device: a block of the weight is dequantized and multiplied at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_memprec.quantization.kernels_base import Operand

__all__ = ["blocks", "portable"]

# 4 MiB of FP32: two such blocks stay in the second-level cache of current CPUs.
_BLOCK_ELEMENTS = 2**20


def blocks(layer: Operand) -> Iterator[tuple[int, int]]:
    """Yield ranges of output channels whose FP32 weights fit into the cache together."""
    channels, features = layer.matrix_shape
    step = max(1, _BLOCK_ELEMENTS // max(1, features))
    for start in range(0, channels, step):
        yield start, min(start + step, channels)


def portable(values: Tensor, layer: Operand) -> Tensor:
    """Multiply with the weight, a block of output channels dequantized at a time.

    Args:
        values: Floating point ``[tokens, features]``, already rounded to int8's grid where activations are quantized.
        layer: The int8 weight.

    Returns:
        ``[tokens, channels]`` in the dtype of ``values``.
    """
    product = values.new_empty(values.shape[0], layer.matrix_shape[0])
    scale = layer.channel_scale()
    if (
        scale is None or values.dtype == torch.float16
    ):  # Products of bare integers could pass float16's 65504.
        for start, stop in blocks(layer):
            torch.mm(
                values, layer.dequantize_rows(start, stop).to(values.dtype).t(), out=product[:, start:stop]
            )
        return product
    # Scaling the product instead of the weight, and using one buffer, takes half the time for a single token.
    buffer = values.new_empty(0)
    for start, stop in blocks(layer):
        if start == 0:
            buffer = values.new_empty(stop, values.shape[1])
        block = buffer[: stop - start].copy_(layer.integers(start, stop))
        torch.mm(values, block.t(), out=product[:, start:stop])
    return product.mul_(scale)
