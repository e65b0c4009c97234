"""Host memory and disk beside the estimate: a checkpoint of a real Trainer, saved and resumed from.

Run: ``python -m benchmarks.host_memory`` (half a minute, 700 MB of disk). The model is a perceptron trained with
AdamW on the CPU. Memory is the highest resident set while the checkpoint is saved, or from the start of ``fit`` to
its first step, above what the process had before.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks._machine import describe_machine
from lightning_memprec._units import format_bytes

_WIDTH = 2048
_LAYERS = 13


def _run(path: Path, *, resume: bool) -> int:
    """Return the bytes that saving to a file, or resuming from it, took."""
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    used: list[int] = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            used.append(_resident_bytes("VmHWM") - start_bytes)

    module = _module()
    data: Any = DataLoader([torch.randn(2, _WIDTH)] * 2, batch_size=None)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=2 if resume else 1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Watch()],
    )  # fmt: skip
    start_bytes = _forget_peak()
    trainer.fit(module, data, ckpt_path=path if resume else None)
    if not resume:
        start_bytes = _forget_peak()
        trainer.save_checkpoint(path)
        used.append(_resident_bytes("VmHWM") - start_bytes)
    return used[-1]


def _module() -> Any:
    import lightning.pytorch as pl

    class Perceptron(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch).pow(2).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    return Perceptron()


def _forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _resident_bytes("VmRSS")


def _resident_bytes(name: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    """Print measured and estimated sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=("save", "resume"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(_run(args.file, resume=args.child == "resume"))
        return
    from lightning_memprec import estimate_memory

    print(describe_machine())
    host = estimate_memory(_module, torch.randn(2, _WIDTH), device="cpu").host
    assert host is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        save, resume = (_in_child(name, path) for name in ("save", "resume"))
        size = os.path.getsize(path)
    # The process has its weights before it resumes.
    rows = (
        ("file", size, host.checkpoint_bytes),
        ("memory to save", save, host.save_bytes),
        ("memory to resume", resume, host.resume_bytes - host.setup_bytes),
    )
    for name, measured, estimated in rows:
        error = estimated / measured - 1
        print(
            f"{name:<18}measured {format_bytes(measured)}  estimated {format_bytes(estimated)}  {error:+.2%}"
        )


def _in_child(name: str, path: Path) -> int:
    command = [sys.executable, "-m", "benchmarks.host_memory", "--child", name, "--file", str(path)]
    # Large blocks go back to the system when they are freed, so that none is used again without being seen.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
