"""What a device tells of its memory at one instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Reading", "reading_from_stats"]

_PREFIX = "memprec/memory/"


@dataclass(frozen=True)
class Reading:
    """Memory of one device and of this process; ``None`` where nothing tells.

    Args:
        allocated_bytes: Tensors that are alive.
        reserved_bytes: What the caching allocator holds of the device.
        peak_allocated_bytes: Largest ``allocated_bytes`` since the process began, or since the peak was reset.
        peak_reserved_bytes: Largest ``reserved_bytes`` likewise.
        active_bytes: Allocated, or freed and still waiting for another stream.
        inactive_split_bytes: Free parts of segments that are in use elsewhere: fragmentation, which cannot be
            given back.
        alloc_retries_count: How often an allocation failed and succeeded after the cache was given back.
        capacity_bytes: Memory of the device.
        device_used_bytes: What the driver says is in use, by all processes.
        outside_allocator_bytes: What this process holds beside its allocator: context, kernels, libraries.
        other_processes_bytes: What other processes hold of the device.
        host_rss_bytes: Memory of the machine that this process has resident.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries_count: int | None = None
    capacity_bytes: int | None = None
    device_used_bytes: int | None = None
    outside_allocator_bytes: int | None = None
    other_processes_bytes: int | None = None
    host_rss_bytes: int | None = None

    def metrics(self) -> dict[str, float]:
        """Return the figures by logged key; what is unknown is left out.

        Example:
            >>> Reading(allocated_bytes=512).metrics()
            {'memprec/memory/allocated_bytes': 512.0}
        """
        return {_PREFIX + name: float(value) for name in _NAMES if (value := getattr(self, name)) is not None}


_NAMES = tuple(field.name for field in fields(Reading))


def reading_from_stats(
    stats: Mapping[str, Any],
    *,
    free_bytes: int,
    capacity_bytes: int,
    outside_bytes: int | None = None,
    host_rss_bytes: int | None = None,
) -> Reading:
    """Turn the statistics of a caching allocator into a reading.

    Args:
        stats: What ``torch.cuda.memory_stats_as_nested_dict`` returns; empty before the device is first used.
        free_bytes: What the driver says is free.
        capacity_bytes: What it says there is.
        outside_bytes: What this process holds beside the allocator, if that is known.
        host_rss_bytes: Resident memory of this process.

    Example:
        >>> pool = {"all": {"current": 512, "peak": 1024}}
        >>> stats = {name: pool for name in ("allocated_bytes", "reserved_bytes", "active_bytes")}
        >>> stats |= {"inactive_split_bytes": pool, "num_alloc_retries": 0}
        >>> reading_from_stats(stats, free_bytes=10_000, capacity_bytes=16_000).peak_allocated_bytes
        1024
    """

    def figure(name: str, kind: str) -> int:
        return int(stats[name]["all"][kind]) if stats else 0

    reserved_bytes, used_bytes = figure("reserved_bytes", "current"), capacity_bytes - free_bytes
    others = None if outside_bytes is None else max(0, used_bytes - reserved_bytes - outside_bytes)
    return Reading(
        allocated_bytes=figure("allocated_bytes", "current"),
        reserved_bytes=reserved_bytes,
        peak_allocated_bytes=figure("allocated_bytes", "peak"),
        peak_reserved_bytes=figure("reserved_bytes", "peak"),
        active_bytes=figure("active_bytes", "current"),
        inactive_split_bytes=figure("inactive_split_bytes", "current"),
        alloc_retries_count=int(stats["num_alloc_retries"]) if stats else 0,
        capacity_bytes=capacity_bytes,
        device_used_bytes=used_bytes,
        outside_allocator_bytes=outside_bytes,
        other_processes_bytes=others,
        host_rss_bytes=host_rss_bytes,
    )
