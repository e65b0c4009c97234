"""When fragmentation is told, and the setting that mends it, read back by the simulated allocator's own reader."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.observe.fragmentation import environment_line, find_fragmentation
from lightning_memprec.memory.observe.reading import Reading

GIB = 2**30


def reading(allocated, reserved, used, capacity=24):
    return Reading(
        peak_allocated_bytes=allocated * GIB,
        peak_reserved_bytes=reserved * GIB,
        device_used_bytes=used * GIB,
        capacity_bytes=capacity * GIB,
    )


@pytest.mark.parametrize(
    ("allocated", "reserved", "used", "lost"),
    [
        (15, 22, 23, 7),
        (15, 22, 16, None),  # Eight are free: the seven are not needed.
        (21, 23, 24, None),  # A full device, well used.
        (20, 20, 24, None),
    ],
    ids=["lost_more_than_free", "room_left", "little_lost", "nothing_lost"],
)
def test_fragmentation_counts_where_it_takes_more_than_is_left(allocated, reserved, used, lost):
    found = find_fragmentation(reading(allocated, reserved, used))
    assert (None if found is None else found.lost_bytes // GIB) == lost


@pytest.mark.parametrize(
    "name", ["peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "capacity_bytes"]
)
def test_nothing_is_said_where_a_figure_is_unknown(name):
    assert find_fragmentation(replace(reading(15, 22, 23), **{name: None})) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"},
        {
            "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        },
        {"PYTORCH_CUDA_ALLOC_CONF": ""},
        {"PYTORCH_ALLOC_CONF": "expandable_segments:False,roundup_power2_divisions:[256:1,512:2,>:4]"},
    ],
    ids=["none", "new_name", "old_name_hides", "old_name_empty", "turned_off"],
)
def test_the_line_turns_growing_segments_on_and_keeps_the_rest(environ):
    before = AllocatorConfig.from_environment(environ)
    name, _, value = environment_line(environ).partition("=")
    after = AllocatorConfig.from_environment({**environ, name: value})
    assert after == replace(before, expandable_segments=True)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_there_is_no_line_where_they_are_on(name):
    assert environment_line({name: "max_split_size_mb:128, expandable_segments:True"}) is None
