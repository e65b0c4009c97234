"""Gradient formulas that fill zeros in place, traced against the CPU allocator's own events."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.memory.zoo.case import Case
from tests.memory.zoo.comparison import compare


class _Then(nn.Module):
    """A layer, then an operator whose gradient selects or scatters."""

    def __init__(self, select):
        super().__init__()
        self.layer = nn.Linear(128, 2048)
        self.select = select

    def forward(self, x):
        return self.select(self.layer(x)).sum()


INDEX = torch.arange(0, 2048, 2)


@pytest.mark.parametrize(
    "select",
    [
        pytest.param(lambda h: h.max(1).values, id="max"),
        pytest.param(lambda h: h.median(1).values, id="median"),
        pytest.param(lambda h: h.topk(4, dim=1).values, id="topk"),
        pytest.param(lambda h: h.gather(1, INDEX.to(h.device).expand(len(h), -1)), id="gather"),
        pytest.param(lambda h: h.index_select(1, INDEX.to(h.device)), id="index_select"),
        pytest.param(lambda h: h[:, INDEX.to(h.device)], id="index"),
    ],
)
def test_selecting_gradients_take_what_they_really_take(select):
    case = Case(
        name="select",
        family="mlp",
        build=lambda: (_Then(select), torch.randn(512, 128)),
        loss=lambda module, batch: module(batch),
        optimizer=torch.optim.SGD,
    )
    # The bound of the zoo for MLPs.
    assert abs(compare(case).error) < 0.005


class _Transposed(nn.Module):
    """Batch norm between transpositions, as transformers of time series have it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        x = self.norm((x * 2).transpose(1, 2)).transpose(1, 2)
        return torch.cat([layer(x) for layer in self.layers]).tanh().sum()


def test_each_layer_after_a_transposed_batch_norm_copies_its_input():
    case = Case(
        name="transposed batch norm",
        family="mlp",
        build=lambda: (_Transposed(), torch.randn(64, 32, 64)),
        loss=lambda module, batch: module(batch),
        optimizer=torch.optim.SGD,
    )
    # The bound of the zoo for MLPs; without the three copies the estimate is a quarter too low.
    assert abs(compare(case).error) < 0.005
