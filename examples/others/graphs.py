"""Graphs of PyTorch Geometric: a batch is one object, and its size differs from batch to batch.

CPU, some seconds. Needs ``pip install torch_geometric``.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_add_pool

from lightning_memprec import GradScalerMonitor, MemoryPreflight


def make_graphs(count: int) -> list[Data]:
    generator = torch.Generator().manual_seed(count)
    graphs = []
    for _ in range(count):
        nodes = int(torch.randint(60, 100, (), generator=generator))
        x = torch.randn(nodes, 16, generator=generator)
        edges = torch.randint(nodes, (2, 4 * nodes), generator=generator)
        graphs.append(Data(x=x, edge_index=edges, y=(x.mean() > 0).long().view(1)))
    return graphs


class GraphClassifier(pl.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GCNConv(16, width), GCNConv(width, width)])
        self.head = nn.Linear(width, 2)

    def forward(self, data: Batch) -> torch.Tensor:
        x = data.x
        for layer in self.layers:
            x = layer(x, data.edge_index).relu()
        return self.head(global_add_pool(x, data.batch, data.num_graphs))

    def training_step(self, data: Batch, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(data), data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MemoryPreflight(device_memory="64MiB"), GradScalerMonitor()],
    )
    trainer.fit(GraphClassifier(), DataLoader(make_graphs(24), batch_size=8))


if __name__ == "__main__":
    main()
