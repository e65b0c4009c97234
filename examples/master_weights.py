"""Train in bfloat16 with FP32 masters and open the checkpoint elsewhere: ``python examples/master_weights.py``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_memprec import MasterWeightPrecision


def main() -> None:
    """Train a few steps, save, and compare what the model computes in with what the file holds."""
    model = BoringModel()
    trainer = Trainer(
        plugins=[MasterWeightPrecision("bf16-master")],
        accelerator="cpu",
        max_steps=4,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.ckpt")
        trainer.save_checkpoint(path, weights_only=True)
        saved = torch.load(path, weights_only=True)["state_dict"]["layer.weight"]
    print(f"The model computes in {model.layer.weight.dtype}; the file holds {saved.dtype}.")
    moved = (saved != saved.bfloat16()).float().mean()
    print(f"{moved:.0%} of the saved weights have digits that bfloat16 does not.")


if __name__ == "__main__":
    main()
