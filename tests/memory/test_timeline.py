"""The parts over time, against a count from scratch."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from torch import nn

from lightning_memprec import estimate_memory
from lightning_memprec.memory.analysis import analyse, categories
from lightning_memprec.memory.events import MemoryEvents, StorageRecord
from lightning_memprec.memory.result import Breakdown

CATEGORIES = [f.name.removesuffix("_bytes").replace("_", " ") for f in fields(Breakdown)]


def random_events(count, phases, seed=0):
    """Births and deaths at random, with every category."""
    pick = random.Random(seed)
    events = MemoryEvents(phases=[])
    alive = []
    for event in range(count):
        if event % -(-count // phases) == 0:
            events.phases.append((f"phase_{len(events.phases) % 3}", len(events.phases) // 3, event))
        if alive and pick.random() < 0.45:
            k = alive.pop(pick.randrange(len(alive)))
            events.storages[k].death = event
            events.order.append(~k)
        else:
            record = StorageRecord(pick.randrange(1, 10_000), len(events.phases) - 1, 0, True, event)
            record.category = pick.choice(CATEGORIES)
            alive.append(len(events.storages))
            events.order.append(len(events.storages))
            events.storages.append(record)
    return events


def counted(events, event, granularity):
    """Count what lives after an event from the records alone."""
    sizes = dict.fromkeys(CATEGORIES, 0)
    for category, record in zip(categories(events), events.storages, strict=True):
        if record.birth <= event and not -1 < record.death <= event:
            sizes[category] += -(-record.size_bytes // granularity) * granularity
    return list(sizes.items())


@pytest.mark.parametrize("granularity", [1, 512])
@pytest.mark.parametrize(("count", "phases"), [(1, 1), (7, 3), (399, 2), (1200, 1), (3000, 40)])
def test_every_point_is_what_lives_and_every_peak_is_kept(count, phases, granularity):
    events = random_events(count, phases)
    analysis = analyse(events, granularity_bytes=granularity)
    points = analysis.timeline
    assert len(points) <= 400 + phases
    assert [p.event for p in points] == sorted({p.event for p in points})
    for point in points[:: max(1, len(points) // 40)]:
        assert point.breakdown.items() == counted(events, point.event, granularity)
        name, step, _ = next(phase for phase in reversed(events.phases) if phase[2] <= point.event)
        assert (point.phase, point.step) == (name, step)
    peak = max(points, key=lambda point: point.allocated_bytes)
    assert peak.breakdown == analysis.breakdown
    assert peak.allocated_bytes == analysis.peak_bytes
    # The highest event of each phase is a point of its own.
    ends = [first for _, _, first in events.phases[1:]] + [count]
    for (_, _, first), end in zip(events.phases, ends, strict=True):
        highest = max(
            sum(size for _, size in counted(events, e, granularity))
            for e in range(first, end, max(1, count // 300))
        )
        assert max(p.allocated_bytes for p in points if first <= p.event < end) >= highest


def test_a_trace_ends_before_the_model_dies():
    estimate = estimate_memory(
        lambda: nn.Linear(64, 64), torch.empty(8, 64), optimizer=torch.optim.Adam, device="cpu"
    )
    last = estimate.timeline[-1].breakdown
    assert last.parameters_bytes == estimate.breakdown.parameters_bytes
    # What the estimate keeps does not change when the traced module is collected.
    died = {~k for k in estimate.events.order if k < 0}
    parameters = [k for k, s in enumerate(estimate.events.storages) if s.category == "parameters"]
    assert parameters
    assert not died & set(parameters)
