"""A run whose batches grow until memory is out, and the report on it. Needs Linux, where a process can be limited."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memprec import OutOfMemoryReport

ROOM = 500 * 2**20  # Bytes for the run, beyond what the libraries take.


class Tagger(pl.LightningModule):
    """A small transformer over sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=512, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(128, 32)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.encoder(batch)).logsumexp(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def limit_memory(room_bytes: int) -> None:
    """Let this process take so many bytes of address space more, and no further ones."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(folder: str = "out_of_memory", room_bytes: int = ROOM) -> None:
    batches = [torch.randn(8, 64 * 2**i, 128) for i in range(6)]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[OutOfMemoryReport(dirpath=folder)],
    )
    torch.set_num_threads(1)
    limit_memory(room_bytes)
    trainer.fit(Tagger(), DataLoader(batches, batch_size=None))


if __name__ == "__main__":
    main(*sys.argv[1:2])
