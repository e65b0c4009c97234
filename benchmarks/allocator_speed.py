"""Time replays of the simulated CUDA caching allocator: events per second, with and without memory pressure.

Run: ``python -m benchmarks.allocator_speed [--events 100000]``. The events imitate training: parameters that stay,
activations born in the forward pass and freed in reverse in the backward pass, temporaries in between.
"""

from __future__ import annotations

import argparse
import random
import time

from benchmarks._machine import describe_machine
from lightning_memprec.memory.allocator import minimum_capacity, simulate
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.events import MemoryEvents, StorageRecord

_MIB = 2**20
_LAYERS = 500


def training_events(count: int, seed: int = 0) -> MemoryEvents:
    """Return about ``count`` births and deaths of steps over a deep model with varying sizes."""
    random_ = random.Random(seed)
    events = MemoryEvents()

    def birth(size_bytes: int) -> int:
        storage = len(events.storages)
        events.storages.append(StorageRecord(size_bytes, 0, 0, False, len(events.order)))
        events.order.append(storage)
        return storage

    def death(storage: int) -> None:
        events.order.append(~storage)

    def size() -> int:
        return int(2 ** random_.uniform(8, 25))

    for _ in range(4 * _LAYERS):
        birth(size())
    while len(events.order) < count:
        saved = []
        for _ in range(_LAYERS):
            temporary = birth(size())
            saved += [birth(size()) for _ in range(3)]
            death(temporary)
        gradients = []
        while saved:
            gradients.append(birth(size()))
            temporary = birth(size())
            death(saved.pop())
            death(temporary)
        for gradient in gradients:
            death(gradient)
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of them counts")
    options = parser.parse_args()
    print(describe_machine())
    events = training_events(options.events)
    count = len(events.order)
    for name, config in {
        "default": AllocatorConfig(),
        "max_split_size_mb:20": AllocatorConfig(max_split_size_bytes=20 * _MIB),
        "expandable_segments:True": AllocatorConfig(expandable_segments=True),
    }.items():
        start = time.perf_counter()
        capacity_bytes = minimum_capacity(events, config)
        search_seconds = time.perf_counter() - start
        for limit, capacity in {"no limit": None, "smallest capacity": capacity_bytes}.items():
            seconds = []
            for _ in range(options.repeats):
                start = time.perf_counter()
                result = simulate(events, config=config, capacity_bytes=capacity)
                seconds.append(time.perf_counter() - start)
            print(
                f"{name:26s} {limit:18s} {count / min(seconds):>10,.0f} events/s  {min(seconds):.3f} s for {count:,d}"
                f"  allocated {result.peak_allocated_bytes / 2**30:.2f} GiB"
                f"  reserved {result.peak_reserved_bytes / 2**30:.2f} GiB  {result.retries} retries"
            )
        print(f"{name:26s} minimum_capacity   {search_seconds:.2f} s: {capacity_bytes / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
