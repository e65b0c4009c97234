"""The simulated CUDA caching allocator: sequences worked by hand, a naive twin, and what must always hold."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memprec.memory.allocator import minimum_capacity, simulate
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.allocator_expandable import ExpandableAllocator
from lightning_memprec.memory.allocator_segments import SegmentAllocator, round_size
from lightning_memprec.memory.events import MemoryEvents, StorageRecord
from tests.memory.naive_allocator import FAR, NaiveAllocator, naive_round

KIB, MIB = 2**10, 2**20
EXPANDABLE = AllocatorConfig(expandable_segments=True)


def script(*steps):
    """Turn ``("a", size)`` into a birth and ``"a"`` into the death of the last storage called so."""
    events, numbers = MemoryEvents(), {}
    for step in steps:
        if isinstance(step, str):
            events.order.append(~numbers[step])
        else:
            numbers[step[0]] = len(events.storages)
            events.storages.append(StorageRecord(step[1], 0, 0, False, len(events.order)))
            events.order.append(numbers[step[0]])
    return events


def run(*steps, capacity=None, **settings_):
    return simulate(script(*steps), config=AllocatorConfig(**settings_), capacity_bytes=capacity)


# -- rounding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (MIB + 1, 0, MIB + 512),
        (1200, 4, 1536),  # not above 512 * 4, so to 512 bytes
        (2049, 4, 2560),  # the steps of 2048 are 512
        (1200 * MIB, 4, 1280 * MIB),  # the example in roundup_power2_next_division
        (1024 * MIB, 4, 1024 * MIB),
        (1025 * MIB, 2, 1536 * MIB),
        (2047 * MIB, 4, 2048 * MIB),
    ],
)
def test_request_is_rounded(size, divisions, rounded):
    assert round_size(size, AllocatorConfig(roundup_power2_divisions=(divisions,) * 16)) == rounded


@given(st.integers(1, 2**40), st.sampled_from([0, 1, 2, 4, 8, 64, 1024]))
def test_rounding_agrees_with_the_naive_one(size, divisions):
    config = AllocatorConfig(roundup_power2_divisions=(divisions,) * 16)
    rounded = round_size(size, config)
    assert rounded == naive_round(size, divisions)
    assert rounded >= size
    assert rounded % 512 == 0
    assert round_size(rounded, config) == rounded


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (300 * KIB, 384 * KIB),  # below 1 MiB the first interval holds
        (3 * MIB + 1, 3 * MIB + 512),  # [2, 4) MiB: 0
        (5 * MIB + 1, 5 * MIB + 512),  # [4, 8) MiB: 1
        (9 * MIB, 10 * MIB),
        (130 * 2**30, 160 * 2**30),  # the last interval holds above 64 GiB
    ],
)
def test_steps_depend_on_the_interval(size, rounded):
    config = AllocatorConfig(roundup_power2_divisions=(2, 0, 1, *(4,) * 13))
    assert round_size(size, config) == rounded


# -- segments, pools, best fit, split, merge ----------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segment_follows_from_the_request(size, segment):
    result = run(("a", size))
    assert result.peak_reserved_bytes == segment
    assert result.segment_allocations == 1
    assert result.peak_requested_bytes == size


def test_nothing_is_reserved_for_no_bytes():
    assert run(("a", 0), "a") == run()
    assert run().peak_reserved_bytes == 0


def test_small_requests_share_a_segment_until_it_is_full():
    result = run(*((str(k), MIB) for k in range(3)))
    assert result.reserved_changes == ((0, 2 * MIB), (2, 4 * MIB))
    assert result.inactive_split_at_peak_bytes == MIB


def test_small_and_large_requests_share_nothing():
    result = run(("large", 2 * MIB), ("small", 512))
    assert result.peak_reserved_bytes == 22 * MIB
    assert result.inactive_split_at_peak_bytes == 18 * MIB + 2 * MIB - 512


@pytest.mark.parametrize(
    ("second", "allocated"),
    [(10 * MIB, 20 * MIB), (10 * MIB - 512, 19 * MIB - 512)],  # 1 MiB is left, then 512 bytes more
)
def test_large_block_keeps_a_rest_of_up_to_one_mebibyte(second, allocated):
    result = run(("a", 9 * MIB), ("b", second))
    assert result.peak_reserved_bytes == 20 * MIB
    assert result.peak_allocated_bytes == allocated
    assert result.peak_requested_bytes == 9 * MIB + second
    assert result.inactive_split_at_peak_bytes == 20 * MIB - allocated


def test_small_block_keeps_no_rest():
    result = run(("a", MIB), ("b", MIB - 512))
    assert result.peak_allocated_bytes == 2 * MIB - 512
    assert result.inactive_split_at_peak_bytes == 512


def test_freed_memory_stays_reserved_and_is_used_again():
    result = run(("a", 30 * MIB), "a", ("b", 30 * MIB), "b", ("c", 29 * MIB))
    assert result.reserved_changes == ((0, 30 * MIB),)
    assert result.peak_allocated_bytes == 30 * MIB  # c keeps its rest of 1 MiB, as a and b had none


def test_best_fit_is_the_smallest_block_that_holds_the_request():
    # A first fit would put c into the 40 MiB and then need a third segment for d.
    result = run(("a", 40 * MIB), ("b", 30 * MIB), "a", "b", ("c", 25 * MIB), ("d", 40 * MIB))
    assert result.peak_reserved_bytes == 70 * MIB


def test_lowest_address_breaks_a_tie():
    allocator = SegmentAllocator(AllocatorConfig())
    blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
    for k in (2, 0, 1):
        allocator.free(blocks[k])
    assert allocator.allocate(30 * MIB) is blocks[0]


def test_neighbors_are_merged():
    parts = [(str(k), 5 * MIB) for k in range(4)]
    result = run(*parts, "0", "2", "1", ("a", 15 * MIB))
    assert result.peak_reserved_bytes == 20 * MIB
    apart = run(*parts, "0", "2", ("a", 10 * MIB))
    assert apart.peak_reserved_bytes == 30 * MIB  # 10 MiB are free, but not in one piece


def test_segments_are_not_merged():
    result = run(("a", 20 * MIB), ("b", 20 * MIB), "a", "b", ("c", 40 * MIB))
    assert result.peak_reserved_bytes == 80 * MIB


def test_inactive_split_bytes_are_those_of_segments_in_use():
    # The second segment is wholly free at the peak: cached, but not split.
    result = run(("a", 5 * MIB), ("b", 30 * MIB), "b", ("c", 31 * MIB))
    assert result.peak_allocated_bytes == 5 * MIB + 32 * MIB
    assert result.reserved_at_peak_bytes == 20 * MIB + 30 * MIB + 32 * MIB
    assert result.inactive_split_at_peak_bytes == 15 * MIB


def test_reserved_at_the_allocated_peak_may_be_less_than_its_own_peak():
    # At the allocated peak 60 MiB are in use; later a request that fits nowhere adds a segment.
    result = run(("a", 30 * MIB), ("b", 30 * MIB), "a", "b", ("c", 50 * MIB))
    assert result.peak_allocated_bytes == result.reserved_at_peak_bytes == 60 * MIB
    assert result.peak_reserved_bytes == 110 * MIB


def test_large_segment_size_is_a_setting():
    assert run(("a", 5 * MIB), large_segment_bytes=12 * MIB).peak_reserved_bytes == 12 * MIB
    assert run(("a", 11 * MIB), large_segment_bytes=64 * MIB).peak_reserved_bytes == 12 * MIB


# -- max_split_size_mb --------------------------------------------------------------------------------


def test_oversize_block_is_not_split():
    result = run(("a", 60 * MIB), "a", ("b", 50 * MIB), max_split_size_bytes=30 * MIB)
    assert result.peak_reserved_bytes == 60 * MIB
    assert result.peak_allocated_bytes == 60 * MIB


def test_oversize_block_is_not_given_to_a_smaller_request():
    result = run(("a", 60 * MIB), "a", ("b", 25 * MIB), max_split_size_bytes=30 * MIB)
    assert result.peak_reserved_bytes == 60 * MIB + 26 * MIB


def test_oversize_block_may_exceed_the_request_by_less_than_the_rounding():
    fits = run(("a", 60 * MIB), "a", ("b", 40 * MIB + 512), max_split_size_bytes=30 * MIB)
    assert fits.peak_reserved_bytes == 60 * MIB
    too_large = run(("a", 60 * MIB), "a", ("b", 40 * MIB), max_split_size_bytes=30 * MIB)
    assert too_large.peak_reserved_bytes == 100 * MIB
    set_higher = run(
        ("a", 60 * MIB),
        "a",
        ("b", 40 * MIB),
        max_split_size_bytes=30 * MIB,
        max_non_split_rounding_bytes=21 * MIB,
    )
    assert set_higher.peak_reserved_bytes == 60 * MIB


# -- pressure -----------------------------------------------------------------------------------------


def test_cached_segments_are_given_back_under_pressure():
    result = run(("a", 60 * MIB), "a", ("b", 80 * MIB), capacity=100 * MIB)
    assert result.out_of_memory_event is None
    assert result.reserved_changes == ((0, 60 * MIB), (2, 80 * MIB))
    assert result.retries == 1


def test_split_segments_are_not_given_back():
    result = run(("a", 5 * MIB), ("b", 15 * MIB), "b", ("c", 90 * MIB), capacity=100 * MIB)
    assert result.out_of_memory_event == 3
    assert result.retries == 1
    assert result.peak_allocated_bytes == 20 * MIB


def test_a_run_dies_where_the_capacity_ends():
    result = run(("a", 60 * MIB), ("b", 40 * MIB), ("c", 1), capacity=100 * MIB)
    assert result.out_of_memory_event == 2
    assert result.peak_reserved_bytes == 100 * MIB
    assert result.peak_requested_bytes == 100 * MIB


def test_cached_small_segments_are_given_back_too():
    small = [(str(k), MIB) for k in range(20)]
    result = run(*small, *(name for name, _ in small), ("a", 90 * MIB), capacity=100 * MIB)
    assert result.out_of_memory_event is None
    assert result.reserved_changes[-1][1] == 90 * MIB


def test_just_enough_oversize_blocks_are_given_back_first():
    cached = (("a", 40 * MIB), ("b", 60 * MIB), ("c", 80 * MIB), "a", "b", "c")
    one = run(*cached, ("d", 5 * MIB), capacity=190 * MIB, max_split_size_bytes=30 * MIB)
    assert one.reserved_changes[-1] == (6, 180 * MIB - 40 * MIB + 20 * MIB)  # the smallest that is oversize
    assert one.retries == 0
    several = run(*cached, ("d", 120 * MIB), capacity=200 * MIB, max_split_size_bytes=30 * MIB)
    assert several.reserved_changes[-1] == (6, 40 * MIB + 120 * MIB)  # the two largest
    assert several.retries == 0
    not_enough = run(*cached, ("d", 190 * MIB), capacity=200 * MIB, max_split_size_bytes=30 * MIB)
    assert not_enough.reserved_changes[-1] == (6, 190 * MIB)
    assert not_enough.retries == 1


def test_fraction_of_the_capacity_is_a_limit():
    steps = (("a", 40 * MIB), ("b", 20 * MIB))
    assert run(*steps, capacity=100 * MIB, per_process_memory_fraction=0.5).out_of_memory_event == 1
    assert run(*steps, capacity=100 * MIB, per_process_memory_fraction=0.6).out_of_memory_event is None


GARBAGE = (("a", 30 * MIB), "a", ("b", 32 * MIB), "b", ("c", 40 * MIB))


def test_garbage_collection_frees_what_is_older_than_the_mean():
    result = run(
        *GARBAGE, capacity=200 * MIB, per_process_memory_fraction=0.5, garbage_collection_threshold=0.6
    )
    # 62 of 60 MiB: a has waited for 2 lookups, b for 1, so that only a goes.
    assert result.reserved_changes == ((0, 30 * MIB), (2, 62 * MIB), (4, 72 * MIB))
    assert result.retries == 0


def test_garbage_is_not_collected_below_the_threshold_or_without_a_fraction():
    below = run(
        *GARBAGE, capacity=220 * MIB, per_process_memory_fraction=0.5, garbage_collection_threshold=0.6
    )
    assert below.peak_reserved_bytes == 102 * MIB
    without = run(*GARBAGE, capacity=103 * MIB, garbage_collection_threshold=0.6)
    assert without.peak_reserved_bytes == 102 * MIB


# -- expandable segments ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "reserved"), [(512, 2), (MIB + 1, 20), (20 * MIB, 20), (20 * MIB + 1, 40)])
def test_expandable_segment_grows_by_pages(size, reserved):
    assert run(("a", size), expandable_segments=True).peak_reserved_bytes == reserved * MIB


def test_page_of_the_large_pool_is_a_setting():
    result = run(("a", 11 * MIB), expandable_segments=True, large_segment_bytes=12 * MIB)
    assert result.peak_reserved_bytes == 12 * MIB


def test_expandable_segment_maps_only_what_free_memory_at_its_end_lacks():
    result = run(("a", 5 * MIB), ("b", 10 * MIB), ("c", 10 * MIB), expandable_segments=True)
    assert result.reserved_changes == ((0, 20 * MIB), (2, 40 * MIB))
    assert result.peak_allocated_bytes == 25 * MIB  # rests of 512 bytes are split off
    assert result.inactive_split_at_peak_bytes == 0


def test_expandable_segment_serves_what_fits_no_single_segment():
    steps = (("a", 20 * MIB), ("b", 20 * MIB), "a", "b", ("c", 40 * MIB))
    assert run(*steps).peak_reserved_bytes == 80 * MIB
    assert run(*steps, expandable_segments=True).peak_reserved_bytes == 40 * MIB


def test_free_pages_are_unmapped_under_pressure():
    steps = (("a", 20 * MIB), ("b", 20 * MIB), "a", ("c", MIB))
    result = run(*steps, expandable_segments=True, capacity=40 * MIB)
    assert result.reserved_changes == ((0, 20 * MIB), (1, 40 * MIB), (3, 22 * MIB))
    assert result.retries == 1
    # The hole is filled before the segment grows.
    allocator = ExpandableAllocator(EXPANDABLE, 42 * MIB)
    first, _ = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    allocator._release_cached()
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.allocate(5 * MIB).address == 0


def test_pages_in_part_in_use_stay_mapped():
    result = run(
        ("a", 15 * MIB), ("b", 30 * MIB), "a", ("c", 20 * MIB), expandable_segments=True, capacity=60 * MIB
    )
    # a and b share the first page, so that nothing can be unmapped for c.
    assert result.out_of_memory_event == 3


def test_fraction_counts_a_whole_segment_even_where_a_page_would_do():
    steps = (("a", 5 * MIB), ("b", 21 * MIB))
    result = run(*steps, expandable_segments=True, capacity=82 * MIB, per_process_memory_fraction=0.5)
    assert result.out_of_memory_event == 1  # 20 MiB reserved and 22 asked for; 41 allowed
    assert run(*steps, expandable_segments=True, capacity=40 * MIB).out_of_memory_event is None


# -- any sequence -------------------------------------------------------------------------------------

# Few sizes, so that blocks are used again, on both sides of every limit of the rules.
SIZES = st.one_of(
    st.integers(1, 2 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 5 * MIB, 9 * MIB, 10 * MIB - 512, 10 * MIB, 15 * MIB]),
    st.sampled_from([n * MIB for n in (19, 20, 21, 22, 30, 31, 32, 40, 41, 42, 50, 61, 62, 64, 90)]),
)
STEPS = st.lists(st.one_of(SIZES, st.integers(-1000, -1)), max_size=80)
LIMITS = st.one_of(st.none(), st.integers(20, 250).map(lambda n: n * MIB))


CONFIGS = {
    "default": {},
    "divisions": {"roundup_power2_divisions": (4,) * 16},
    "max split": {"max_split_size_bytes": 20 * MIB},
    "max split and rounding": {"max_split_size_bytes": 30 * MIB, "max_non_split_rounding_bytes": 32 * MIB},
    "large segment": {"large_segment_bytes": 11 * MIB, "max_split_size_bytes": 21 * MIB},
    "garbage": {"garbage_collection_threshold": 0.5, "per_process_memory_fraction": 0.9},
    "garbage, max split": {
        "garbage_collection_threshold": 0.3,
        "per_process_memory_fraction": 0.5,
        "max_split_size_bytes": 40 * MIB,
    },
    "expandable": {"expandable_segments": True},
    "expandable, small pages": {"expandable_segments": True, "large_segment_bytes": 11 * MIB},
    "expandable, max split": {"expandable_segments": True, "max_split_size_bytes": 20 * MIB},
    "expandable, fraction": {
        "expandable_segments": True,
        "per_process_memory_fraction": 0.7,
        "garbage_collection_threshold": 0.1,
    },
}
configs = st.sampled_from([AllocatorConfig(**values) for values in CONFIGS.values()])


def events_of(steps):
    """A positive number is a birth; a negative one a death of one of those alive."""
    events, alive = MemoryEvents(), []
    for step in steps:
        if step > 0:
            alive.append(len(events.storages))
            events.order.append(len(events.storages))
            events.storages.append(StorageRecord(step, 0, 0, False, len(events.order) - 1))
        elif alive:
            events.order.append(~alive.pop(step % len(alive)))
    return events


def play(events, config, capacity):
    """Yield the allocator and the blocks in use after each event, until memory runs out."""
    kind = ExpandableAllocator if config.expandable_segments else SegmentAllocator
    allocator, live = kind(config, capacity), {}
    for storage in events.order:
        if storage < 0:
            allocator.free(live.pop(~storage))
        else:
            block = allocator.allocate(round_size(events.storages[storage].size_bytes, config))
            if block is None:
                return
            live[storage] = block
        yield allocator, live


def naive(config, capacity):
    has_fraction = capacity is not None and config.per_process_memory_fraction < 1
    return NaiveAllocator(
        capacity=FAR if capacity is None else capacity,
        allowed=int(config.per_process_memory_fraction * capacity) if has_fraction else FAR,
        max_split=config.max_split_size_bytes or FAR,
        rounding=config.max_non_split_rounding_bytes,
        large_segment=config.large_segment_bytes,
        threshold=config.garbage_collection_threshold,
        expandable=config.expandable_segments,
    )


@settings(max_examples=200, deadline=None)
@given(STEPS, configs, LIMITS)
def test_any_sequence_goes_as_in_the_naive_allocator(steps, config, capacity):
    assert_as_in_the_naive_allocator(events_of(steps), config, capacity)


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS)
def test_long_sequence_goes_as_in_the_naive_allocator(values):
    config = AllocatorConfig(**values)
    random_ = random.Random(0)
    sizes = [
        n * MIB + rest for n in (0, 0, 0, 1, 5, 9, 15, 19, 20, 21, 22, 30, 31, 40, 62) for rest in (0, 512, 1)
    ]
    for _ in range(40):
        # Births and deaths are about as frequent, so that memory is used again.
        steps = [
            random_.choice(sizes[1:]) if random_.random() < 0.55 else -random_.randrange(1, 1000)
            for _ in range(150)
        ]
        events = events_of(steps)
        needed = minimum_capacity(events, config)
        for share in (0.95, 1.0, 1.1):  # Just too little, and just enough: the pressure path is taken often.
            assert_as_in_the_naive_allocator(events, config, int(share * needed))


def assert_as_in_the_naive_allocator(events, config, capacity):
    twin = naive(config, capacity)
    peak, at_peak = 0, (0, 0)
    failed = None
    changes = []
    played = play(events, config, capacity)
    for event, storage in enumerate(events.order):
        before = twin.reserved
        if storage < 0:
            twin.free(~storage)
        elif not twin.malloc(
            storage, naive_round(events.storages[storage].size_bytes, config.divisions_for(1))
        ):
            failed = event
        if twin.reserved != before:
            changes.append((event, twin.reserved))
        if failed is not None:
            break
        allocator, live = next(played)
        assert {
            k: (b.pool.is_small, b.address, b.address + b.size_bytes) for k, b in live.items()
        } == twin.live
        assert (allocator.reserved_bytes, allocator.retries) == (twin.reserved, twin.retries)
        if not config.expandable_segments:
            assert allocator.inactive_split_bytes == twin.inactive_split
        if twin.allocated > peak:
            peak, at_peak = twin.allocated, (twin.reserved, twin.inactive_split)
    result = simulate(events, config=config, capacity_bytes=capacity)
    assert result.out_of_memory_event == failed
    assert result.peak_allocated_bytes == peak
    assert result.reserved_at_peak_bytes == at_peak[0]
    assert result.inactive_split_at_peak_bytes == (0 if config.expandable_segments else at_peak[1])
    assert result.reserved_changes == tuple(changes)
    assert result.peak_reserved_bytes == max([size for _, size in changes], default=0)
    assert (result.retries, result.segment_allocations) == (twin.retries, twin.driver_calls)


def blocks_of(allocator, live):
    """Return the blocks of every segment, in order, as they are linked."""
    heads = {}
    for block in [*live.values(), *(block for pool in allocator.pools for block in pool)]:
        while block.before is not None:
            block = block.before
        heads[id(block)] = block
    segments = []
    for head in heads.values():
        segments.append([head])
        while segments[-1][-1].after is not None:
            segments[-1].append(segments[-1][-1].after)
    return segments


@settings(max_examples=200, deadline=None)
@given(STEPS, configs, LIMITS)
def test_blocks_tile_their_segments(steps, config, capacity):
    for allocator, live in play(events_of(steps), config, capacity):
        in_use = {id(block) for block in live.values()}
        cached = {id(block) for pool in allocator.pools for block in pool}
        mapped_bytes = 0
        for segment in blocks_of(allocator, live):
            for block, following in pairwise(segment):
                assert block.address + block.size_bytes == following.address
                assert following.before is block
                assert not (block.is_free and following.is_free)  # they would have been merged
                assert block.is_mapped or following.is_mapped
            for block in segment:
                assert [id(block) in in_use, id(block) in cached, not block.is_mapped].count(True) == 1
                mapped_bytes += block.size_bytes if block.is_mapped else 0
        assert mapped_bytes == allocator.reserved_bytes


@settings(max_examples=200, deadline=None)
@given(STEPS, configs, LIMITS)
def test_sizes_are_in_order(steps, config, capacity):
    events = events_of(steps)
    result = simulate(events, config=config, capacity_bytes=capacity)
    assert result.peak_requested_bytes <= result.peak_allocated_bytes <= result.peak_reserved_bytes
    assert result.peak_allocated_bytes + result.inactive_split_at_peak_bytes <= result.reserved_at_peak_bytes
    assert result.reserved_at_peak_bytes <= result.peak_reserved_bytes <= (capacity or FAR)
    assert simulate(events, config=config, capacity_bytes=capacity) == result


# -- the smallest capacity ----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(STEPS, configs)
def test_events_run_on_the_minimum_capacity_and_not_on_less(steps, config):
    events = events_of(steps)
    capacity = minimum_capacity(events, config)
    result = simulate(events, config=config, capacity_bytes=capacity)
    assert result.out_of_memory_event is None
    assert capacity % (2 * MIB) == 0
    if capacity:
        less = simulate(events, config=config, capacity_bytes=capacity - 2 * MIB)
        assert less.out_of_memory_event is not None


def test_minimum_capacity_is_less_than_what_is_reserved_without_a_limit():
    events = script(("a", 60 * MIB), "a", ("b", 80 * MIB), "b", ("c", 70 * MIB), ("d", 20 * MIB))
    assert simulate(events).peak_reserved_bytes == 140 * MIB
    assert minimum_capacity(events) == 100 * MIB  # a's segment went for b's, and d needs one of its own


def test_minimum_capacity_counts_what_cannot_be_given_back():
    events = script(("a", 15 * MIB), ("b", 4 * MIB), "a", ("c", 30 * MIB))
    assert minimum_capacity(events) == 20 * MIB + 30 * MIB  # b holds its segment, a's can go


def test_minimum_capacity_allows_for_the_fraction():
    events = script(("a", 30 * MIB))
    assert minimum_capacity(events, AllocatorConfig(per_process_memory_fraction=0.5)) == 60 * MIB


def test_minimum_capacity_needs_a_fraction_above_zero():
    with pytest.raises(ValueError, match="is 0, so no capacity"):
        minimum_capacity(script(("a", 1)), AllocatorConfig(per_process_memory_fraction=0.0))


@pytest.mark.parametrize("function", [lambda e, c: simulate(e, config=c), minimum_capacity])
def test_other_backend_is_refused(function):
    with pytest.raises(ValueError, match="not 'cudaMallocAsync'"):
        function(script(("a", 1)), AllocatorConfig(backend="cudaMallocAsync"))


class TestOptionalSizes:
    """A convolution whose workspace finds no memory takes an algorithm that needs less."""

    @staticmethod
    def _events(smallest_bytes):
        tensor, workspace = (
            StorageRecord(size * MIB, 0, 0, False, birth) for size, birth in ((30, 0), (40, 1))
        )
        workspace.smallest_bytes = smallest_bytes
        return MemoryEvents([tensor, workspace], [0, 1, ~1, ~0])

    def test_without_a_limit_the_first_choice_is_taken(self):
        assert simulate(self._events(0)).peak_reserved_bytes == 70 * MIB

    @pytest.mark.parametrize(
        ("smallest_bytes", "capacity_mib"), [(None, 70), (0, 32), (10 * MIB, 40), (40 * MIB, 70)]
    )
    def test_under_pressure_it_does_with_less(self, smallest_bytes, capacity_mib):
        assert minimum_capacity(self._events(smallest_bytes)) == capacity_mib * MIB
