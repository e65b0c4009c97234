"""Recurrent nets."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.memory.zoo.case import Case

__all__ = ["CASES"]


class _Tagger(nn.Module):
    """Embedding, recurrent layers, one label a token."""

    def __init__(self, kind: type[nn.RNNBase], **kwargs: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.layers = kind(128, 256, batch_first=True, **kwargs)
        self.head = nn.Linear(512 if kwargs.get("bidirectional") else 256, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


def _build(kind: type[nn.RNNBase], **kwargs: Any) -> tuple[nn.Module, Any]:
    tokens = torch.randint(1000, (32, 64))
    return _Tagger(kind, **kwargs), (tokens, torch.randint(20, (32, 64)))


CASES = [
    Case(name="lstm", family="recurrent", build=partial(_build, nn.LSTM, num_layers=2)),
    Case(
        name="lstm_bidirectional_clip_norm",
        family="recurrent",
        build=partial(_build, nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2),
        clip=1.0,
    ),
    Case(
        name="gru",
        family="recurrent",
        build=partial(_build, nn.GRU, num_layers=2),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    ),
    Case(
        name="gru_bidirectional_bf16_mixed",
        family="recurrent",
        build=partial(_build, nn.GRU, num_layers=1, bidirectional=True),
        precision="bf16-mixed",
    ),
]
