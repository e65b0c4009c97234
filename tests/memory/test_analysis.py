"""Bookkeeping over events written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprec.memory.analysis import analyse
from lightning_memprec.memory.events import MemoryEvents, StorageRecord
from lightning_memprec.memory.result import Breakdown


class Script:
    """Writes events as a recorder would."""

    def __init__(self):
        self.events = MemoryEvents(phases=[("setup", -1, 0)], modules=["", "a", "a.b"])

    def phase(self, name, step=0):
        self.events.phases.append((name, step, len(self.events.order)))

    def birth(self, size_bytes, category=None, owner=None, module=0, grad_enabled=True):
        events = self.events
        record = StorageRecord(size_bytes, len(events.phases) - 1, module, grad_enabled, len(events.order))
        record.category, record.owner = category, owner
        events.storages.append(record)
        events.order.append(len(events.storages) - 1)
        return len(events.storages) - 1

    def death(self, index):
        self.events.storages[index].death = len(self.events.order)
        self.events.order.append(~index)


def training_step():
    script = Script()
    script.birth(100, "parameters", "a.weight")
    script.birth(8, "buffers", "a.b.mean")
    script.phase("batch_transfer")
    script.birth(16, "inputs")
    script.phase("forward")
    temporary = script.birth(30, module=1)
    activation = script.birth(50, module=2)
    script.death(temporary)
    script.phase("backward")
    recomputed = script.birth(7, module=2, grad_enabled=True)
    gradient = script.birth(100, "gradients", "a.weight", grad_enabled=False)
    script.birth(3, module=1, grad_enabled=False)
    script.death(activation)
    script.death(recomputed)
    script.phase("optimizer_step")
    script.birth(200, "optimizer states", "a.weight", grad_enabled=False)
    script.death(gradient)
    return script.events


def test_peak_parts_and_phases_of_a_step():
    result = analyse(training_step())
    assert result.peak_bytes == 100 + 8 + 16 + 100 + 3 + 200
    assert (result.peak_phase.name, result.peak_phase.step) == ("optimizer_step", 0)
    assert result.breakdown == Breakdown(
        parameters_bytes=100,
        buffers_bytes=8,
        inputs_bytes=16,
        gradients_bytes=100,
        temporaries_bytes=3,
        optimizer_states_bytes=200,
    )
    assert [(p.name, p.peak_allocated_bytes) for p in result.phases] == [
        ("setup", 108),
        ("batch_transfer", 124),
        ("forward", 204),
        ("backward", 284),
        ("optimizer_step", 427),
    ]


def test_at_the_end_of_forward_what_dies_in_it_is_temporary_and_what_outlives_it_is_an_activation():
    events = training_step()
    events.storages[-1].size_bytes = 0  # Without states the peak falls in backward.
    result = analyse(events)
    assert result.peak_phase.name == "backward"
    assert result.breakdown.activations_bytes == 50 + 7  # kept, and recomputed by a checkpoint
    assert result.breakdown.temporaries_bytes == 3


def test_bytes_belong_to_the_owner_or_to_the_module_that_was_running():
    modules = {m.name: m.breakdown.total_bytes for m in analyse(training_step()).by_module}
    assert modules == {"a": 100 + 100 + 200 + 3, "a.b": 8, "": 16}


def test_modules_come_largest_first_with_their_class():
    by_module = analyse(training_step(), module_types={"a": "Linear"}).by_module
    assert [m.name for m in by_module] == ["a", "", "a.b"]
    assert by_module[0].type_name == "Linear"


def test_sizes_are_rounded_up_to_the_allocators_blocks():
    script = Script()
    for size_bytes in (1, 511, 512, 513):
        script.birth(size_bytes, "parameters")
    assert analyse(script.events, granularity_bytes=512).peak_bytes == 512 * 5
    assert analyse(script.events).peak_bytes == 1537


def test_micro_batches_of_one_step_share_their_phases():
    script = Script()
    for size_bytes in (10, 40, 20):
        script.phase("forward", 0)
        script.death(script.birth(size_bytes))
    assert [(p.name, p.step, p.peak_allocated_bytes) for p in analyse(script.events).phases] == [
        ("setup", -1, 0),
        ("forward", 0, 40),
    ]


def test_an_empty_trace_is_an_empty_estimate():
    result = analyse(MemoryEvents(phases=[("setup", -1, 0)]))
    assert result.peak_bytes == 0
    assert result.breakdown.total_bytes == 0


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([1, 512]),
)
def test_parts_modules_and_timeline_agree_with_a_running_sum(sizes, granularity_bytes):
    script, alive, total, peak = Script(), [], 0, 0
    for number, (size_bytes, dies) in enumerate(sizes):
        if number % 7 == 3:
            script.phase("forward", number)
        rounded = -(-size_bytes // granularity_bytes) * granularity_bytes
        alive.append((script.birth(size_bytes, module=number % 3), rounded))
        total += rounded
        peak = max(peak, total)
        if dies:
            index, rounded = alive.pop(0)
            script.death(index)
            total -= rounded
    result = analyse(script.events, granularity_bytes=granularity_bytes)
    assert result.peak_bytes == peak == result.breakdown.total_bytes
    assert sum(m.breakdown.total_bytes for m in result.by_module) == peak
    assert max(p.allocated_bytes for p in result.timeline) == peak
    assert max(p.peak_allocated_bytes for p in result.phases) == peak


def test_a_long_timeline_is_thinned_and_keeps_the_peak():
    script = Script()
    for number in range(5000):
        script.death(script.birth(1000 if number == 3210 else 1))
    result = analyse(script.events)
    assert len(result.timeline) <= 401
    assert max(point.allocated_bytes for point in result.timeline) == 1000
    assert [point.event for point in result.timeline] == sorted(point.event for point in result.timeline)


def test_a_phase_starts_with_what_was_there():
    script = Script()
    script.birth(100, "parameters")
    script.phase("forward")
    assert analyse(script.events).phases[-1].peak_allocated_bytes == pytest.approx(100)
