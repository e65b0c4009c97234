"""Graphs: batches of PyTorch Geometric are objects, not tensors."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn

from tests.others.runs import Case


def _graphs(count):
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(count)
    graphs = []
    for _ in range(count):
        nodes = int(torch.randint(60, 100, (), generator=generator))
        edges = torch.randint(nodes, (2, 4 * nodes), generator=generator)
        x = torch.randn(nodes, 16, generator=generator)
        graphs.append(Data(x=x, edge_index=edges, y=(x.mean() > 0).long().view(1)))
    return graphs


class GraphClassifier(pl.LightningModule):
    """After the examples of PyTorch Geometric with Lightning."""

    def __init__(self, layer: str = "GCNConv"):
        super().__init__()
        import torch_geometric.nn as gnn

        kind = getattr(gnn, layer)
        self.layers = nn.ModuleList([kind(16, 64), kind(64, 64)])
        self.norm = gnn.BatchNorm(64)
        self.head = gnn.MLP([64, 64, 2], norm="batch_norm", dropout=0.5)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)

    def forward(self, x, edge_index, batch, batch_size):
        from torch_geometric.nn import global_add_pool

        for layer in self.layers:
            x = self.norm(layer(x, edge_index)).relu()
        return self.head(global_add_pool(x, batch, batch_size))

    def training_step(self, data, batch_idx):
        out = self(data.x, data.edge_index, data.batch, data.num_graphs)
        loss = nn.functional.cross_entropy(out, data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data, batch_idx):
        out = self(data.x, data.edge_index, data.batch, data.num_graphs)
        self.accuracy(out.softmax(dim=-1), data.y)
        self.log("val_acc", self.accuracy, batch_size=data.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _loaders():
    from torch_geometric.loader import DataLoader

    return DataLoader(_graphs(24), batch_size=8, shuffle=True), DataLoader(_graphs(8), batch_size=8)


def convolution():
    return GraphClassifier(), *_loaders()


def attention():
    return GraphClassifier("GATConv"), *_loaders()


# Lightning's half precisions do not cast the tensors inside an object, so that these are trained in FP32. Linear layers
# of PyTorch Geometric are its own.
CASES = (
    Case("PyTorch Geometric GCN", ("torch_geometric",), convolution, masters=False, exported=False),
    Case("PyTorch Geometric GAT", ("torch_geometric",), attention, masters=False, exported=False),
)
