"""Tiny Lightning runs that the callback tests share."""

from __future__ import annotations

import importlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
BATCH = 8


def namespace(name="lightning.pytorch"):
    return importlib.import_module(name)


class Noisy(Dataset):
    """A map-style dataset with every kind of hidden state: own generators, a counter, a cache."""

    def __init__(self, length=32):
        self.x = torch.linspace(-1, 1, length * 6).reshape(length, 6)
        self.numpy = np.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(4)
        self.calls = 0
        self.seen = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.calls += 1
        self.seen.append(index)
        noise = torch.rand(6, generator=self.torch) + float(self.numpy.random()) + torch.rand(()) + self.calls
        return self.x[index] + noise + float(np.random.rand()), index % 3


class Stream(IterableDataset):
    """Counts how often it is opened."""

    def __init__(self):
        self.opened = 0

    def __iter__(self):
        self.opened += 1
        for index in range(2 * BATCH):
            yield torch.full((6,), float(index)), index % 3


def loader(dataset=None, **options):
    dataset = Noisy() if dataset is None else dataset
    return DataLoader(dataset, batch_size=BATCH, **options)


def make_module(name="lightning.pytorch", **hooks):
    """Build a small classifier in a namespace; ``hooks`` replace or add methods."""
    pl = namespace(name)

    class Classifier(pl.LightningModule):
        def __init__(self, width=64):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.5), nn.ReLU(), nn.Linear(width, 3))

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    for hook, function in hooks.items():
        setattr(Classifier, hook, function)
    return Classifier()


def make_watch(name="lightning.pytorch"):
    """Build a callback that keeps every loss and every batch."""
    pl = namespace(name)

    class Watch(pl.Callback):
        def __init__(self):
            self.losses, self.batches = [], []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.losses.append(outputs["loss"].clone())
            self.batches.append(batch[0].clone())

    return Watch()


def make_trainer(*callbacks, name="lightning.pytorch", **options):
    options = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return namespace(name).Trainer(callbacks=list(callbacks), **options)
