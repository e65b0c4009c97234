"""Time of a plan for an 8B Llama: 40 cells of batch, sequence, recipe and number of devices.

Run: ``python -m benchmarks.plan_speed`` (a minute or two). Beside it the same cells one after the other, each by an
``estimate_memory`` of its own that shares nothing, extrapolated from a sample of them.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace

import torch

from benchmarks._machine import describe_machine
from benchmarks.trace_speed import _loss, _model
from lightning_memprec._units import GIB
from lightning_memprec.memory.estimate import estimate_plan
from lightning_memprec.memory.plan import TrainingPlan
from lightning_memprec.memory.planning import PlanAxes, plan_cells, with_recipe

_LAYERS = 32
_AXES = PlanAxes(
    batches=(1, 2, 4, 8, 16),
    sequences=(2048, 8192),
    recipes=("bf16-true", "bf16-true+checkpointing"),
    device_counts=(1, 8),
)
_SAMPLE = ((1, 2048, 1), (1, 8192, 8))


def _plan(batch: int, sequence: int) -> TrainingPlan:
    with torch.device("meta"):
        model = _model(_LAYERS)
    return TrainingPlan(
        module=model,
        batch=torch.zeros(batch, sequence, dtype=torch.int64, device="meta"),
        optimizer=torch.optim.AdamW,
        loss=_loss,
        device="H100-80GB",
    )


def _alone(batch: int, sequence: int, count: int) -> float:
    start = time.perf_counter()
    plan = with_recipe(_plan(batch, sequence), _AXES.recipes[0])
    estimate_plan(replace(plan, num_devices=count, strategy="fsdp" if count > 1 else "auto"))
    return time.perf_counter() - start


def main() -> None:
    warnings.simplefilter("ignore")
    print(describe_machine())
    start = time.perf_counter()
    cells = plan_cells(_plan(1, 2048), _AXES, largest_bytes=80 * GIB)
    seconds = time.perf_counter() - start
    bases = [cell.basis for cell in cells]
    alone = [_alone(*sample) for sample in _SAMPLE]
    expected = sum(alone) / len(alone) * len(cells)
    print(f"{len(cells)} cells on {os.cpu_count()} cores: {seconds:.1f} s")
    print(f"  traced {bases.count('traced')}, implied by a smaller batch {bases.count('implied')}")
    print(f"  one after the other, each for itself: {expected:.0f} s, from {len(alone)} of them")
    print(f"  ratio {expected / seconds:.1f}")


if __name__ == "__main__":
    main()
