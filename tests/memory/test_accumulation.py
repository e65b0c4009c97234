"""Sums of gradients: out of place in a trace exactly where a real backward pass makes a new tensor."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_memprec.memory.trace import Recorder


class _Sum(torch.autograd.Function):
    """Adds in its own backward pass, where a Python variable holds the first term."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        double = grad * 2
        return double + x


def _residual(y, w):
    for _ in range(3):
        y = y + (y @ w).tanh()
    return y.exp().sum()


CASES = {
    "two branches": lambda y, w: (y.cos() + y.exp()).sum(),
    "three branches": lambda y, w: (y.cos() + y.exp() + y.tanh()).sum(),
    "shared gradient": lambda y, w: (y + y.exp()).sum(),
    "view of a temporary": lambda y, w: y.t().cos().sum() + y.view(-1).exp().sum(),
    "view": lambda y, w: y.view(16, -1).exp().sum() + y.cos().sum(),
    "slices": lambda y, w: y[:32].exp().sum() + y[32:].cos().sum(),
    "projections": lambda y, w: (
        (y @ w).view(8, 8, 64).transpose(0, 1).sin().sum() + (y @ w).cos().sum() + (y @ w.t()).exp().sum()
    ),
    "residual": _residual,
    "python function": lambda y, w: (_Sum.apply(y) + y.sin()).exp().sum(),
}


class _Additions(Recorder):
    """Notes every addition of a backward pass and whether it made a tensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        births = len(self.events.storages)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name in ("aten::add", "aten::add_") and torch._C._current_autograd_node() is not None:
            self.names.append("aten::add" if len(self.events.storages) > births else "aten::add_")
        return out


def _leaves(device):
    return [torch.empty(64, 64, device=device).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("loss", CASES.values(), ids=CASES.keys())
def test_sums_are_in_place_where_they_really_are(loss):
    x, w = _leaves("cpu")
    real = loss(x.sin(), w)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        real.backward()
    expected = [event.name for event in profiler.events() if event.name in ("aten::add", "aten::add_")]
    recorder = _Additions()
    with recorder:
        x, w = _leaves("meta")
        loss(x.sin(), w).backward()
    assert recorder.names == expected
