"""Compiled modules and memory formats: traced as what they are, and said so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec import estimate_memory
from tests.memory.small_mlp import DEVICES, X, mlp, sgd, total


def compiled_in_place():
    module = mlp()
    module.compile()
    return module


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(mlp())

    def forward(self, x):
        return self.net(x)


class Method(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    @torch.compile
    def forward(self, x):
        return self.net(x)


def names(estimate):
    return {assumption.name for assumption in estimate.assumptions}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "build",
    [lambda: torch.compile(mlp()), compiled_in_place, Inside, Method],
    ids=["wrapped", "in place", "inside", "method"],
)
def test_compiled_module_is_traced_as_it_runs_without_compiler(build, device):
    options = {"loss": total, "optimizer": sgd, "device": device}
    eager, compiled = estimate_memory(mlp(), X, **options), estimate_memory(build(), X, **options)
    assert compiled.peak_allocated_bytes == eager.peak_allocated_bytes
    assert "torch_compile" in names(compiled)
    assert "torch_compile" not in names(eager)


def convolution(**options):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).to(**options)


@pytest.mark.parametrize("device", DEVICES)
def test_channels_last_weights_are_named(device):
    images = torch.randn(2, 3, 8, 8)
    options = {"optimizer": sgd, "device": device}
    last = estimate_memory(convolution(memory_format=torch.channels_last), images, **options)
    assert "channels_last" in names(last)
    assert "channels_last" not in names(estimate_memory(convolution(), images, **options))
