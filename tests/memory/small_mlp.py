"""A small network with what it costs, for tests that count bytes by hand."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["BATCH", "DEVICES", "HIDDEN", "IN", "NUMEL", "OUT", "X", "mlp", "sgd", "total"]

DEVICES = ["cpu", "cuda"]
IN, HIDDEN, OUT, BATCH = 32, 64, 8, 16


def mlp(**kwargs):
    return nn.Sequential(nn.Linear(IN, HIDDEN, **kwargs), nn.ReLU(), nn.Linear(HIDDEN, OUT, **kwargs))


def total(module, batch):
    return module(batch).sum()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


NUMEL = IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT
X = torch.randn(BATCH, IN)
