"""Train, inspect the checkpoint, and ship its weights in bfloat16; some seconds on a CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import MasterWeightPrecision, export_weights, inspect_checkpoint


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(folder: Path) -> None:
    inputs = torch.randn(256, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=32)
    plain = {"precision": "bf16-true"}, "plain.ckpt"
    masters = {"plugins": [MasterWeightPrecision("bf16-master")]}, "masters.ckpt"
    for options, name in (plain, masters):
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, **options
        )
        trainer.fit(Regression(), data)
        trainer.save_checkpoint(folder / name)
        print(f"{name}: {inspect_checkpoint(folder / name).verdict}")

    result = export_weights(folder / "masters.ckpt", folder / "release", "bfloat16", strip_prefix="model.")
    loaded = network().bfloat16()
    load_model(loaded, result.files[0])
    print(f"{result.files[0].name}: {result.tensors} tensors, {result.total_bytes} bytes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
