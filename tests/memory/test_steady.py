"""Steps that are repeated instead of traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memprec.memory.allocator import minimum_capacity, simulate
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.events import MemoryEvents, StorageRecord
from lightning_memprec.memory.steady import with_more_steps


def _trace(steps, *, optimizer=torch.optim.Adam, **options):
    """A convolution net whose sizes leave rests in segments, with gradients kept through the forward pass."""

    def build():
        layers = [nn.Conv2d(w, w + 24, 3, padding=1) for w in (8, 32, 56)]
        return nn.Sequential(
            *[m for c in layers for m in (c, nn.GELU())], nn.Flatten(), nn.Linear(80 * 576, 100)
        )

    batch = torch.empty(50, 8, 24, 24, device="meta")
    return estimate_memory(build, batch, optimizer=optimizer, device="cuda", steps=steps, **options).events


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_repeated_steps_are_those_that_a_trace_records(optimizer, accumulate):
    repeated = with_more_steps(_trace(2, optimizer=optimizer, accumulate_grad_batches=accumulate))
    traced = _trace(4, optimizer=optimizer, accumulate_grad_batches=accumulate)
    assert len(repeated.order) == len(traced.order)
    assert simulate(repeated).peak_reserved_bytes == simulate(traced).peak_reserved_bytes
    assert simulate(repeated).peak_allocated_bytes == simulate(traced).peak_allocated_bytes
    assert minimum_capacity(repeated) == minimum_capacity(traced)


def test_every_storage_is_born_once_and_dies_at_most_once():
    order = with_more_steps(_trace(2)).order
    births, deaths = [k for k in order if k >= 0], [~k for k in order if k < 0]
    assert len(set(births)) == len(births)
    assert len(set(deaths)) == len(deaths)
    seen = set()
    for k in order:
        assert k >= 0 or ~k in seen
        seen.add(k)


def test_what_follows_the_last_step_ends_the_last_repetition():
    """A gradient outlives its step; a validation that follows releases it."""
    storages = [StorageRecord(512, 0, 0, True, birth) for birth in (0, 1, 3)]
    phases = [("setup", -1, 0), ("forward", 0, 0), ("forward", 1, 1), ("validation", 2, 3)]
    events = MemoryEvents(storages, [0, 1, ~0, 2, ~1, ~2], phases)
    assert with_more_steps(events, more=1).order == [0, 1, ~0, 3, ~1, 2, ~3, ~2]


def test_a_first_step_is_not_repeated():
    """It leaves optimizer states behind, which it did not find."""
    events = _trace(1)
    assert with_more_steps(events) is events
