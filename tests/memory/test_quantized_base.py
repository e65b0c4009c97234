"""Adapters over frozen bitsandbytes layers of 4 and 8 bits (QLoRA): what the weights and their scales take."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from lightning_memprec.memory.estimate import estimate_memory
from tests.memory.peaks import peak_of

ROWS, COLUMNS, RANK = 512, 1024, 8
FP32 = 4


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(COLUMNS, RANK, bias=False)
        self.up = nn.Linear(RANK, ROWS, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def four_bits(nested):
    return bnb.nn.Linear4bit(
        COLUMNS, ROWS, bias=False, quant_type="nf4", compute_dtype=torch.float32, compress_statistics=nested
    ).to("cpu")


def eight_bits():
    return bnb.nn.Linear8bitLt(COLUMNS, ROWS, bias=False, has_fp16_weights=False).to("cpu")


# As bitsandbytes stores them: 16 values of the format; a scale for each 64 weights, or, quantized in turn, a byte for
# each, with 256 values of that format, a scale for each 256 and the mean.
BLOCKS = ROWS * COLUMNS // 64
NF4 = ROWS * COLUMNS // 2 + 16 * FP32
CASES = {
    "nf4": (lambda: four_bits(nested=False), NF4 + BLOCKS * FP32),
    "nf4, scales quantized": (
        lambda: four_bits(nested=True),
        NF4 + BLOCKS + 256 * FP32 + BLOCKS // 256 * FP32 + FP32,
    ),
    "int8": (eight_bits, ROWS * COLUMNS + ROWS * FP32),
}


def loss_of(model, batch):
    return model(batch).square().mean()


def estimated(model, batch, device):
    return estimate_memory(model, batch, optimizer=torch.optim.AdamW, loss=loss_of, device=device)


@pytest.mark.parametrize("has_run", [False, True], ids=["new", "has run"])
@pytest.mark.parametrize("name", [*CASES])
def test_scales_of_a_quantized_base_are_counted(name, has_run):
    make, base_bytes = CASES[name]
    model, batch = Adapted(make()), torch.randn(8, COLUMNS)
    if has_run:
        model(batch)  # Moves what `Linear8bitLt` keeps from the weight into the layer.
    estimate = estimated(model, batch, "cpu")
    adapters = (COLUMNS + ROWS) * RANK * FP32
    assert estimate.breakdown.parameters_bytes == base_bytes + adapters
    assert estimate.breakdown.gradients_bytes in (0, adapters)
    assert estimate.trainable_parameters == (COLUMNS + ROWS) * RANK


@pytest.mark.parametrize("name", [*CASES])
def test_the_peak_is_that_of_real_steps(name):
    make, base_bytes = CASES[name]
    model, batch = Adapted(make()), torch.randn(64, COLUMNS)
    estimate = estimated(model, batch, "cpu")
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def steps():
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    held = base_bytes + (COLUMNS + ROWS) * RANK * FP32 + batch.nbytes
    # The promise of the package for a step on the CPU.
    assert estimate.peak_allocated_bytes == pytest.approx(held + peak_of(steps), rel=0.02)
