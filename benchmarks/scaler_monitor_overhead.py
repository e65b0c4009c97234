"""What a `GradScalerMonitor` adds to a training step of about 50 ms on a CPU, beside the same run without it.

Run: ``python -m benchmarks.scaler_monitor_overhead`` (about two minutes on one core).

Three runs take turns, round by round: without the monitor, with it on quiet steps, and with it looking closely
at every step. Given are the medians over rounds of the step times' ratio, and the time inside the monitor's own
hooks, which noise touches less. Torch has one thread, and times are that thread's CPU time, so that other work on
the machine does not count. Reads from the device (``aten::_local_scalar_dense``, what ``.item()``
calls, which on CUDA waits for it) are counted on quiet steps with and without the monitor.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._machine import describe_machine
from benchmarks._timed import Timed
from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor

_WIDTH, _DEPTH = 128, 8
_QUIET = 10**9
_HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Net(pl.LightningModule):
    """A stack of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_DEPTH)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the mean square of the outputs."""
        return self.net(batch[0]).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Clock(pl.Callback):
    """Takes the time from one batch's start to the next one's."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Look at the clock."""
        self.starts.append(time.thread_time())

    def step_seconds(self) -> list[float]:
        """Return the times of steps; the first two warm up."""
        return [b - a for a, b in zip(self.starts[2:], self.starts[3:], strict=False)]


class CountReads(TorchDispatchMode):
    """Counts how often a value is read from the device."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Reads(pl.Callback):
    """Counts reads from the second batch to the last."""

    def __init__(self) -> None:
        self.mode = CountReads()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == 1:
            self.mode.__enter__()

    def on_train_end(self, *_: Any) -> None:
        """End."""
        self.mode.__exit__(None, None, None)


def _fit(callbacks: list[Any], rows: int, steps: int, clip: float | None) -> None:
    data = torch.randn(rows, _WIDTH, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data.repeat(steps, 1)), batch_size=rows)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = pl.Trainer(
        accelerator="cpu", plugins=[plugin], callbacks=callbacks, max_epochs=1, gradient_clip_val=clip,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), loader)


def _rows_for(seconds: float) -> int:
    """Find how many rows make a step of this length."""
    rows = 1024
    for _ in range(2):
        clock = Clock()
        _fit([clock], rows, 8, None)
        rows = max(8, int(rows * seconds / statistics.median(clock.step_seconds())))
    return rows


def _compare(rows: int, rounds: int, steps: int, clip: float | None) -> None:
    kinds = {"quiet step": _QUIET, "sampled step": 1}
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    inside: dict[str, list[float]] = {kind: [] for kind in kinds}
    plain: list[float] = []
    for _ in range(rounds):
        clock = Clock()
        _fit([clock], rows, steps, clip)
        alone = statistics.median(clock.step_seconds())
        plain.append(alone)
        for kind, every in kinds.items():
            clock, monitor = Clock(), GradScalerMonitor(every_n_steps=every)
            timed = Timed(monitor, _HOOKS)
            _fit([clock, monitor], rows, steps, clip)
            ratios[kind].append(statistics.median(clock.step_seconds()) / alone)
            inside[kind].append(statistics.median(timed.seconds[2:]))
    step = statistics.median(plain)
    print(f"\nstep without monitor {step * 1e3:.1f} ms, gradient clipping {'by norm' if clip else 'off'}")
    for kind in kinds:
        own = statistics.median(inside[kind])
        low, high = min(ratios[kind]), max(ratios[kind])
        print(
            f"  {kind:13s} in its hooks {own * 1e6:4.0f} us = {own / step:.2%} of the step; "
            f"whole step x{statistics.median(ratios[kind]):.4f} (rounds {low:.3f} to {high:.3f})"
        )


def _count_reads(rows: int, clip: float | None) -> None:
    counts = []
    for monitors in ([], [GradScalerMonitor(every_n_steps=_QUIET)]):
        reads = Reads()
        _fit([reads, *monitors], rows, 8, clip)
        counts.append(reads.mode.reads)
    print(f"  reads from the device in 7 quiet steps: {counts[0]} without, {counts[1]} with the monitor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning_utilities"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(describe_machine())
    rows = _rows_for(options.milliseconds / 1e3)
    parameters = sum(p.numel() for p in Net().parameters())
    print(f"{parameters:,} parameters in {2 * _DEPTH} tensors, {rows} rows a batch, FP16 autocast, Adam")
    for clip in (None, 1.0):
        _compare(rows, options.rounds, options.steps, clip)
        _count_reads(rows, clip)


if __name__ == "__main__":
    main()
