"""What batched products in half precision copy, beside the CPU allocator's own events."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.memory.cpu_products import product_allocations
from lightning_memprec.memory.estimate import estimate_memory
from tests.memory.peaks import peak_of

BATCH, ROWS, INNER, COLUMNS = 32, 40, 64, 96


def dense(*shape):
    return torch.randn(*shape).bfloat16()


FACTORS = {
    "dense": lambda: (dense(BATCH, ROWS, INNER), dense(BATCH, INNER, COLUMNS)),
    "expanded": lambda: (dense(BATCH, ROWS, INNER), dense(INNER, COLUMNS).expand(BATCH, -1, -1)),
    "sliced": lambda: (dense(BATCH, ROWS, 2 * INNER)[..., :INNER], dense(BATCH, INNER, COLUMNS)),
    "permuted": lambda: (dense(ROWS, BATCH, INNER).transpose(0, 1), dense(BATCH, INNER, COLUMNS)),
    "transposed": lambda: (
        dense(BATCH, INNER, ROWS).transpose(1, 2),
        dense(BATCH, COLUMNS, INNER).transpose(1, 2),
    ),
    "small": lambda: (dense(4, 2, 8).transpose(0, 1), dense(2, 8, 8)),
}


@pytest.mark.parametrize("name", [*FACTORS])
def test_copies_of_factors(name):
    first, second = FACTORS[name]()
    product = first.size(0) * first.size(1) * second.size(2) * 2
    real = peak_of(lambda: torch.bmm(first, second))
    (traced,) = [*product_allocations()[torch.ops.aten.bmm.default](first, second)] or (product,)
    # oneDNN's own scratch memory depends on the processor; a copy of either factor is more.
    assert traced <= real < traced + min(first.numel(), second.numel()) * 2


def test_a_weight_is_copied_for_each_of_many_products():
    layer = nn.Linear(64, 192).bfloat16()
    batch = dense(48, 16, 64).transpose(0, 1)  # Not dense, so that the weight is expanded to 16 products.

    def loss(module, data):
        return module(data).square().mean()

    estimate = estimate_memory(layer, batch, loss=loss, optimizer=torch.optim.SGD, device="cpu")
    optimizer = torch.optim.SGD(layer.parameters())

    def steps():
        for _ in range(2):
            optimizer.zero_grad()
            loss(layer, batch).backward()
            optimizer.step()

    held = sum(p.nbytes for p in layer.parameters()) + batch.nbytes
    # oneDNN's scratch memory is not modelled.
    assert estimate.peak_allocated_bytes == pytest.approx(held + peak_of(steps), rel=0.05)
