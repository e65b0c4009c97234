"""A module of another package, trained with and without the callbacks of this one."""

from __future__ import annotations

import importlib
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_memprec import (
    GradScalerMonitor,
    MasterWeightPrecision,
    MemoryMonitor,
    MemoryPreflight,
    OutOfMemoryReport,
    PostTrainingQuantization,
    StagnationMonitor,
)
from tests.memory.zoo.reference import peak_of, storage_bytes

OURS = (
    MemoryPreflight,
    MemoryMonitor,
    OutOfMemoryReport,
    GradScalerMonitor,
    StagnationMonitor,
    PostTrainingQuantization,
)
BATCHES = 3  # of an epoch


@dataclass(frozen=True)
class Case:
    """A module as its own package builds it.

    Args:
        name: What it is, in the table.
        packages: What must be installed.
        build: Returns the module, the train loader and the validation loader.
        namespace: The Lightning that the package uses.
        options: Arguments of the Trainer.
        callbacks: Names and arguments of Lightning's own callbacks that run beside ours.
        quantization: Arguments of ``PostTrainingQuantization``.
        masters: Whether it is trained with ``MasterWeightPrecision`` too.
        exported: Whether it has layers that can be quantized.
        tolerance: Largest error of the predicted peak, as a fraction.
    """

    name: str
    packages: tuple[str, ...]
    build: Callable[[], tuple[Any, Any, Any]]
    namespace: str = "lightning.pytorch"
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    masters: bool = True
    exported: bool = True
    tolerance: float = 0.02


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def make(case: Case) -> tuple[Any, Any, Any]:
    seed()
    return case.build()


def ours(case: Case) -> list[Any]:
    """Every callback of the package."""
    return [
        MemoryPreflight(),
        MemoryMonitor(),
        OutOfMemoryReport(),
        GradScalerMonitor(every_n_steps=1),
        StagnationMonitor(every_n_steps=1),
        PostTrainingQuantization(**{"source": "last", **case.quantization}),
    ]


def fit(
    case: Case, folder: Path, callbacks: list[Any], epochs: int = 1, ckpt: Path | None = None, plugin=None
):
    """Train for some epochs of three batches, with a checkpoint at each end."""
    pl = importlib.import_module(case.namespace)
    theirs = importlib.import_module(f"{case.namespace}.callbacks")
    module, train, validation = make(case)
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": epochs,
            "limit_train_batches": BATCHES,
            "limit_val_batches": 1,
            "log_every_n_steps": 1,
            "default_root_dir": folder,
            "logger": importlib.import_module(f"{case.namespace}.loggers").CSVLogger(folder),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "plugins": [plugin] if plugin else None,
            **case.options,
        },
        callbacks=[
            *callbacks,
            *(getattr(theirs, name)(**arguments) for name, arguments in case.callbacks.items()),
            theirs.ModelCheckpoint(folder / "ckpt", filename="{epoch}", save_top_k=-1),
        ],
    )
    seed()
    trainer.fit(module, train, validation, ckpt_path=ckpt, **({"weights_only": False} if ckpt else {}))
    return trainer


def left_behind(trainer: Any) -> dict[str, Any]:
    """All that a run leaves, but for what our callbacks log."""
    return {
        "weights": dict(trainer.model.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        "generators": [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()],
        "step": trainer.global_step,
        "metrics": {k: v for k, v in trainer.callback_metrics.items() if "memprec/" not in k},
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two trees are not the same bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        return [] if alike else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [each for key in a for each in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [
            each
            for i, pair in enumerate(zip(a, b, strict=True))
            for each in differences(*pair, f"{path}/{i}")
        ]
    if type(a) is type(b) and hasattr(a, "__dict__") and not callable(a):
        return differences(vars(a), vars(b), path)
    return [] if type(a) is type(b) and (callable(a) or a == b or a != a) else [path]


def find(trainer: Any, kind: type) -> Any:
    return next(each for each in trainer.callbacks if isinstance(each, kind))


def replay(loader: Any) -> DataLoader[Any]:
    """A loader of the largest batch, again and again; it exists before the run and so counts once."""
    batches = [batch for batch, _ in zip(loader, range(BATCHES), strict=False)]
    largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in in_batch(batch)))
    return DataLoader([largest] * BATCHES, batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def peaks(case: Case, folder: Path) -> tuple[int, int, Any]:
    """Return the predicted and the real peak of two epochs without callbacks, and the estimate."""
    pl = importlib.import_module(case.namespace)

    def prepared(callbacks):
        module, train, validation = make(case)
        train, validation = replay(train), replay(validation)
        trainer = pl.Trainer(
            **{
                "accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False,
                "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
                "default_root_dir": folder, "limit_val_batches": 1, **case.options,
            },
            callbacks=callbacks,
        )  # fmt: skip
        return trainer, module, train, validation

    trainer, *rest = prepared([preflight := MemoryPreflight(on_error="raise", stop_after=True)])
    seed()
    trainer.fit(*rest)
    trainer, module, train, validation = prepared([])
    start = storage_bytes([*module.parameters(), *module.buffers()])
    largest = storage_bytes(in_batch(train.dataset[0]))
    seed()
    real = start + largest + peak_of(lambda: trainer.fit(module, train, validation))
    return preflight.estimate.peak_allocated_bytes, real, preflight.estimate


def in_batch(tree: Any, depth: int = 6) -> list[torch.Tensor]:
    """All tensors of a batch, in objects too."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if not depth:
        return []
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    if not values and hasattr(tree, "__dict__"):
        values = vars(tree).values()
    return [tensor for value in values for tensor in in_batch(value, depth - 1)]


@dataclass
class Outcome:
    """What a case came to; ``differences`` are empty where watched and plain run are the same bits."""

    predicted_bytes: int
    real_bytes: int
    differences: list[str]
    resumed_differences: list[str]
    when: str
    quantization: Any
    path: Any
    seconds: float
    events: list[str]

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.real_bytes - 1.0


def examine(case: Case, folder: Path, masters: bool = False) -> Outcome:
    """Run a case plain and watched, resume both, and compare the peaks."""
    started = time.monotonic()
    left, resumed = [], []
    for watched in (False, True):
        into = folder / str(watched)

        def run(folder, watched=watched, **options):
            plugin = MasterWeightPrecision("bf16-master") if masters else None
            return fit(case, folder, ours(case) if watched else [], plugin=plugin, **options)

        left.append(left_behind(run(into)))
        ckpt = sorted((into / "ckpt").glob("epoch=0*.ckpt"))[0]
        trainer = run(into / "resumed", epochs=2, ckpt=ckpt)
        resumed.append(left_behind(trainer))
    predicted, real, _ = (0, 1, None) if masters else peaks(case, folder / "peaks")
    quantization = find(trainer, PostTrainingQuantization)
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        predicted, real, differences(*left), differences(*resumed), find(trainer, MemoryPreflight).verdict.when,
        quantization.report, quantization.path, time.monotonic() - started,
        [event.message for kind in (MemoryMonitor, GradScalerMonitor) for event in find(trainer, kind).events],
    )  # fmt: skip
