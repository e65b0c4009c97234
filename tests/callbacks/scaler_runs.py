"""Tiny FP16 runs whose overflows are known beforehand.

The loss is the output times an amplitude that comes with the batch, so the scaled gradient that flows into the
FP16 layer is exactly amplitude times scale: it overflows where that reaches 65520, and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import logging

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor

from .runs import make_trainer, namespace

NAN, INF = float("nan"), float("inf")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-6)


def fused(parameters):
    return torch.optim.SGD(parameters, lr=1e-6, fused=True)


def make_module(name="lightning.pytorch", optimizer=sgd, manual=None, schedule=False, **hooks):
    """Build the module; ``manual(self, loss, batch_idx)`` takes the step in manual optimization."""
    pl = namespace(name)

    class Amplified(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)
            self.automatic_optimization = manual is None

        def loss(self, batch):
            x, amplitude = batch
            return (self.second(self.first(x)).float() * amplitude).sum()

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            if manual is not None:
                manual(self, loss, batch_idx)
                return None
            return loss

        def configure_optimizers(self):
            made = optimizer(self.parameters())
            if not schedule:
                return made
            scheduler = torch.optim.lr_scheduler.StepLR(made, step_size=1, gamma=0.5)
            return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    for hook, function in hooks.items():
        setattr(Amplified, hook, function)
    torch.manual_seed(0)
    module = Amplified()
    with torch.no_grad():
        # Identity: gradients are the amplitude everywhere, and both layers overflow together.
        for layer in (module.first, module.second):
            layer.weight.copy_(torch.eye(2))
            layer.bias.zero_()
    return module


def loader(amplitudes):
    amplitudes = torch.tensor([float(value) for value in amplitudes])
    return DataLoader(TensorDataset(torch.ones(len(amplitudes), 2), amplitudes), batch_size=1)


def make_plugin(name="lightning.pytorch", precision="16-mixed", **scaler):
    plugins = importlib.import_module(f"{name}.plugins")
    scaler = torch.amp.GradScaler("cpu", **scaler) if precision == "16-mixed" else None
    return plugins.MixedPrecision(precision, "cpu", scaler)


def run(amplitudes, monitor=None, module=None, name="lightning.pytorch", plugin=None, ckpt=None, **options):
    """Fit over the amplitudes, one batch each; return the monitor and the Trainer."""
    monitor = GradScalerMonitor(every_n_steps=1) if monitor is None else monitor
    module = make_module(name) if module is None else module
    plugin = make_plugin(name) if plugin is None else plugin
    trainer = make_trainer(monitor, name=name, plugins=[plugin], **options)
    trainer.fit(module, loader(amplitudes), ckpt_path=ckpt)
    return monitor, trainer


@contextlib.contextmanager
def hearing(name="lightning.pytorch"):
    """Collect what is said through a namespace's own logger, as (level, text), whoever else listens."""
    said = []

    class Keep(logging.Handler):
        def emit(self, record):
            said.append((record.levelname, record.getMessage()))

    logger, keep = logging.getLogger(name), Keep()
    level = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)


@contextlib.contextmanager
def warned():
    """Expect the monitor to print a warning."""
    with hearing() as said:
        yield said
    assert any(
        level == "WARNING" and text.startswith("[warning] GradScalerMonitor, step") for level, text in said
    )


def one_line(text):
    """Undo the wrapping of what was said."""
    return " ".join(text.split())


def kinds(monitor):
    return [event.kind for event in monitor.events]
