"""Static activations: one scale for all inputs of a layer, from the extremes that calibration data shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memprec.quantization.activations import outlier_columns
from lightning_memprec.quantization.affine import choose_parameters
from lightning_memprec.quantization.measure import run_batches
from lightning_memprec.quantization.padding import without_padding
from lightning_memprec.quantization.targets import Target

__all__ = ["with_static_inputs"]


def with_static_inputs(
    model: nn.Module,
    targets: list[Target],
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
) -> tuple[list[Target], dict[str, str]]:
    """Give targets with static activations a scale for their inputs.

    The scale spans the smallest and the largest input of the float model; features that are outliers do not count.

    Args:
        model: The float model.
        targets: What will be quantized.
        batches: Calibration batches.
        forward: Runs one batch.

    Returns:
        The targets, and notes on those that no data reached: their scales are measured at run time.

    Raises:
        ValueError: If there are no batches, or one gives a layer a NaN or an infinity.
    """
    static = {target.name: target for target in targets if target.scheme.activations == "static"}
    ranges = _ranges(model, static, batches, forward)
    notes = dict.fromkeys(
        static.keys() - ranges.keys(),
        "no calibration data reached it, so its inputs' scale is measured at run time",
    )
    return [_with_range(target, ranges.get(target.name)) for target in targets], notes


def _with_range(target: Target, extremes: tuple[Tensor, Tensor] | None) -> Target:
    if target.scheme.activations != "static":
        return target
    if extremes is None:
        return replace(target, scheme=replace(target.scheme, activations="tensor"))
    return replace(target, inputs=choose_parameters(*extremes, mapping=target.scheme.mapping))


def _ranges(
    model: nn.Module,
    targets: dict[str, Target],
    batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Any],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the smallest and the largest input of each layer that the data reaches, FP32 ``[1]``."""
    ranges: dict[str, tuple[Tensor, Tensor]] = {}
    position = 0

    def observe(target: Target, values: Tensor) -> None:
        if not values.numel():
            return
        extremes = torch.stack(torch.aminmax(values.detach().float()))
        if not bool(extremes.isfinite().all()):
            raise ValueError(
                f"Calibration batch {position} gives `{target.name}` an input with NaN or infinite values."
                " Take such batches out."
            )
        threshold = target.scheme.outlier_threshold
        if threshold is not None and float(extremes.abs().max()) >= threshold:
            rows = values.detach().float().reshape(-1, values.shape[-1])
            extremes = torch.stack(torch.aminmax(rows.masked_fill(outlier_columns(rows, threshold), 0.0)))
        smallest, largest = extremes[:1], extremes[1:]
        if target.name in ranges:
            before = ranges[target.name]
            smallest, largest = torch.minimum(smallest, before[0]), torch.maximum(largest, before[1])
        ranges[target.name] = smallest, largest

    def run(module: nn.Module, batch: Any) -> None:
        nonlocal position
        forward(module, batch)
        position += 1

    with ExitStack() as hooks:
        for target in targets.values():
            # Bound here, because hooks are only told of the module.
            def listen(module: nn.Module, args: Any, kwargs: Any, target: Target = target) -> None:
                values = args[0] if args else next(iter(kwargs.values()))
                observe(target, without_padding(forward, module, values))

            handle = target.module.register_forward_pre_hook(listen, with_kwargs=True)
            hooks.callback(handle.remove)
        run_batches(model, batches, run)
    return ranges
