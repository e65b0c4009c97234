"""Memory that a caching allocator holds and cannot use: when it matters, and the setting that mends it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_memprec.memory.observe.reading import Reading

__all__ = ["Fragmentation", "environment_line", "find_fragmentation"]

# Twice the preflight's default safety margin: what is told could have changed its verdict.
_LEAST_FRACTION = 0.1
_OLD_NAME, _NAME = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
_SETTING = "expandable_segments:True"


@dataclass(frozen=True)
class Fragmentation:
    """What is lost.

    Args:
        lost_bytes: Reserved at the peak, and needed by no tensor even then.
        reserved_bytes: Reserved at the peak.
        allocated_bytes: Allocated at the peak.
        free_bytes: What the device still has free.
    """

    lost_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    free_bytes: int


def find_fragmentation(reading: Reading) -> Fragmentation | None:
    """Tell whether fragmentation brings a run near the end of the device's memory.

    What the allocator reserved at its peak beyond the largest sum of tensors is lost to fragmentation. It counts
    where it is a tenth of the reserved memory and more than all that the device has left: with less lost than
    left, the run does not need it.

    Args:
        reading: What the device tells.

    Returns:
        What is lost, or ``None`` where it does not count or nothing is known.

    Example:
        >>> gib = 2**30
        >>> known = {"capacity_bytes": 24 * gib, "device_used_bytes": 23 * gib}
        >>> reading = Reading(peak_allocated_bytes=15 * gib, peak_reserved_bytes=22 * gib, **known)
        >>> find_fragmentation(reading).lost_bytes // gib
        7
    """
    allocated, reserved = reading.peak_allocated_bytes, reading.peak_reserved_bytes
    capacity, used = reading.capacity_bytes, reading.device_used_bytes
    if allocated is None or reserved is None or capacity is None or used is None:
        return None
    lost, free = reserved - allocated, capacity - used
    if lost < _LEAST_FRACTION * reserved or lost <= free:
        return None
    return Fragmentation(lost, reserved, allocated, free)


def environment_line(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the line that turns growing segments on, other settings kept.

    ``PYTORCH_CUDA_ALLOC_CONF`` hides ``PYTORCH_ALLOC_CONF`` wherever it is set (``AcceleratorAllocatorConfig``
    in c10/core/AllocatorConfig.h), so that one is extended then.

    Args:
        environ: Environment variables by name.

    Returns:
        The line, or ``None`` if the setting is on already.

    Example:
        >>> environment_line({})
        'PYTORCH_ALLOC_CONF=expandable_segments:True'
        >>> environment_line({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
        'PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True'
    """
    name = _OLD_NAME if _OLD_NAME in environ else _NAME
    entries = [entry for entry in environ.get(name, "").replace(" ", "").split(",") if entry]
    if _SETTING in entries:
        return None
    kept = [entry for entry in entries if not entry.startswith("expandable_segments:")]
    return f"{name}={','.join([*kept, _SETTING])}"
