"""Train a small network, export it as int8 when training ends, and load it again. CPU, some seconds.

The data are the 1,797 handwritten digits that ship with scikit-learn.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import PostTrainingQuantization, load_quantized


class Digits(pl.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * width, width), nn.ReLU(), nn.Linear(width, 10),
        )  # fmt: skip
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy.update(self(images), labels)
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def load_data() -> tuple[DataLoader, DataLoader]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).div(16).reshape(-1, 1, 8, 8)[order]
    y = torch.tensor(labels)[order]
    train, val = TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])
    return DataLoader(train, batch_size=96, shuffle=True), DataLoader(val, batch_size=357)


def main(folder: str | Path, epochs: int = 5) -> PostTrainingQuantization:
    pl.seed_everything(0)
    train, val = load_data()
    checkpoint = pl.callbacks.ModelCheckpoint(folder, monitor="val_acc", mode="max")
    # At most one point of accuracy may be lost, else nothing is exported.
    quantization = PostTrainingQuantization(monitor="val_acc", max_degradation=0.01, degradation="absolute")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[checkpoint, quantization],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), train, val)

    print(quantization.report)
    before, after = quantization.metrics_before["val_acc"], quantization.metrics_after["val_acc"]
    print(f"\naccuracy {before:.4f} in FP32, {after:.4f} in int8, written to {quantization.path}")
    module = load_quantized(quantization.path, Digits).eval()
    images, labels = next(iter(val))
    with torch.no_grad():
        right = (module(images).argmax(1) == labels).float().mean()
    print(f"the file, loaded again, has {right:.4f} of the images right")
    return quantization


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(directory)
