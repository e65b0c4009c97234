"""``quantize_``: replace a model's layers by int8 ones, in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memprec.quantization.affine import Granularity, Quantized, dequantize, spread
from lightning_memprec.quantization.affine import Mapping as RangeMapping
from lightning_memprec.quantization.measure import Comparison, call, run_batches
from lightning_memprec.quantization.methods import Method, Solution, resolve
from lightning_memprec.quantization.modules.base import Activations, Scheme
from lightning_memprec.quantization.modules.linear import Int8Linear
from lightning_memprec.quantization.outliers import OutlierStatistics
from lightning_memprec.quantization.report import LayerRow, QuantizationReport
from lightning_memprec.quantization.swapping import swap
from lightning_memprec.quantization.targets import Skipped, Target, find_targets

__all__ = ["quantize_"]

_Weights = Mapping[str, Mapping[str, Quantized]]


def quantize_(
    module: nn.Module,
    method: str = "weight_only",
    *,
    bits: int | None = None,
    weight_granularity: Granularity | None = None,
    mapping: RangeMapping | None = None,
    activations: Activations | None = None,
    outlier_threshold: float | None = None,
    group_size: int | None = None,
    exact_outliers: bool | None = None,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    calibration: Iterable[Any] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> QuantizationReport:
    """Replace the layers of a model by int8 ones, in place.

    Linear layers, convolutions, embeddings, GPT-2's ``Conv1D``, ``nn.MultiheadAttention`` and recurrent layers are
    quantized; what stays in floating point is named in the report with the reason. Tied weights stay tied. If a
    weight cannot be quantized, nothing is changed.

    Args:
        module: The model. A copy (``copy.deepcopy``) keeps the float model.
        method: ``"weight_only"``, ``"absmax"``, ``"zeropoint"``, ``"vectorwise"``, ``"llm_int8"``, one of those that
            learn from calibration data (``"layer_wise"``, ``"gptq"``, ``"obq"``), or one that was registered. Each is a
            preset of the following.
        bits: Width of the weights, 2 to 8.
        weight_granularity: One scale for each ``"tensor"``, ``"channel"`` or ``"group"``.
        mapping: ``"symmetric"``, ``"affine"`` or ``"affine_textbook"``.
        activations: ``"float"``, or int8 with one scale for each ``"tensor"`` or ``"token"``.
        outlier_threshold: Input features that reach it stay in floating point.
        group_size: Weights of a channel that share a scale; implies ``"group"``.
        exact_outliers: Keep the float weight of input features that reach the threshold in the calibration batches;
            these always multiply in floating point, with their exact weights. By default if there are a threshold
            and batches. A layer in which that would save no memory keeps none.
        include: Names, patterns of names (``"encoder.*"``) or class names to quantize; ``None`` for all.
        exclude: The same, to leave in floating point.
        calibration: Batches for the report's output errors and outliers, and for methods that learn from data.
        forward: Runs one batch, ``forward(module, batch)``; by default the module is called with it, a mapping
            becoming keywords and a tuple arguments.

    Returns:
        A row for each layer, and totals.

    Raises:
        ValueError: If an argument is out of range, a pattern matches nothing, or a weight holds a NaN or an infinity.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> report = quantize_(model)
        >>> report.bytes_before, report.bytes_after
        (18720, 5184)
    """
    overrides = {
        "bits": bits,
        "weight_granularity": weight_granularity,
        "mapping": mapping,
        "activations": activations,
        "outlier_threshold": outlier_threshold,
        "group_size": group_size,
    }
    chosen = resolve(method, overrides)
    if chosen.needs_calibration and calibration is None:
        raise ValueError(f"The method {method!r} learns from data. Give batches with `calibration`.")
    can_keep = calibration is not None and chosen.scheme.outlier_threshold is not None
    if exact_outliers and not can_keep:
        raise ValueError(
            "`exact_outliers` needs an outlier threshold, and batches to find the outliers in."
            " Use the method 'llm_int8' and give `calibration`."
        )
    run = forward or call
    batches = None if calibration is None else list(calibration)
    targets, skipped = find_targets(module, chosen.scheme, include, exclude)
    # Inference tensors could not be saved for a backward pass later.
    with torch.inference_mode(False), torch.no_grad():
        before = _bytes(module)
        weights = _solve(module, chosen, targets, batches, run)
        replacements = {target.name: target.build(dict(weights[target.name])) for target in targets}
        comparison = _compare(module, targets, replacements, chosen.scheme, batches, run)
        keeps = can_keep if exact_outliers is None else exact_outliers
        if comparison is not None and keeps and _keep_outliers(targets, replacements, comparison):
            comparison = _compare(module, targets, replacements, chosen.scheme, batches, run)
        rows = _rows(module, targets, skipped, weights, replacements, comparison)
        swap(module, {id(target.module): replacements[target.name] for target in targets})
    outliers = (
        None if comparison is None or comparison.statistics is None else comparison.statistics.to_dict()
    )
    return QuantizationReport(method, tuple(rows), before, _bytes(module), outliers)


def _solve(
    module: nn.Module,
    method: Method,
    targets: list[Target],
    batches: list[Any] | None,
    run: Callable[..., Any],
) -> _Weights:
    if method.solver is not None:
        return method.solver(module, targets, batches, run)
    return round_to_nearest(targets)


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


def _compare(
    module: nn.Module,
    targets: list[Target],
    replacements: Mapping[str, nn.Module],
    scheme: Scheme,
    batches: list[Any] | None,
    run: Callable[..., Any],
) -> Comparison | None:
    if batches is None:
        return None
    statistics = None if scheme.outlier_threshold is None else OutlierStatistics(scheme.outlier_threshold)
    watched = frozenset(name for name, layer in replacements.items() if isinstance(layer, Int8Linear))
    comparison = Comparison(statistics, watched)
    with ExitStack() as hooks:
        for target in targets:
            handle = comparison.attach(target.name, target.module, replacements[target.name])
            hooks.callback(handle.remove)
        run_batches(module, batches, run)
    for target in targets:
        replacements[target.name].train(target.module.training)
    return comparison


def _keep_outliers(
    targets: list[Target], replacements: Mapping[str, nn.Module], comparison: Comparison
) -> bool:
    """Give layers the float columns of their outliers; return whether any got some."""
    kept = False
    for target in targets:
        layer = replacements[target.name]
        if isinstance(layer, Int8Linear) and comparison.statistics is not None:
            columns, matrix = comparison.statistics.columns(target.name), target.weights["weight"]()
            # Inputs that were never normalized can be outliers throughout.
            added = len(columns) * matrix.shape[0] * matrix.element_size()
            if columns and added + matrix.numel() < matrix.numel() * matrix.element_size():
                layer.keep_columns(torch.tensor(columns), matrix)
                kept = True
    return kept


def _rows(
    module: nn.Module,
    targets: list[Target],
    skipped: list[Skipped],
    weights: _Weights,
    replacements: Mapping[str, nn.Module],
    comparison: Comparison | None,
) -> list[LayerRow]:
    before: set[int] = set()
    after: set[int] = set()
    rows = {}
    for target in targets:
        columns = None
        if comparison is not None and comparison.statistics is not None:
            columns = comparison.statistics.count(target.name)
        rows[target.name] = LayerRow(
            name=target.name,
            kind=type(target.module).__name__,
            scheme=str(target.scheme),
            sqnr_db=_sqnr(target, weights[target.name]),
            output_error=None if comparison is None else comparison.error(target.name),
            bytes_before=_bytes(target.module, before),
            bytes_after=_bytes(replacements[target.name], after),
            outlier_columns=columns,
            note=weights.notes.get(target.name) if isinstance(weights, Solution) else None,
        )
    for left in skipped:
        rows[left.name] = LayerRow(
            name=left.name,
            kind=type(left.module).__name__,
            bytes_before=_bytes(left.module, before),
            bytes_after=_bytes(left.module, after),
            reason=left.reason,
        )
    return [rows[name] for name, _ in module.named_modules() if name in rows]


def _sqnr(target: Target, quantized: Mapping[str, Quantized]) -> float:
    signal = noise = 0.0
    for key, read in target.weights.items():
        matrix, (values, scale, zero_point) = read().float(), quantized[key]
        size = target.scheme.group_size
        columns = matrix.shape[1]
        zero_points = None if zero_point is None else spread(zero_point, columns, size)
        difference = matrix - dequantize(values, spread(scale, columns, size), zero_points)
        signal += float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
        noise += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


def _bytes(module: nn.Module, counted: set[int] | None = None) -> int:
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
