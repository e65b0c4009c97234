"""Tiny runs with every feature of the package in one Trainer."""

from __future__ import annotations

import csv
import importlib
import random
from pathlib import Path

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import (
    GradScalerMonitor,
    MasterWeightPrecision,
    MemoryMonitor,
    MemoryPreflight,
    OutOfMemoryReport,
    PostTrainingQuantization,
    StagnationMonitor,
)

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
WATCHING = (
    MemoryPreflight, MemoryMonitor, OutOfMemoryReport, GradScalerMonitor, StagnationMonitor, PostTrainingQuantization,
)  # fmt: skip
BATCHES = 6  # of one epoch


class ResumableSampler:
    """Shuffled batches of indices, the share of one rank, from where a checkpoint left off."""

    def __init__(self, count, batch_size, rank=0, ranks=1):
        self.count, self.batch_size, self.rank, self.ranks = count, batch_size, rank, ranks
        self.epoch = self.position = 0

    def __len__(self):
        return self.count // self.ranks // self.batch_size

    def __iter__(self):
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        batches = order[self.rank :: self.ranks].split(self.batch_size)
        while self.position < len(self):
            self.position += 1
            yield batches[self.position - 1].tolist()


class ResumableLoader(DataLoader):
    """A loader whose place in an epoch is saved with checkpoints."""

    def __init__(self, dataset, batch_size=4, **ranks):
        # Its own generator: beginning to iterate draws a seed, and that happens once more after a resume.
        sampler = ResumableSampler(len(dataset), batch_size, **ranks)
        super().__init__(dataset, batch_sampler=sampler, generator=torch.Generator())

    def state_dict(self):
        return {"epoch": self.batch_sampler.epoch, "position": self.batch_sampler.position}

    def load_state_dict(self, state):
        self.batch_sampler.epoch, self.batch_sampler.position = state["epoch"], state["position"]


def dataset(count=4 * BATCHES, seed=7, width=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def make_module(name="lightning.pytorch", overflow_at=(), width=16, depth=0, **hooks):
    """Build a classifier with dropout, a torchmetric and a schedule; FP16 overflows at some steps."""
    pl = importlib.import_module(name)

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            inner = [nn.Linear(width, width) for _ in range(depth)]
            self.net = nn.Sequential(
                nn.Linear(6, width), *inner, nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, 2)
            )
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x).float(), y)
            loss = loss + 1e-3 * (random.random() + float(np.random.rand()))
            self.log("loss", loss)
            self.steps = getattr(self, "steps", 0) + 1
            return loss * 1e6 if self.steps in overflow_at else loss

        def validation_step(self, batch, batch_idx):
            x, y = batch
            logits = self.net(x).float()
            self.accuracy.update(logits, y)
            self.log("val_acc", self.accuracy)
            self.log("val_loss", nn.functional.cross_entropy(logits, y))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_save_checkpoint(self, checkpoint):
            checkpoint["user"] = {
                "steps": getattr(self, "steps", 0),
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": np.random.get_state()[1].tolist(),
                "numpy_position": np.random.get_state()[2],
            }

        def on_load_checkpoint(self, checkpoint):
            self.saved = checkpoint["user"]

        def on_train_start(self):
            if hasattr(self, "saved"):
                self.steps = self.saved["steps"]
                torch.set_rng_state(self.saved["torch"])
                random.setstate(self.saved["python"])
                np.random.set_state(("MT19937", self.saved["numpy"], self.saved["numpy_position"]))

    for hook, function in hooks.items():
        setattr(Classifier, hook, function)
    return Classifier()


def make_callbacks(folder, name="lightning.pytorch", **quantization):
    """Every callback of the package, and those of Lightning that they must get on with."""
    theirs = importlib.import_module(f"{name}.callbacks")
    return [
        MemoryPreflight(report_path=Path(folder, "preflight.json")),
        MemoryMonitor(every_n_steps=2, calibrate=False),
        OutOfMemoryReport(dirpath=Path(folder, "out of memory")),
        GradScalerMonitor(every_n_steps=2, report_path=Path(folder, "scaler.json")),
        StagnationMonitor(every_n_steps=2),
        theirs.EMAWeightAveraging(decay=0.5),
        theirs.LearningRateMonitor(),
        theirs.ModelCheckpoint(Path(folder, "best"), monitor="val_loss", mode="min"),
        theirs.ModelCheckpoint(
            Path(folder, "steps"),
            filename="{step}",
            every_n_train_steps=2,
            save_top_k=-1,
            save_on_train_epoch_end=False,
        ),
        PostTrainingQuantization(**{"dirpath": Path(folder, "out"), "source": "averaged", **quantization}),
    ]


def make_trainer(folder, callbacks, plugin=None, name="lightning.pytorch", log="log", **options):
    options = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": importlib.import_module(f"{name}.loggers").CSVLogger(folder, name=log, version=""),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    plugin = MasterWeightPrecision("16-master") if plugin is None else plugin
    return importlib.import_module(name).Trainer(callbacks=callbacks, plugins=[plugin], **options)


def fit(
    folder,
    callbacks=None,
    plugin=None,
    module=None,
    name="lightning.pytorch",
    ckpt=None,
    ranks=None,
    **options,
):
    callbacks = make_callbacks(folder, name) if callbacks is None else callbacks
    module = make_module(name, overflow_at=(3, 8)) if module is None else module
    log = "log" if ckpt is None else "resumed"
    trainer = make_trainer(folder, callbacks, plugin, name, log, **options)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    validation = DataLoader(dataset(8, seed=8), batch_size=4)
    trainer.fit(
        module, ResumableLoader(dataset(), **(ranks or {})), validation, ckpt_path=ckpt, weights_only=True
    )
    return trainer


def left_behind(trainer):
    """All that a run leaves behind, but for what the package's callbacks gather."""
    averaging = find(trainer, "EMAWeightAveraging")
    return {
        "weights": trainer.model.state_dict(),
        "average": averaging._average_model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "scaler": trainer.precision_plugin.state_dict(),
        "generators": [torch.get_rng_state(), random.getstate(), str(np.random.get_state())],
        "step": trainer.global_step,
        "metrics": {key: value for key, value in trainer.callback_metrics.items() if "memprec/" not in key},
    }


def find(trainer, kind):
    return next(each for each in trainer.callbacks if kind in (type(each), type(each).__name__))


def logged(folder, without=()):
    """Rows of the CSV log, but for columns that start so; rows that are then empty are left out."""
    with Path(folder, "log", "metrics.csv").open() as file:
        rows = [
            {key: value for key, value in row.items() if value and not key.startswith(without)}
            for row in csv.DictReader(file)
        ]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def counted(trainer):
    """What the monitors have gathered."""
    scaler, stagnation = find(trainer, GradScalerMonitor), find(trainer, StagnationMonitor)
    points = [(point.step, point.scale, point.skipped) for point in scaler.health.history.points]
    return {
        "totals": scaler.health.totals.state_dict(),
        "events": [(event.kind, event.step) for event in scaler.events],
        "points": points,
        "stagnation": stagnation.history,
        "words": stagnation.in_words(),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Killed(Exception):
    """What ends a run in the middle."""


def killer(name, hook, step):
    """A callback that raises in a hook, once so many optimizer steps are done."""

    def kill(self, trainer, *args):
        if trainer.global_step == step:
            raise Killed

    return type("Killer", (importlib.import_module(name).Callback,), {hook: kill})()


def last_checkpoint(folder):
    return max(Path(folder, "steps").glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))


def exported(folder):
    return (folder / "out" / "int8" / "model.safetensors").read_bytes()
