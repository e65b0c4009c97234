"""A run that keeps its outputs, and what `MemoryMonitor` says about it. CPU, a few seconds.

torch's CPU allocator keeps no count of tensors, so the monitor looks at the memory that the process has resident. On a
GPU it reads the allocator, holds the estimate of `MemoryPreflight` against the measured peak, and names tensors of a
few KiB.
"""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprec import MemoryMonitor

STEPS, ROWS, WIDTH = 48, 4096, 512


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, WIDTH)
        self.outputs: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0])
        self.outputs.append(out)  # 8 MiB a step, each with its graph, and nobody empties the list.
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main() -> MemoryMonitor:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning 2.6 uses a name that torch 2.14 deprecates.
    monitor = MemoryMonitor(every_n_steps=1)
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[monitor], max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.ones(ROWS, 64).repeat(STEPS, 1))
    trainer.fit(Net(), DataLoader(data, batch_size=ROWS))
    return monitor


if __name__ == "__main__":
    main()
