"""Ask a device for its memory, without waiting for it."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any, Protocol

import torch

from lightning_memprec._optional import is_installed
from lightning_memprec.memory.observe.host import host_rss_bytes
from lightning_memprec.memory.observe.reading import Reading, reading_from_stats

__all__ = ["AllocatorMeter", "CpuMeter", "DeviceMeter", "MpsMeter", "meter_for", "own_device_bytes"]


class DeviceMeter(Protocol):
    """Reads the memory of one device.

    Attributes:
        granularity_bytes: Every tensor takes a multiple of it.
    """

    granularity_bytes: int

    def read(self) -> Reading:
        """Return what the device tells now."""

    def ask_driver(self) -> None:
        """Find out what this process holds beside its allocator; too slow for every reading."""


class AllocatorMeter:
    """A device with a caching allocator: CUDA (ROCm under the same name) or XPU.

    Args:
        device: The device.
        api: ``torch.cuda`` or ``torch.xpu``.
    """

    # c10/cuda/CUDACachingAllocator.cpp and c10/xpu/XPUCachingAllocator.cpp, kMinBlockSize.
    granularity_bytes = 512

    def __init__(self, device: torch.device, api: ModuleType) -> None:
        self._device = device
        self._api: Any = api
        self._outside_bytes: int | None = None

    def read(self) -> Reading:
        """Read the allocator's counters, and what the driver says is free."""
        free_bytes, capacity_bytes = self._api.mem_get_info(self._device)
        return reading_from_stats(
            self._api.memory_stats_as_nested_dict(self._device),
            free_bytes=free_bytes,
            capacity_bytes=capacity_bytes,
            outside_bytes=self._outside_bytes,
            host_rss_bytes=host_rss_bytes(),
        )

    def ask_driver(self) -> None:
        """Ask NVML, where it is installed, what this process holds."""
        if self._api is not torch.cuda or not is_installed("pynvml"):
            return
        uuid = getattr(torch.cuda.get_device_properties(self._device), "uuid", None)
        own_bytes = None if uuid is None else own_device_bytes(str(uuid))
        if own_bytes is not None:
            self._outside_bytes = max(0, own_bytes - torch.cuda.memory_reserved(self._device))


class MpsMeter:
    """Apple's GPU: no peaks, and no count of fragmentation."""

    granularity_bytes = 1

    def read(self) -> Reading:
        """Read what Metal tells."""
        return Reading(
            allocated_bytes=torch.mps.current_allocated_memory(),
            reserved_bytes=torch.mps.driver_allocated_memory(),
            capacity_bytes=torch.mps.recommended_max_memory(),
            host_rss_bytes=host_rss_bytes(),
        )

    def ask_driver(self) -> None:
        """Do nothing: the driver tells the same."""


class CpuMeter:
    """The CPU: torch's allocator there keeps no count, only resident memory is known."""

    granularity_bytes = 1

    def read(self) -> Reading:
        """Read the resident memory of this process."""
        return Reading(host_rss_bytes=host_rss_bytes())

    def ask_driver(self) -> None:
        """Do nothing: there is none."""


def meter_for(device: torch.device) -> DeviceMeter:
    """Return what reads a device; one of an unknown kind is read as a CPU.

    Args:
        device: The device of a run.
    """
    if device.type == "cuda":
        return AllocatorMeter(device, torch.cuda)
    if device.type == "xpu":
        return AllocatorMeter(device, torch.xpu)
    return MpsMeter() if device.type == "mps" else CpuMeter()


def own_device_bytes(uuid: str) -> int | None:
    """Ask NVML (package nvidia-ml-py) what this process holds of an NVIDIA device, context included.

    Args:
        uuid: The device, as ``torch.cuda.get_device_properties`` names it.

    Returns:
        The size in bytes; ``None`` if NVML does not tell, as in containers with process numbers of their own.
    """
    import pynvml  # type: ignore[import-not-found,unused-ignore]

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    sizes = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return int(sizes[0]) if sizes and sizes[0] else None
