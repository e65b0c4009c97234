"""One rank of a two-process FP16 run; writes what happened to a file. Started by the rank tests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from callbacks.runs import make_trainer
from callbacks.scaler_runs import NAN, fused, hearing, loader, make_module, make_plugin

from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor
from lightning_memprec.scaling.survey import Survey


def sharded_norm(rank: int) -> list[float]:
    """Take the norm of gradients of which rank 0 holds the 3 and rank 1 the 4, then of rank 1's alone."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0 + rank])
    empty = torch.nn.Parameter(torch.zeros(0))
    alone = [parameter] if rank == 1 else [empty]
    surveys = [Survey(part, group=dist.group.WORLD, sharded=True) for part in ([parameter], alone)]
    return [survey.read(lambda _: "").grad_norm for survey in surveys]


def main(folder: str) -> None:
    monitor = GradScalerMonitor(every_n_steps=1, on_collapse="stop")
    trainer = make_trainer(
        monitor,
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
        plugins=[make_plugin(init_scale=2.0**-18)],
    )
    # Only losses of rank 1 are NaN, from the third batch on.
    bad = NAN if os.environ.get("LOCAL_RANK") == "1" else 1.0
    module = make_module(optimizer=fused)
    found: dict[str, object] = {}
    module.on_train_end = lambda: found.update(norms=sharded_norm(trainer.global_rank))
    with hearing() as said:
        trainer.fit(module, loader([1.0, 1.0] + [bad] * 8))
    found.update(
        events=[[event.kind, event.step] for event in monitor.events],
        points=[
            [point.scale, point.skipped, str(point.grad_norm)] for point in monitor.health.history.points
        ],
        steps=trainer.global_step,
        printed=[text for _, text in said if "GradScalerMonitor" in text],
    )
    Path(folder, f"rank{trainer.global_rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
