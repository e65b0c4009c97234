"""The phases around the steps, and what the allocator holds in each."""

from __future__ import annotations

import pytest
import torch

from lightning_memprec.memory.allocator import simulate
from lightning_memprec.memory.estimate import estimate_memory
from lightning_memprec.memory.events import MemoryEvents, StorageRecord
from lightning_memprec.memory.phases import with_outer_phases, with_reserved
from lightning_memprec.memory.reserve import allocator_reserve
from lightning_memprec.memory.result import PhasePeak
from tests.memory.small_lightning import DEVICES, IN, X, module_with

MIB = 2**20


def events_of(*phases):
    """Each phase is ``(name, step, changes)``; a change is a size to be born, or the negative number of a death."""
    events = MemoryEvents()
    for name, step, changes in phases:
        events.phases.append((name, step, len(events.order)))
        for change in changes:
            if change < 0:
                events.storages[-change - 1].death = len(events.order)
                events.order.append(~(-change - 1))
            else:
                record = StorageRecord(change, len(events.phases) - 1, 0, True, len(events.order))
                events.storages.append(record)
                events.order.append(len(events.storages) - 1)
    return events


@pytest.fixture(autouse=True)
def _plain_allocator(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_reserved_of_a_phase_is_the_most_held_while_it_lasted():
    events = events_of(
        ("setup", -1, [30 * MIB]),
        ("forward", 0, [40 * MIB, -2]),  # what is freed stays reserved
        ("backward", 0, [10 * MIB]),
        ("forward", 1, [100 * MIB]),
        ("backward", 1, []),
    )
    keys = [(name, step) for name, step, _ in events.phases]
    phases = with_reserved([PhasePeak(name, step, 0) for name, step in keys], allocator_reserve(events, 0))
    assert {key: p.peak_reserved_bytes // MIB for key, p in zip(keys, phases, strict=True)} == {
        ("setup", -1): 30,
        ("forward", 0): 70,
        ("backward", 0): 70,
        ("forward", 1): 170,
        ("backward", 1): 170,
    }


def test_phases_that_were_not_traced_have_no_reserve():
    (phase,) = with_reserved(
        [PhasePeak("resume", -1, 5)], allocator_reserve(events_of(("setup", -1, [MIB])), 0)
    )
    assert phase == PhasePeak("resume", -1, 5)


def test_allocator_that_is_not_simulated_leaves_reserve_unknown(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    (phase,) = with_reserved(
        [PhasePeak("setup", -1, 5)], allocator_reserve(events_of(("setup", -1, [MIB])), 0)
    )
    assert phase.peak_reserved_bytes is None


@pytest.mark.parametrize("granularity", [1, 512])
def test_states_come_after_the_sanity_check_and_with_a_resume(granularity):
    events = events_of(("setup", -1, [1000]), ("optimizer_step", 0, [300, 300]), ("validation", 0, [5000]))
    for record, category in zip(
        events.storages, ("parameters", *["optimizer states"] * 2, None), strict=True
    ):
        record.category = category
    states = 2 * -(-300 // granularity) * granularity
    traced = [
        PhasePeak("setup", -1, 1000),
        PhasePeak("optimizer_step", 0, 1600),
        PhasePeak("validation", 0, 9000),
    ]
    phases = with_outer_phases(traced, events, granularity_bytes=granularity, sanity_check=True)
    assert [(p.name, p.peak_allocated_bytes) for p in phases] == [
        ("setup", 1000),
        ("sanity_validation", 9000 - states),
        ("optimizer_step", 1600),
        ("validation", 9000),
        ("resume", 1000 + states),
    ]
    assert "sanity_validation" not in {p.name for p in with_outer_phases(traced, events)}


@pytest.mark.parametrize("device", DEVICES)
def test_phases_of_a_run_in_order_with_the_peak_among_them(device):
    def validation_step(self, batch, batch_idx):
        self.net(batch)

    module = module_with(validation_step=validation_step)
    estimate = estimate_memory(module, X, device=device, validation_batch=torch.randn(8, IN))
    names = list(dict.fromkeys(phase.name for phase in estimate.phases))
    assert names == [
        "setup", "sanity_validation", "batch_transfer", "forward", "backward", "optimizer_step", "validation",
        "checkpoint_save", "resume",
    ]  # fmt: skip
    assert estimate.peak_phase.peak_allocated_bytes == max(p.peak_allocated_bytes for p in estimate.phases)
    reserved = [p.peak_reserved_bytes for p in estimate.phases if p.peak_reserved_bytes is not None]
    if device == "cpu":
        assert not reserved
    else:
        assert max(reserved) == estimate.peak_reserved_bytes == simulate(estimate.events).peak_reserved_bytes
        assert reserved == sorted(reserved)  # Without pressure nothing is given back.


def test_the_most_that_any_phase_reserves_is_what_the_whole_run_reserves():
    estimate = estimate_memory(
        torch.nn.Sequential(torch.nn.Linear(300, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 300)),
        torch.empty(64, 300),
        optimizer=torch.optim.Adam,
        device="A100-40GB",
    )
    reserved = [phase.peak_reserved_bytes for phase in estimate.phases]
    assert max(value for value in reserved if value is not None) == estimate.peak_reserved_bytes
