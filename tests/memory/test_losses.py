"""Losses and element-wise operators: what their kernels take inside, and what a loss keeps alive."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_memprec import estimate_memory
from tests.memory.peaks import peak_of

SIDE = 512
X = torch.rand(SIDE, SIDE)


class Model(nn.Module):
    """Scales its input, so that there is something to train."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIDE, dtype=dtype))

    def forward(self, x):
        return x * self.scale


def error_of(function, dtype=torch.float32):
    """The estimate's error on two steps of a model that ends in a function, as a fraction of what they take."""
    x, model = X.to(dtype), Model(dtype)

    def loss(module, batch):
        return function(module(batch)).float().sum()

    def steps():
        for _ in range(2):
            value = loss(model, x)  # Held through the backward pass, as by Lightning's loop.
            model.zero_grad()
            value.backward()

    fixed = x.nbytes + model.scale.nbytes
    real = fixed + peak_of(steps)
    estimate = estimate_memory(Model(dtype), x, loss=loss, device="cpu").peak_allocated_bytes
    return (estimate - real) / real


LOSSES = [
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "l1_loss",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.extended), "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_what_it_takes_on_a_cpu(name, reduction, dtype):
    loss = getattr(functional, name)
    # Apart from blocks of 64 bytes for single numbers nothing is left to miss.
    assert abs(error_of(lambda y: loss(y, y.detach() * 0.5, reduction=reduction), dtype)) <= 0.001


@pytest.mark.parametrize("device", ["cpu", "A100-80GB"])
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy"])
def test_a_loss_of_one_number_keeps_the_storage_of_all(name, device):
    # Kernels of CPU and CUDA share the code that shrinks the output. The storage shows it here.
    real = getattr(functional, name)(X, X * 0.5)
    assert (real.numel(), real.untyped_storage().nbytes()) == (1, X.nbytes)

    traced = []

    def loss(module, batch):
        y = module(batch)
        value = getattr(functional, name)(y, y.detach())
        traced.append(value.untyped_storage().nbytes())
        return value

    estimate_memory(Model(torch.float32), X, loss=loss, device=device)
    assert traced == [X.nbytes, X.nbytes]


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.float() + y.bfloat16(),
        lambda y: y.bfloat16() * y.float(),
        lambda y: (y.float() * 2).add_(y.bfloat16()),
        lambda y: torch.where(y > 0.5, y.float(), y.bfloat16()),
        lambda y: y * (y > 0.5),
        lambda y: y.mean(-1),
        lambda y: nn.functional.mish(y),
        lambda y: y.gather(-1, torch.zeros(*y.shape[:-1], 1, dtype=torch.long)),
        lambda y: torch.zeros_like(y).scatter_add(-1, torch.zeros(y.shape, dtype=torch.long), y),
    ],
    ids=["add", "mul", "in place", "where", "bool", "mean", "mish", "gather", "scatter_add"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_that_differ_are_copied_on_a_cpu(function, dtype):
    assert abs(error_of(function, dtype)) <= 0.002


def test_second_derivatives_of_mish_go_through_its_parts():
    def loss(module, batch):
        y = nn.functional.mish(module(batch))
        return torch.autograd.grad(y.sum(), [module.scale], create_graph=True)[0].pow(2).sum()

    estimate = estimate_memory(Model(torch.float32), X, loss=loss, device="cpu")
    # What `create_graph` keeps of the first derivative: tanh and sigmoid of every element at the least.
    assert estimate.peak_allocated_bytes > 5 * X.nbytes
