"""One rank of two-process runs; writes what each ended with to a file. Started by ``test_ranks.py``.

The first part ends in a run that kills its own process; the second part resumes it in a new one.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_memprec import MemoryPreflight, PostTrainingQuantization
from tests.integration.runs import (
    WATCHING,
    counted,
    find,
    fit,
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


def killer(step):
    """A callback that ends its process at once, with one batch of an epoch trained after the last checkpoint."""
    import lightning.pytorch as pl

    class Killer(pl.Callback):
        def on_before_optimizer_step(self, trainer, *args):
            if trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

    return Killer()


def run(folder, rank, callbacks, ckpt=None):
    return fit(
        folder,
        callbacks,
        module=module(rank),
        ckpt=ckpt,
        strategy="ddp",
        devices=2,
        use_distributed_sampler=False,
        ranks={"rank": rank, "ranks": 2},
    )


def ended(trainer):
    return {**left_behind(trainer), "generators": None}


def first_part(folder, rank):
    every = make_callbacks(folder / "plain")
    plain = run(folder / "plain", rank, [each for each in every if not isinstance(each, WATCHING)])
    trainer = run(folder / "watched", rank, make_callbacks(folder / "watched"))
    found = {
        "plain": ended(plain),
        "watched": ended(trainer),
        "counted": counted(trainer),
        "path": str(find(trainer, PostTrainingQuantization).path),
        "peak": find(trainer, MemoryPreflight).estimate.peak_allocated_bytes,
    }
    torch.save(found, folder / f"rank{rank}.pt")
    run(folder / "broken", rank, [*make_callbacks(folder / "broken"), killer(5)])


def second_part(folder, rank):
    last = last_checkpoint(folder / "broken")
    trainer = run(folder / "broken", rank, make_callbacks(folder / "broken"), last)
    found = {"resumed": ended(trainer), "counted": counted(trainer), "from": last.stem}
    torch.save(found, folder / f"resumed{rank}.pt")


def main(part, folder, rank):
    warnings.simplefilter("ignore")
    {"first": first_part, "second": second_part}[part](Path(folder), int(rank))


if __name__ == "__main__":
    main(*sys.argv[1:])
