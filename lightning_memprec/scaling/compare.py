"""``compare_precisions``: the same few steps in each precision, from the same weights and on the same data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_memprec._isolation import unchanged
from lightning_memprec.scaling.capabilities import Capabilities, detect_capabilities
from lightning_memprec.scaling.comparison import REFERENCE, ModeResult, PrecisionComparison
from lightning_memprec.scaling.recipe import Recipe
from lightning_memprec.scaling.short_run import MODES, RunRecord, initial_loss, short_run

__all__ = ["compare_precisions"]

# Mixed precisions first: with FP32 weights they are the safer of the fast ones.
_PREFERENCE = ("bf16-mixed", "16-mixed", "bf16-master", "16-master")
# DeepSeek-V3 (arXiv 2412.19437, section 3.3) takes a relative loss error below 0.25 % as "well within the
# acceptable range of training randomness" of a low-precision run against its reference.
_FLOOR = 0.0025
# A precision that does not learn at all must not pass because ten steps change little.
_FLOOR_OF_FALL = 0.1


def compare_precisions(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    modes: Sequence[str] = tuple(MODES),
    steps: int = 10,
    reorderings: int = 3,
    seed: int = 0,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
    capabilities: Capabilities | None = None,
) -> PrecisionComparison:
    """Train a few steps in each precision and say which one to take.

    Every run starts from a copy of the module, sees the same batches in the same order and starts each step from
    the same seed. The module itself, its gradients, buffers and flags, and the random generators of the CPU and
    of CUDA are afterwards bit for bit what they were.

    The rule: take the first of bf16-mixed, 16-mixed, bf16-master, 16-master that matrix units of the device
    compute and whose final loss is not above that of FP32 by more than the tolerance; else FP32. The tolerance is
    what FP32 does to itself: the largest change of its final loss when the order of the batches and the seed
    change, but at least 0.25 % (DeepSeek-V3, arXiv 2412.19437, calls that "well within the acceptable range of
    training randomness") or, if that is less, a tenth of what FP32 gained in these steps.

    Args:
        module: Module in FP32 on the device that is to run the steps.
        batches: Batches; they are repeated if they are fewer than ``steps``. Give different ones: with a single
            batch the order cannot change anything.
        optimizer: Callable from parameters to an optimizer. Default: the module's ``configure_optimizers``.
        loss: Callable ``(module, batch) -> scalar tensor``. Default: ``training_step``.
        modes: Precisions to compare with FP32.
        steps: Optimizer steps of each run.
        reorderings: Further FP32 runs that measure what FP32 does to itself.
        seed: Seed of the runs.
        gradient_clip_val: Threshold of gradient clipping.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        capabilities: Device to judge for. Default: the device that holds the module.

    Returns:
        The comparison.

    Raises:
        ValueError: If an argument is out of range, or the module needs more than a plain loop.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(4, 1)
        >>> data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
        >>> comparison = compare_precisions(
        ...     net,
        ...     data,
        ...     optimizer=torch.optim.Adam,
        ...     loss=lambda module, batch: torch.nn.functional.mse_loss(module(batch[0]), batch[1]),
        ...     modes=["bf16-mixed"],
        ...     steps=3,
        ... )
        >>> [result.precision for result in comparison.results]
        ['32-true', 'bf16-mixed']
    """
    data = list(batches)
    _check(module, data, modes, steps, reorderings, gradient_clip_algorithm)
    recipe = Recipe(module, optimizer, loss, gradient_clip_val, gradient_clip_algorithm)
    device = next(module.parameters()).device
    trainers = [t for m in module.modules() if (t := getattr(m, "_trainer", None)) is not None]
    with unchanged(*module.modules(), optimizer, loss, skip=trainers), torch.enable_grad():
        data = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, data)
        feed = [data[step % len(data)] for step in range(steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real run gives the user's own warnings, once
            modes = tuple(dict.fromkeys([REFERENCE, *modes]))
            records = {mode: short_run(recipe, feed, mode, seed=seed) for mode in modes}
            others = [
                short_run(recipe, feed, REFERENCE, seed=seed, order=n).final_loss
                for n in range(1, reorderings + 1)
            ]
            initial = initial_loss(recipe, feed, seed=seed)
    tolerance = _Tolerance.measure(initial, records[REFERENCE].final_loss, others)
    return _judge(records, tolerance, capabilities or detect_capabilities(device), device)


def _check(
    module: nn.Module, data: list[Any], modes: Sequence[str], steps: int, reorderings: int, algorithm: str
) -> None:
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ValueError(f"`modes` must be among {', '.join(MODES)}, got {unknown}.")
    for name, value, least in (("steps", steps, 1), ("reorderings", reorderings, 0)):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    if algorithm not in ("norm", "value"):
        raise ValueError(f"`gradient_clip_algorithm` must be 'norm' or 'value', got {algorithm!r}.")
    if not data:
        raise ValueError("`batches` is empty. Give at least one batch.")
    parameters = list(module.parameters())
    if not any(p.requires_grad for p in parameters):
        raise ValueError("The module has no trainable parameter, so there is nothing to compare.")
    other = {str(p.dtype) for p in parameters if p.is_floating_point()} - {"torch.float32"}
    if other:
        raise ValueError(
            f"The comparison starts from FP32 weights, got {', '.join(sorted(other))}. Pass `module.float()`, "
            "or better the weights before they were rounded."
        )


@dataclass(frozen=True)
class _Tolerance:
    """What counts as no gap; all figures relative to the final loss of FP32."""

    fall: float
    spread: float
    runs: int

    @classmethod
    def measure(cls, initial: float, reference: float, others: Sequence[float]) -> _Tolerance:
        spread = max((abs(_relative(other, reference)) for other in others), default=0.0)
        return cls(_relative(initial, reference), spread, len(others))

    @property
    def value(self) -> float:
        return max(self.spread, min(_FLOOR, _FLOOR_OF_FALL * self.fall) if self.fall > 0 else _FLOOR)

    def __str__(self) -> str:
        """Say what is tolerated, and what decided it."""
        changed = "with another order of the batches and another seed"
        if self.runs and self.spread >= self.value:
            text = f"The tolerance is {self.value:.3%}: FP32's own final loss moved by that much {changed}."
        else:
            decided = "" if self.value == _FLOOR else ", a tenth of what FP32 gained in these steps"
            text = f"The tolerance is {self.value:.3%}{decided}."
            if self.runs:
                text += f" FP32's own final loss moved by {self.spread:.3%} {changed}."
        if not self.value < self.fall:
            text += " FP32 gained less than the tolerance, so these steps tell little: take more of them."
        return text


def _judge(
    records: Mapping[str, RunRecord], tolerance: _Tolerance, capabilities: Capabilities, device: torch.device
) -> PrecisionComparison:
    reference = records[REFERENCE]
    fast = {torch.bfloat16: capabilities.fast_bf16, torch.float16: capabilities.fast_fp16}
    results = []
    for precision, record in records.items():
        gap = _relative(record.final_loss, reference.final_loss)
        results.append(
            ModeResult(
                precision=precision,
                final_gap=gap,
                mean_gap=_relative(math.fsum(record.losses), math.fsum(reference.losses)),
                fast=fast.get(MODES[precision].dtype or torch.float32, False),
                within_tolerance=gap <= tolerance.value,  # False for NaN
                **asdict(record),
            )
        )
    good = {r.precision for r in results if r.fast and r.within_tolerance}
    return PrecisionComparison(
        results=tuple(results),
        recommended=next((mode for mode in _PREFERENCE if mode in good), REFERENCE),
        rule=_rule(results, tolerance),
        tolerance=tolerance.value,
        reference_spread=tolerance.spread,
        steps=len(reference.losses),
        ran_on=str(device),
        judged_for=capabilities.device,
    )


def _relative(value: float, reference: float) -> float:
    return (value - reference) / (abs(reference) or 1.0)


def _rule(results: Sequence[ModeResult], tolerance: _Tolerance) -> str:
    if not math.isfinite(results[0].final_loss):
        return "FP32 itself did not stay finite: mend the learning rate or the data first."
    text = (
        f"The first of {', '.join(_PREFERENCE)} is taken that matrix units of the device compute and whose gap is "
        f"within the tolerance, else {REFERENCE}. {tolerance}"
    )
    slow = [r.precision for r in results if not r.fast and r.precision != REFERENCE]
    return f"{text} No matrix units here for {', '.join(slow)}." if slow else text
