"""Which series of samples count as growth, against a rule written down a second time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memprec.memory.observe.growth import DEVICE_RULE, HOST_RULE, Growth, GrowthRule, GrowthWatch

MIB = 2**20


def alarms(rule, samples):
    watch = GrowthWatch(rule)
    return [growth for step, size in samples if (growth := watch.observe(step, size)) is not None]


@given(
    sizes=st.lists(st.integers(0, 40), max_size=40),
    rises=st.integers(1, 5),
    samples=st.integers(1, 3),
    rate=st.integers(0, 6),
    total=st.integers(0, 20),
)
def test_alarms_are_those_of_the_rule(sizes, rises, samples, rate, total):
    steps = [2 * index for index in range(len(sizes))]
    ends = range(samples - 1, len(sizes), samples)
    floors = [(steps[end], min(sizes[end + 1 - samples : end + 1])) for end in ends]
    expected = []
    for end in range(rises, len(floors)):
        window = floors[end - rises : end + 1]
        is_rising = all(a[1] < b[1] for a, b in itertools.pairwise(window))
        (first_step, low), (last_step, high) = window[0], window[-1]
        if is_rising and high - low >= total and (high - low) / (last_step - first_step) >= rate:
            expected.append(Growth(first_step, last_step, low, high))
            break  # Told once.
    assert alarms(GrowthRule(rises, samples, rate, total), zip(steps, sizes, strict=True)) == expected


@pytest.mark.parametrize(
    "sizes",
    [
        [100 * MIB] * 50,
        [MIB * (100 + step % 7) for step in range(50)],  # Batches of different sizes.
        [MIB * min(step, 12) for step in range(50)],  # States, workspaces and caches of the first steps.
        [100 * MIB + 512 * step for step in range(50)],  # A list of detached losses.
        [MIB * (50 - step) for step in range(50)],
    ],
    ids=["steady", "wobbling", "warm_up", "losses", "falling"],
)
def test_ordinary_runs_are_quiet(sizes):
    assert alarms(DEVICE_RULE, enumerate(sizes)) == []


@pytest.mark.parametrize("every", [1, 50])
def test_a_leak_is_told_once_with_its_rate(every):
    samples = [(every * index, 100 * MIB + 4096 * every * index) for index in range(40)]
    (growth,) = alarms(DEVICE_RULE, samples)
    assert growth.bytes_per_step == 4096
    assert growth.last_step == 16 * every


def test_resident_memory_must_rise_by_more():
    assert alarms(HOST_RULE, ((step, 300 * MIB + MIB * step) for step in range(60))) == []
    (growth,) = alarms(HOST_RULE, ((step, 300 * MIB + 5 * MIB * step) for step in range(60)))
    assert growth.last_step == 35


# Resident memory of a CPU run that keeps 16 MiB a step, in MiB, read from Linux.
LEAKING = [
    877, 941, 1021, 1037, 1085, 1133, 1133, 1037, 1053, 1053, 1085, 1069, 1069, 1085, 1117, 1117, 1149, 1181, 1197,
    1197, 1213, 1229, 1245, 1277,
]  # fmt: skip


def test_resident_memory_may_go_up_and_down_on_its_way():
    later = [LEAKING[-12:][index % 12] + 208 * (index // 12 + 1) for index in range(12)]
    (growth,) = alarms(HOST_RULE, enumerate(MIB * size for size in LEAKING + later))
    assert growth.last_step == 35
    up_and_down = [1000 + 40 * (step % 5) for step in range(100)]
    assert alarms(HOST_RULE, enumerate(MIB * size for size in up_and_down)) == []


def test_suspicion_comes_one_sample_before_the_alarm():
    watch = GrowthWatch(GrowthRule(rises=3))
    seen = []
    for step, size in enumerate([10, 20, 30, 40, 50]):
        seen.append((watch.is_suspicious, watch.observe(step, size) is not None))
    assert seen == [(False, False), (False, False), (False, False), (True, True), (False, False)]
