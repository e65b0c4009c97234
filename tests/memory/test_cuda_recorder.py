"""What a CUDA estimate adds for kernels and libraries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.workspaces import cublas_workspace_bytes


def _workspaces(module, batch, device="A100-40GB"):
    return estimate_memory(module, batch, device=device).breakdown.workspaces_bytes


@pytest.mark.parametrize(("device", "capability"), [("A100-40GB", (8, 0)), ("H100-80GB", (9, 0))])
def test_each_thread_that_multiplies_keeps_one_workspace(device, capability):
    # Large enough that the peak falls in backward, where both threads have multiplied.
    batch = torch.empty(2**16, 512, device="meta")
    deep = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to("meta")
    assert _workspaces(deep, batch, device) == 2 * cublas_workspace_bytes(capability)


def test_a_step_without_products_keeps_none():
    assert _workspaces(nn.LayerNorm(512), torch.empty(64, 512, device="meta")) == 0


def test_the_cpu_has_none():
    assert _workspaces(nn.Linear(8, 8), torch.empty(4, 8), "cpu") == 0


def test_where_convolutions_workspaces_come_from_is_said():
    estimate = estimate_memory(nn.Conv2d(3, 8, 3), torch.empty(2, 3, 16, 16), device="A100-40GB")
    note = next(a for a in estimate.assumptions if a.name == "library_workspaces")
    assert "cuDNN" in note.text
