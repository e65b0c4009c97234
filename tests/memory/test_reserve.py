"""What the estimate says of the caching allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.memory.allocator import simulate
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.steady import with_more_steps

MIB = 1024**2


def _estimate(device="cuda"):
    # Weights of 6.5 MiB: three to a segment of 20 MiB, with a rest.
    batch = torch.empty(500, 1300, device="meta")
    return estimate_memory(
        lambda: nn.Sequential(*[nn.Linear(1300, 1300) for _ in range(8)]),
        batch,
        optimizer=torch.optim.Adam,
        device=device,
    )


def test_cuda_figures_are_those_of_a_replay():
    estimate = _estimate()
    replay = simulate(with_more_steps(estimate.events))
    assert estimate.peak_allocated_bytes == replay.peak_allocated_bytes
    assert estimate.peak_reserved_bytes == replay.peak_reserved_bytes
    assert estimate.breakdown.total_bytes <= estimate.peak_allocated_bytes <= estimate.minimum_reserved_bytes
    assert estimate.minimum_reserved_bytes <= estimate.peak_reserved_bytes


def test_minimum_is_a_capacity_on_which_the_run_survives_and_2_mib_less_is_not():
    estimate = _estimate()
    enough = estimate.minimum_reserved_bytes
    events = with_more_steps(estimate.events)
    assert simulate(events, capacity_bytes=enough).out_of_memory_event is None
    assert simulate(events, capacity_bytes=enough - 2 * MIB).out_of_memory_event is not None


def test_the_allocator_is_set_up_as_the_environment_says(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    before = _estimate()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    after = _estimate()
    assert after.peak_reserved_bytes < before.peak_reserved_bytes
    assert after.breakdown == before.breakdown


@pytest.mark.parametrize("setting", ["backend:cudaMallocAsync", "max_split_size_mb:many"])
def test_an_allocator_that_cannot_be_simulated_is_named_and_left_out(monkeypatch, setting):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    estimate = _estimate()
    assert estimate.peak_reserved_bytes == estimate.breakdown.total_bytes
    note = next(a for a in estimate.assumptions if a.name == "allocator")
    assert "not simulated" in note.text
    assert setting.partition(":")[2] in note.text


def test_the_cpu_has_no_reserve():
    estimate = _estimate("cpu")
    assert estimate.peak_reserved_bytes == estimate.minimum_device_bytes == estimate.peak_allocated_bytes
