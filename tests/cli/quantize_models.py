"""Models for ``test_quantize.py``, which names them on a command line."""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


class NotOnMeta(Small):
    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.ones(3).sum().item()


class Wide(nn.Module):
    """Some layers of 36 MiB each."""

    def __init__(self, layers: int = 6, width: int = 3072) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
