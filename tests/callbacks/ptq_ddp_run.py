"""All cases in one run of two processes; writes what each rank measured. Started by ``test_ptq_ranks.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_memprec.callbacks.post_training_quantization import PostTrainingQuantization

sys.path.insert(0, str(Path(__file__).parents[1]))

from callbacks.ptq_runs import checkpoint, fit, loader, make_module


def main(folder: str) -> None:
    limited = PostTrainingQuantization(
        dirpath=Path(folder, "out"), max_degradation=0.5, monitor="val_acc", mode="max"
    )
    # Low enough that the ranks, which see 10 samples each, find other outliers.
    split = PostTrainingQuantization(
        "llm_int8", dirpath=Path(folder, "split"), scheme={"outlier_threshold": 2.0}
    )
    faulty = PostTrainingQuantization(dirpath=Path(folder, "faulty"))
    if int(os.environ.get("LOCAL_RANK", 0)) == 1:
        faulty.submodule = "nothing"
    module = make_module()
    step = type(module).validation_step

    def validation_step(self, batch, batch_idx):
        step(self, batch, batch_idx)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        gathered = self.all_gather(torch.tensor(float(self.global_rank)))
        self.log("ranks", gathered.sum(), reduce_fx="max")

    type(module).validation_step = validation_step
    # 20 samples on 2 ranks: each validates 10 of them, in batches of 8 and 2.
    trainer = fit(
        module,
        limited,
        split,
        faulty,
        checkpoint(Path(folder, "ckpt")),
        strategy="ddp",
        devices=2,
        max_epochs=1,
        val=loader(20, seed=8),
    )
    torch.save(
        {
            "before": limited.metrics_before,
            "after": limited.metrics_after,
            "split": split.metrics_after,
            "columns": [row.outlier_columns for row in split.report.quantized],
            "paths": (str(limited.path), str(faulty.path)),
            "best": trainer.checkpoint_callback.best_model_path,
            "rank": (trainer.global_rank, rank_zero_only.rank),
            "state": dict(module.state_dict()),
        },
        Path(folder, f"rank{trainer.global_rank}.pt"),
    )


if __name__ == "__main__":
    main(sys.argv[1])
