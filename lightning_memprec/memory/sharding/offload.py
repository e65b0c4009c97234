"""What lives in host memory is taken out of a device's events."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from lightning_memprec.memory.events import MemoryEvents, StorageRecord

__all__ = ["split_host"]


def split_host(events: MemoryEvents, on_host: set[int]) -> tuple[MemoryEvents, int]:
    """Take storages that live in host memory out of a trace.

    Args:
        events: What was recorded, as if all lived on the device.
        on_host: Numbers of the storages that do not.

    Returns:
        The events of the device, and the largest sum of the others without temporaries, in bytes.

    Example:
        >>> from lightning_memprec.memory.events import StorageRecord
        >>> records = [StorageRecord(size, 0, 0, True, k) for k, size in enumerate((512, 1024))]
        >>> records[0].category = "optimizer states"
        >>> device, host_bytes = split_host(MemoryEvents(records, [0, 1, ~0, ~1], [("forward", 0, 0)]), {0})
        >>> device.order, host_bytes
        ([0, -1], 512)
    """
    number: dict[int, int] = {}
    storages: list[StorageRecord] = []
    order: list[int] = []
    starts: list[int] = []
    host_bytes = peak_bytes = 0
    for event in events.order:
        starts.append(len(order))
        k = event if event >= 0 else ~event
        if k in on_host:
            record = events.storages[k]
            # A CPU steps one parameter after the other: temporaries of a whole step are the device's way.
            size_bytes = 0 if record.category is None else record.size_bytes
            host_bytes += size_bytes if event >= 0 else -size_bytes
            peak_bytes = max(peak_bytes, host_bytes)
            continue
        if event >= 0:
            number[k] = len(storages)
            record = copy(events.storages[k])
            record.birth, record.death = len(order), -1
            storages.append(record)
        else:
            storages[number[k]].death = len(order)
        order.append(number[k] if event >= 0 else ~number[k])
    starts.append(len(order))
    phases = [(name, step, starts[first]) for name, step, first in events.phases]
    return replace(events, storages=storages, order=order, phases=phases), peak_bytes
