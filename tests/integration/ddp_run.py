"""One rank of two-process runs; writes what each ended with to a file. Started by ``test_ranks.py``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_memprec import MemoryPreflight, PostTrainingQuantization
from tests.integration.runs import (
    WATCHING,
    Killed,
    counted,
    find,
    fit,
    killer,
    last_checkpoint,
    left_behind,
    make_callbacks,
    make_module,
)


def module(rank):
    def on_train_batch_start(self, batch, batch_idx):
        # A checkpoint holds the generators of rank zero alone.
        torch.manual_seed(100 * self.global_step + self.global_rank)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x).float(), y)
        # One rank alone overflows; both must skip the step.
        return loss * 1e6 if self.global_step in (1, 3) and self.global_rank == 1 else loss

    made = make_module(
        on_train_batch_start=on_train_batch_start,
        training_step=training_step,
        on_save_checkpoint=lambda *_: None,
        on_load_checkpoint=lambda *_: None,
    )
    with torch.no_grad():
        made.net[0].weight += rank  # Rank zero's weights count.
    return made


def main(folder, rank):
    warnings.simplefilter("ignore")
    folder, found = Path(folder), {}

    def run(case, callbacks, ckpt=None):
        trainer = fit(
            folder / case,
            callbacks,
            module=module(int(rank)),
            ckpt=ckpt,
            strategy="ddp",
            devices=2,
            use_distributed_sampler=False,
            ranks={"rank": int(rank), "ranks": 2},
        )
        found["resumed" if ckpt else case] = {**left_behind(trainer), "generators": None}
        return trainer

    every = make_callbacks(folder / "plain")
    run("plain", [each for each in every if not isinstance(each, WATCHING)])
    trainer = run("watched", make_callbacks(folder / "watched"))
    found["counted"] = counted(trainer)
    found["path"] = str(find(trainer, PostTrainingQuantization).path)
    found["peak"] = find(trainer, MemoryPreflight).estimate.peak_allocated_bytes
    try:
        run(
            "broken",
            [*make_callbacks(folder / "broken"), killer("lightning.pytorch", "on_before_optimizer_step", 5)],
        )
    except Killed:
        trainer = run("broken", make_callbacks(folder / "broken"), last_checkpoint(folder / "broken"))
        found["counted again"] = counted(trainer)
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
