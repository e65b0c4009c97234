"""A small LightningModule whose methods a test replaces, and a real Trainer for it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

__all__ = ["BATCH", "DEVICES", "HIDDEN", "IN", "OUT", "Module", "X", "module_with", "run_for_real"]

DEVICES = ["cpu", "cuda"]
IN, HIDDEN, OUT, BATCH = 8, 512, 4, 64
X = torch.randn(BATCH, IN)


class Module(pl.LightningModule):
    """A small network whose step a test replaces."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def module_with(**methods: Any) -> pl.LightningModule:
    """Return a module of a new class with these methods, and ``__init__`` parts under ``build``."""
    build = methods.pop("build", None)

    def __init__(self):
        Module.__init__(self)
        if build is not None:
            build(self)

    return type("User", (Module,), {"__init__": __init__, **methods})()


def run_for_real(module, batch, steps=2, **arguments):
    loader = DataLoader([batch] * steps, batch_size=None)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, **arguments,
            )  # fmt: skip
            trainer.fit(module, loader)
    finally:
        logger.setLevel(level)
    return trainer
