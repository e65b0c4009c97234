"""``quantize_``: replace a model's layers by int8 ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_memprec.quantization.affine import Granularity
from lightning_memprec.quantization.affine import Mapping as RangeMapping
from lightning_memprec.quantization.batch_norm import (
    BatchNorm,
    batch_norm_moments,
    check_batch_norm,
    folded_batch_norm,
    retune_batch_norm_,
)
from lightning_memprec.quantization.layer_rows import held_bytes, layer_rows
from lightning_memprec.quantization.measure import Comparison, call, run_batches
from lightning_memprec.quantization.methods import Method, Solution, resolve
from lightning_memprec.quantization.modules.base import Activations
from lightning_memprec.quantization.modules.linear import Int8Linear
from lightning_memprec.quantization.outliers import OutlierStatistics
from lightning_memprec.quantization.padding import Mask, MaskedForward
from lightning_memprec.quantization.progress import Progress
from lightning_memprec.quantization.report import QuantizationReport
from lightning_memprec.quantization.rounding import round_to_nearest
from lightning_memprec.quantization.smoothing import check_smoothing, smoothed
from lightning_memprec.quantization.static_inputs import with_static_inputs
from lightning_memprec.quantization.swapping import build_layers, swap
from lightning_memprec.quantization.targets import Target, find_targets

__all__ = ["quantize_"]


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
    mask: Mask | None = None,
    method_options: Mapping[str, Any] | None = None,
    batch_norm: BatchNorm = "keep",
    smoothing: float | None = None,
) -> QuantizationReport:
    """Replace the layers of a model by int8 ones, in place.

    Linear layers, convolutions, embeddings, GPT-2's ``Conv1D``, ``nn.MultiheadAttention`` and recurrent layers are
    quantized; what stays in floating point is named in the report with the reason. Tied weights stay tied. If a
    weight cannot be quantized, nothing is changed.

    Args:
        module: The model. A copy (``copy.deepcopy``) keeps the float model.
        method: ``"weight_only"``, ``"absmax"``, ``"zeropoint"``, ``"vectorwise"``, ``"llm_int8"``, one of those that
            learn from calibration data (``"layer_wise"``, ``"gptq"``, ``"obq"``, ``"adaquant"``, ``"zeroquant"``,
            ``"brecq"``), or one that was registered. Each is a preset of the following.
        bits: Width of the weights, 2 to 8.
        weight_granularity: One scale for each ``"tensor"``, ``"channel"`` or ``"group"``.
        mapping: ``"symmetric"``, ``"affine"`` or ``"affine_textbook"``.
        activations: ``"float"``, or int8 with one scale for each ``"tensor"`` or ``"token"``, or a ``"static"`` one
            from calibration data, so that nothing has to be measured at run time.
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
        mask: Key of the batches, or function of a batch, for ones where there are tokens and zeros where there is
            padding, ``[batch, tokens]``: padding is neither learned from nor measured. By default
            ``"attention_mask"`` where a batch has it.
        method_options: Options of a method that learns, such as ``{"act_order": True}``; see its class.
        batch_norm: ``"fold"`` lets convolutions take over the factors of the batch norms behind them before they are
            quantized; ``"retune"`` shifts the running statistics of batch norms as quantization shifts what enters
            them; ``"keep"`` leaves them. See :mod:`lightning_memprec.quantization.batch_norm`.
        smoothing: Move what one static scale cannot hold from the inputs of linear layers into their weights, where
            the layer before can take the factors; by this strength, 0 to 1. SmoothQuant begins with 0.5; massive
            activations want more, such as 0.8. See :mod:`lightning_memprec.quantization.smoothing`.

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
    chosen = resolve(method, overrides, method_options)
    if chosen.needs_calibration and calibration is None:
        what = (
            "Static activations need"
            if chosen.scheme.activations == "static"
            else f"The method {method!r} learns from"
        )
        raise ValueError(f"{what} data. Give batches with `calibration`.")
    can_keep = calibration is not None and chosen.scheme.outlier_threshold is not None
    if exact_outliers and not can_keep:
        raise ValueError(
            "`exact_outliers` needs an outlier threshold, and batches to find the outliers in."
            " Use the method 'llm_int8' and give `calibration`."
        )
    if smoothing is not None:
        check_smoothing(smoothing, chosen.scheme)
    run = MaskedForward(forward or call, mask)
    batches = None if calibration is None else list(calibration)
    check_batch_norm(batch_norm, batches)
    targets, skipped = find_targets(module, chosen.scheme, include, exclude)
    # Inference tensors could not be saved for a backward pass later.
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as undone_if_it_fails:
        if batch_norm == "fold":
            skipped = skipped + undone_if_it_fails.enter_context(folded_batch_norm(module))
        before = held_bytes(module)
        notes: dict[str, str] = {}
        if smoothing is not None:
            notes = undone_if_it_fails.enter_context(smoothed(module, targets, batches or [], run, smoothing))
        targets, solution = _solve(module, chosen, targets, batches, run, notes)
        replacements = build_layers(targets, solution)
        comparison = _compare(module, targets, replacements, chosen, batches, run)
        keeps = can_keep if exact_outliers is None else exact_outliers
        if comparison is not None and keeps and _keep_outliers(targets, replacements, comparison):
            comparison = _compare(module, targets, replacements, chosen, batches, run)
        rows = layer_rows(
            module, targets, skipped, solution, replacements, comparison, learned=chosen.solver is not None
        )
        moments = batch_norm_moments(module, batches or [], run) if batch_norm == "retune" else {}
        swap(module, {id(target.module): replacements[target.name] for target in targets})
        if moments:
            retune_batch_norm_(module, moments, batches or [], run)
    outliers = (
        None if comparison is None or comparison.statistics is None else comparison.statistics.to_dict()
    )
    return QuantizationReport(method, tuple(rows), before, held_bytes(module), outliers)


