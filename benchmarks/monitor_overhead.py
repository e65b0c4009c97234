"""What a `MemoryMonitor` adds to a training step of about 50 ms, beside the same run without it and with a peer.

Run: ``python -m benchmarks.monitor_overhead`` (about three minutes on one core).

Four runs take turns, round by round: without a monitor, with it on quiet steps, with it sampling and logging at every
step, and with Lightning's own ``DeviceStatsMonitor(cpu_stats=True)`` logging at every step. The logger drops what it
gets, so that its own cost is not counted. Given are the time inside the hooks, as the median over steps, and the
medians over rounds of the step times' ratio, which noise touches more. Torch has one thread, and times are that
thread's CPU time, so that other work on the machine does not count. Reads from the device
(``aten::_local_scalar_dense``, what ``.item()`` calls, which on CUDA waits for it) are counted on sampled steps with
and without the monitor.

With ``--accelerator gpu`` the runs are on a GPU; its own work is not in the times, the host's is.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._machine import describe_machine
from benchmarks._timed import Timed
from benchmarks.scaler_monitor_overhead import _WIDTH, Clock, CountReads, Net
from lightning_memprec.callbacks.memory_monitor import MemoryMonitor

_QUIET = 10**9
_WARM_UP = 24  # The monitor samples the first 20 steps, however seldom it is to look.
_HOOKS = ("on_train_batch_start", "on_train_batch_end")


class Reads(pl.Callback):
    """Counts reads from the device after the warm-up."""

    def __init__(self) -> None:
        self.mode = CountReads()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        if batch_idx == _WARM_UP:
            self.mode.__enter__()

    def on_train_end(self, *_: Any) -> None:
        """End."""
        self.mode.__exit__(None, None, None)


def _fit(callbacks: list[Any], rows: int, steps: int, accelerator: str) -> None:
    data = torch.randn(rows, _WIDTH, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data.repeat(steps, 1)), batch_size=rows)
    trainer = pl.Trainer(
        accelerator=accelerator, devices=1, callbacks=callbacks, max_epochs=1, logger=DummyLogger(),
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), loader)


def _rows_for(seconds: float, accelerator: str) -> int:
    """Find how many rows make a step of this length."""
    rows = 1024
    for _ in range(2):
        clock = Clock()
        _fit([clock], rows, 8, accelerator)
        rows = max(8, int(rows * seconds / statistics.median(clock.step_seconds())))
    return rows


def _compare(rows: int, rounds: int, steps: int, accelerator: str) -> None:
    kinds: dict[str, Any] = {
        "monitor, quiet step": lambda: MemoryMonitor(every_n_steps=_QUIET),
        "monitor, sampled step": lambda: MemoryMonitor(every_n_steps=1),
        "DeviceStatsMonitor": lambda: DeviceStatsMonitor(cpu_stats=True),
    }
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    inside: dict[str, list[float]] = {kind: [] for kind in kinds}
    plain: list[float] = []
    for _ in range(rounds):
        clock = Clock()
        _fit([clock], rows, steps, accelerator)
        alone = statistics.median(clock.step_seconds()[_WARM_UP:])
        plain.append(alone)
        for kind, make in kinds.items():
            clock, callback = Clock(), make()
            timed = Timed(callback, _HOOKS)
            _fit([clock, callback], rows, steps, accelerator)
            ratios[kind].append(statistics.median(clock.step_seconds()[_WARM_UP:]) / alone)
            inside[kind].append(statistics.median(timed.seconds[_WARM_UP:]))
    step = statistics.median(plain)
    print(f"\nstep without a monitor {step * 1e3:.1f} ms, {rounds} rounds of {steps - _WARM_UP} steps")
    for kind in kinds:
        own = statistics.median(inside[kind])
        low, high = min(ratios[kind]), max(ratios[kind])
        print(
            f"  {kind:21s} in its hooks {own * 1e6:5.0f} us = {own / step:.3%} of the step; "
            f"whole step x{statistics.median(ratios[kind]):.4f} (rounds {low:.3f} to {high:.3f})"
        )
    peer = statistics.median(inside["DeviceStatsMonitor"]) / statistics.median(
        inside["monitor, sampled step"]
    )
    print(f"  DeviceStatsMonitor takes {peer:.1f} times as long as a sampled step of the monitor")


def _count_reads(rows: int, accelerator: str) -> None:
    counts = []
    for monitors in ([], [MemoryMonitor(every_n_steps=1)]):
        reads = Reads()
        _fit([reads, *monitors], rows, _WARM_UP + 8, accelerator)
        counts.append(reads.mode.reads)
    print(f"  reads from the device in 8 sampled steps: {counts[0]} without, {counts[1]} with the monitor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=_WARM_UP + 20)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning_utilities"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(describe_machine())
    rows = _rows_for(options.milliseconds / 1e3, options.accelerator)
    print(f"{sum(p.numel() for p in Net().parameters()):,} parameters, {rows} rows a batch, FP32, Adam")
    _compare(rows, options.rounds, options.steps, options.accelerator)
    _count_reads(rows, options.accelerator)


if __name__ == "__main__":
    main()
