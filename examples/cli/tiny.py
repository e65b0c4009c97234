"""A small classifier and its data, for the configurations beside this file."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TinyClassifier(pl.LightningModule):
    """A multilayer perceptron.

    Args:
        width: Width of the hidden layers.
        layers: Number of hidden layers.
        classes: Number of classes.
    """

    def __init__(self, width: int = 256, layers: int = 4, classes: int = 10) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), *blocks, nn.Linear(width, classes))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TinyData(pl.LightningDataModule):
    """Random images of 64 pixels.

    Args:
        batch_size: Images in a batch.
    """

    def __init__(self, batch_size: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images = torch.randn(640, 64)
        labels = images[:, :10].argmax(1)  # The brightest of ten pixels: there is something to learn.
        self.dataset = TensorDataset(images[:512], labels[:512])
        self.validation = TensorDataset(images[512:], labels[512:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=self.batch_size)
