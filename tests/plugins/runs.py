"""Tiny runs with master weights, and the plain loops they are compared with."""

from __future__ import annotations

import copy
import importlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec.plugins import MasterWeightPrecision

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
DTYPES = {"bf16-master": torch.bfloat16, "16-master": torch.float16}


def data(batches=4, size=4):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(batches * size, 6, generator=generator)
    return x, torch.randn(batches * size, 2, generator=generator)


def loader(batches=4, size=4):
    return DataLoader(TensorDataset(*data(batches, size)), batch_size=size)


def net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def make_module(network=None, optimizer=adamw, name="lightning.pytorch", **hooks):
    """Build a regression module; ``hooks`` replace or add methods."""
    pl = importlib.import_module(name)

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net() if network is None else network
            self.losses = []

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.losses.append(loss.detach().clone())
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return optimizer(self.parameters())

    for hook, function in hooks.items():
        setattr(Regression, hook, function)
    return Regression()


def make_trainer(plugin=None, name="lightning.pytorch", **options):
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
    plugins = [plugin, *options.pop("plugins", [])] if plugin is not None else []
    return importlib.import_module(name).Trainer(plugins=plugins, **options)


def fit(module, precision="bf16-master", plugin=None, train=None, **options):
    plugin = plugin or MasterWeightPrecision(precision)
    trainer = make_trainer(plugin, **options)
    trainer.fit(module, train or loader())
    return trainer


class Reference:
    """Master weights written out: a half network, FP32 copies, and an optimizer on those.

    Args:
        network: FP32 network; it is copied.
        optimizer: Called with the masters.
        dtype: Dtype of the half network.
        scale: Fixed loss scale.
    """

    def __init__(self, network, optimizer=adamw, dtype=torch.bfloat16, scale=1.0):
        self.masters = copy.deepcopy(network)
        self.half = copy.deepcopy(network).to(dtype)
        self.dtype, self.scale = dtype, scale
        self.optimizer = optimizer(self.masters.parameters())

    def loss(self, batch):
        x, y = (t.to(self.dtype) for t in batch)
        return nn.functional.mse_loss(self.half(x), y)

    def backward(self, loss):
        (loss * self.scale).backward()
        for half, master in zip(self.half.parameters(), self.masters.parameters(), strict=True):
            if half.grad is not None:
                gradient = half.grad.float() / self.scale
                master.grad = gradient if master.grad is None else master.grad + gradient
                half.grad = None

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.round()

    def round(self):
        with torch.no_grad():
            for half, master in zip(self.half.parameters(), self.masters.parameters(), strict=True):
                half.copy_(master)

    def fit(self, batches, accumulate=1, clip=None):
        losses = []
        for index, batch in enumerate(batches):
            loss = self.loss(batch)
            losses.append(loss.detach().clone())
            self.backward(loss / accumulate)
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    clip(self.masters.parameters())
                self.step()
        return losses


def same(left, right):
    """Tell whether two state dicts or lists of tensors agree bit for bit, dtypes included."""
    left = list(left.values()) if isinstance(left, dict) else list(left)
    right = list(right.values()) if isinstance(right, dict) else list(right)
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu()) for a, b in zip(left, right, strict=True)
    )
