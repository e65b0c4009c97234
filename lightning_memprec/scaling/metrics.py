"""The figures of a step as loggers take them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_memprec.scaling.health import ScalerHealth
    from lightning_memprec.scaling.record import StepRecord

__all__ = ["metrics_of"]

_PREFIX = "memprec/grad_scaler/"


def metrics_of(record: StepRecord, health: ScalerHealth) -> dict[str, float]:
    """Return a step's figures by logged key; what is unknown is left out.

    Args:
        record: The step.
        health: The run's health, which has taken the step in.
    """
    totals = health.totals
    own = {
        "grad_norm": record.grad_norm,
        "param_norm_max": record.param_norm,
        "loss_is_finite": None if record.loss is None else float(math.isfinite(record.loss)),
    }
    shared = {
        "scale": record.scale,
        "skipped_count": None if record.scale is None else float(sum(totals.skipped.values())),
        "skip_rate_fraction": None if record.scale is None else health.skip_rate,
        "growth_count": None if record.scale is None else float(totals.growths),
        "batch_idx": float(record.batch_idx),
        "event_count": float(len(health.events)),
    }
    several = len(totals.steps) > 1
    if several and record.scale is not None:
        own["skipped_count"] = float(totals.skipped[record.optimizer])
    folder = f"optimizer_{record.optimizer}/" if several else ""
    named = {**shared, **{f"{folder}{name}": value for name, value in own.items()}}
    return {f"{_PREFIX}{name}": value for name, value in named.items() if value is not None}
