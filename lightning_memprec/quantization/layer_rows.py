"""The rows of the report: what became of each layer, and how many bytes it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memprec.quantization.affine import Quantized, dequantize_matrix
from lightning_memprec.quantization.measure import Comparison
from lightning_memprec.quantization.methods import Solution
from lightning_memprec.quantization.report import LayerRow
from lightning_memprec.quantization.targets import Skipped, Target

__all__ = ["held_bytes", "layer_rows"]


def layer_rows(
    module: nn.Module,
    targets: list[Target],
    skipped: list[Skipped],
    solution: Solution,
    replacements: Mapping[str, nn.Module],
    comparison: Comparison | None,
    *,
    learned: bool = False,
) -> list[LayerRow]:
    """Describe each layer.

    Args:
        module: The float model.
        targets: What is quantized.
        skipped: What is left.
        solution: The integers, and notes on some layers.
        replacements: The int8 layers.
        comparison: What the calibration batches showed, or ``None`` without any.
        learned: Whether the method learned from these batches, so that it matters which of them reached a layer.

    Returns:
        Rows in the order of the model.
    """
    before: set[int] = set()
    after: set[int] = set()
    rows = {}
    for target in targets:
        columns = usage = unusable = None
        if comparison is not None:
            statistics = comparison.statistics
            columns = None if statistics is None else statistics.count(target.name)
            usage = comparison.usage(target.name) if learned else None
            unusable = comparison.unusable(target.name)
        rows[target.name] = LayerRow(
            name=target.name,
            kind=type(target.module).__name__,
            scheme=str(target.scheme),
            sqnr_db=_sqnr(target, solution[target.name]),
            output_error=None if comparison is None else comparison.error(target.name),
            bytes_before=held_bytes(target.module, before),
            bytes_after=held_bytes(replacements[target.name], after),
            outlier_columns=columns,
            note="; ".join(filter(None, [solution.notes.get(target.name), usage, unusable])) or None,
        )
    for left in skipped:
        rows[left.name] = LayerRow(
            name=left.name,
            kind=type(left.module).__name__,
            bytes_before=held_bytes(left.module, before),
            bytes_after=held_bytes(left.module, after),
            reason=left.reason,
        )
    return [rows[name] for name, _ in module.named_modules() if name in rows]


def _sqnr(target: Target, quantized: Mapping[str, Quantized]) -> float:
    signal = noise = 0.0
    for key, read in target.weights.items():
        matrix, (values, scale, zero_point) = read().float(), quantized[key]
        difference = matrix - dequantize_matrix(values, scale, zero_point, target.scheme.group_size)
        signal += float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
        noise += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


def held_bytes(module: nn.Module, counted: set[int] | None = None) -> int:
    """Return the bytes of a module's parameters and buffers.

    Args:
        module: The module; storages that are shared count once.
        counted: Storages that have counted already; those of this module are added.
    """
    counted = set() if counted is None else counted
    total = 0
    for tensor in _tensors(module):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted or not storage.data_ptr():
            counted.add(storage.data_ptr())
            total += tensor.numel() * tensor.element_size()
    return total


def _tensors(module: nn.Module) -> list[Tensor]:
    # A lazy layer has no size yet.
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_lazy(tensor)]
