"""Tiny runs with a validation, for the tests of quantization after ``fit``."""

from __future__ import annotations

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .runs import make_trainer, namespace


def data(count=48, seed=7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def loader(count=48, seed=7, **options):
    return DataLoader(TensorDataset(*data(count, seed)), batch_size=8, **options)


def make_module(name="lightning.pytorch", **hooks):
    """Build a small classifier that logs a torchmetric and a mean; ``hooks`` replace or add methods."""
    pl = namespace(name)

    class Classifier(pl.LightningModule):
        def __init__(self, width=16):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 2))
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            logits = self(x)
            self.accuracy.update(logits, y)
            self.log("val_acc", self.accuracy)
            self.log("val_loss", nn.functional.cross_entropy(logits, y))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    for hook, function in hooks.items():
        setattr(Classifier, hook, function)
    return Classifier()


def checkpoint(folder, name="lightning.pytorch", **options):
    options = {"monitor": "val_loss", "mode": "min", "dirpath": folder, **options}
    return namespace(name).callbacks.ModelCheckpoint(**options)


def fit(module, *callbacks, name="lightning.pytorch", train=None, val=None, seed=1, **options):
    # Checkpoint callbacks that were given count; none is made by default.
    given = any(type(callback).__name__ == "ModelCheckpoint" for callback in callbacks)
    torch.manual_seed(seed)
    trainer = make_trainer(
        *callbacks, name=name, **{"enable_checkpointing": given, "max_epochs": 2, **options}
    )
    trainer.fit(module, train or loader(shuffle=True), val or loader(seed=8))
    return trainer
