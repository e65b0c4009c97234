"""Multi-layer perceptrons."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.memory.zoo.case import Case, adamw

__all__ = ["CASES"]


def _mlp(batch: int, width: int, layers: int) -> tuple[nn.Module, Any]:
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*blocks, nn.Linear(width, 100)), (
        torch.randn(batch, width),
        torch.randint(100, (batch,)),
    )


CASES = [
    Case(name="mlp", family="mlp", build=partial(_mlp, 2048, 1024, 6), optimizer=adamw),
    Case(
        name="mlp_bf16_mixed_accumulate_sgd",
        family="mlp",
        build=partial(_mlp, 2048, 1024, 4),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        precision="bf16-mixed",
        accumulate=2,
    ),
    Case(
        name="mlp_lbfgs",
        family="mlp",
        build=partial(_mlp, 1024, 512, 4),
        # Zero tolerances: every step takes its three iterations, whatever the values.
        optimizer=partial(
            torch.optim.LBFGS, lr=0.01, max_iter=3, history_size=4, tolerance_grad=0.0, tolerance_change=0.0
        ),
    ),
]
