"""The largest sum of live tensors, from the CPU allocator's own events."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], Any]) -> int:
    """Return the largest sum of the allocations that ``run`` makes, in bytes above what lived before."""
    gc.collect()
    gc.disable()  # A collection in the middle would free cycles at an instant that depends on earlier runs.
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            run()
    finally:
        gc.enable()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        live += size
        peak = max(peak, live)
    return peak
