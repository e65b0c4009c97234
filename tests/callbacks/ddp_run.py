"""One rank of a two-process run; writes what happened to a file. Started by ``test_ranks.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from lightning_memprec._errors import MemoryOverflowError
from lightning_memprec.callbacks import MemoryPreflight

sys.path.insert(0, str(Path(__file__).parents[1]))

from callbacks.runs import loader, make_module, make_trainer


def main(case: str, folder: str) -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    # Only rank 1 lacks memory, or only rank 1 cannot be traced: both ranks must act alike.
    budgets = {"one": ("1GiB", "1KiB"), "fault": ("1KiB", "1KiB")}
    module = make_module()
    if case == "fault" and rank == 1:

        def training_step(batch, batch_idx):
            loss = module.net(batch[0]).sum()
            return loss if loss.item() else None

        module.training_step = training_step
    callback = MemoryPreflight(device_memory=budgets[case][rank], remedies=False)
    torch.manual_seed(1)
    trainer = make_trainer(callback, strategy="ddp", devices=2)
    outcome = "trained"
    try:
        trainer.fit(module, loader(shuffle=True))
    except MemoryOverflowError as error:
        outcome = f"refused {error.capacity_bytes}"
    status = callback.verdict.status
    Path(folder, f"rank{trainer.global_rank}").write_text(f"{outcome} {status} {trainer.global_step}")


if __name__ == "__main__":
    main(*sys.argv[1:])
