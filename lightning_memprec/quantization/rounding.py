"""Quantize weights without looking at data."""

from __future__ import annotations

import torch

from lightning_memprec.quantization.affine import Quantized
from lightning_memprec.quantization.targets import Target

__all__ = ["round_to_nearest"]


def round_to_nearest(targets: list[Target]) -> dict[str, dict[str, Quantized]]:
    """Quantize the weights of targets without looking at data; a weight that several layers share only once.

    Args:
        targets: What to quantize.

    Raises:
        ValueError: If a weight cannot be quantized; the message names the layer.
    """
    seen: dict[tuple[int, torch.Size], Quantized] = {}
    weights: dict[str, dict[str, Quantized]] = {}
    for target in targets:
        weights[target.name] = {}
        parameters = dict(target.module.named_parameters())
        for key, read in target.weights.items():
            matrix = read()
            # With the shape, because GPT-2's Conv1D reads the same parameter transposed.
            identity = (id(parameters.get(key, matrix)), matrix.shape)
            try:
                quantized = seen.get(identity) or target.scheme.quantize(matrix)
            except ValueError as error:
                raise ValueError(f"`{target.name}.{key}` cannot be quantized: {error}") from None
            weights[target.name][key] = quantized
            if key in parameters:
                seen[identity] = quantized
    return weights