def _solve(
    module: nn.Module,
    method: Method,
    targets: list[Target],
    batches: list[Any] | None,
    run: Callable[..., Any],
    notes: dict[str, str],
) -> tuple[list[Target], Solution]:
    if method.scheme.activations == "static":
        targets, unreached = with_static_inputs(module, targets, batches or [], run)
        notes = notes | unreached
    weights = (
        round_to_nearest(targets) if method.solver is None else method.solver(module, targets, batches, run)
    )
    solution = weights if isinstance(weights, Solution) else Solution(weights, {})
    for name, note in notes.items():
        solution.notes[name] = "; ".join(filter(None, [solution.notes.get(name), note]))
    return solution.complete(targets), solution


def _compare(
    module: nn.Module,
    targets: list[Target],
    replacements: Mapping[str, nn.Module],
    method: Method,
    batches: list[Any] | None,
    run: MaskedForward,
) -> Comparison | None:
    if batches is None:
        return None
    threshold = method.scheme.outlier_threshold
    statistics = None if threshold is None else OutlierStatistics(threshold)
    watched = frozenset(name for name, layer in replacements.items() if isinstance(layer, Int8Linear))
    comparison = Comparison(run, statistics, watched)
    with ExitStack() as hooks, Progress(len(batches)) as progress:
        for target in targets:
            handle = comparison.attach(target.name, target.module, replacements[target.name])
            hooks.callback(handle.remove)

        def measure(module: nn.Module, batch: Any) -> None:
            progress.step("calibration batches measured")
            comparison.batches += 1
            run(module, batch)

        run_batches(module, batches, measure)
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
            added, kept_now = len(columns) * matrix.shape[0] * matrix.element_size(), layer.stored()
            if columns and added + kept_now.nbytes < matrix.nbytes:
                layer.keep_columns(torch.tensor(columns), matrix)
                kept = True
    return kept
