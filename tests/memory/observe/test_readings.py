"""What a device tells: arithmetic on the allocator's statistics, and figures of this process."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch

from lightning_memprec.memory.observe.host import host_rss_bytes
from lightning_memprec.memory.observe.meters import (
    AllocatorMeter,
    CpuMeter,
    MpsMeter,
    meter_for,
    own_device_bytes,
)
from lightning_memprec.memory.observe.reading import Reading, reading_from_stats

MIB = 2**20
FIGURES = {
    "allocated_bytes": (3 * MIB, 5 * MIB),
    "reserved_bytes": (8 * MIB, 10 * MIB),
    "active_bytes": (4 * MIB, 6 * MIB),
    "inactive_split_bytes": (1 * MIB, 2 * MIB),
}


def stats():
    """Build what ``torch.cuda.memory_stats_as_nested_dict`` returns."""
    nested = {
        name: {"all": {"current": current, "peak": peak, "allocated": 99 * MIB, "freed": 90 * MIB}}
        for name, (current, peak) in FIGURES.items()
    }
    return {**nested, "num_alloc_retries": 7, "num_ooms": 1}


def test_figures_of_the_allocator():
    reading = reading_from_stats(stats(), free_bytes=20 * MIB, capacity_bytes=64 * MIB, host_rss_bytes=5)
    assert reading == Reading(
        allocated_bytes=3 * MIB,
        reserved_bytes=8 * MIB,
        peak_allocated_bytes=5 * MIB,
        peak_reserved_bytes=10 * MIB,
        active_bytes=4 * MIB,
        inactive_split_bytes=1 * MIB,
        alloc_retries_count=7,
        capacity_bytes=64 * MIB,
        device_used_bytes=44 * MIB,
        host_rss_bytes=5,
    )


def test_keys_are_those_that_torch_documents():
    documented = torch.cuda.memory_stats.__doc__
    assert all(f'``"{name}.{{all,large_pool,small_pool}}' in documented for name in FIGURES)
    assert '``"num_alloc_retries"``' in documented


def test_share_of_other_processes():
    # 44 in use, of which this process has 8 reserved and 6 beside the allocator.
    known = {"free_bytes": 20 * MIB, "capacity_bytes": 64 * MIB}
    assert reading_from_stats(stats(), outside_bytes=6 * MIB, **known).other_processes_bytes == 30 * MIB
    # The driver and the allocator are asked one after the other; never below nothing.
    assert reading_from_stats(stats(), outside_bytes=60 * MIB, **known).other_processes_bytes == 0
    assert reading_from_stats(stats(), **known).other_processes_bytes is None


def test_nothing_is_held_before_the_device_is_first_used():
    reading = reading_from_stats({}, free_bytes=60 * MIB, capacity_bytes=64 * MIB)
    assert (reading.allocated_bytes, reading.peak_reserved_bytes, reading.alloc_retries_count) == (0, 0, 0)
    assert reading.device_used_bytes == 4 * MIB


def test_metrics_leave_out_what_is_unknown():
    assert Reading(host_rss_bytes=3, reserved_bytes=0).metrics() == {
        "memprec/memory/host_rss_bytes": 3.0,
        "memprec/memory/reserved_bytes": 0.0,
    }


@pytest.mark.parametrize("api", [torch.cuda, torch.xpu], ids=["cuda", "xpu"])
def test_meter_asks_functions_that_torch_has(api):
    assert {"memory_stats_as_nested_dict", "mem_get_info"} <= set(api.__all__)


def test_meter_asks_the_allocator_and_the_driver():
    api = types.SimpleNamespace(
        mem_get_info=lambda device: (20 * MIB, 64 * MIB), memory_stats_as_nested_dict=lambda device: stats()
    )
    reading = AllocatorMeter(torch.device("xpu"), api).read()
    assert (reading.peak_allocated_bytes, reading.device_used_bytes) == (5 * MIB, 44 * MIB)
    assert reading.host_rss_bytes > MIB


@pytest.mark.parametrize(
    ("device", "kind"),
    [("cpu", CpuMeter), ("cuda", AllocatorMeter), ("xpu", AllocatorMeter), ("mps", MpsMeter), ("hpu", CpuMeter)],
)  # fmt: skip
def test_each_device_has_its_meter(device, kind):
    assert type(meter_for(torch.device(device))) is kind


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_is_that_of_the_kernel():
    status = Path("/proc/self/status").read_text()
    kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])
    # The kernel's two counts may lag by a batch of pages for each thread.
    assert host_rss_bytes() == pytest.approx(kib * 1024, abs=32 * MIB)


def test_resident_memory_elsewhere_is_asked_of_psutil(monkeypatch):
    memory = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=5 * MIB))
    monkeypatch.setitem(sys.modules, "psutil", types.SimpleNamespace(Process=lambda: memory))
    monkeypatch.setattr("lightning_memprec.memory.observe.host.is_installed", lambda package: True)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_rss_bytes() == 5 * MIB


class NVMLError(Exception):
    pass


def nvml(monkeypatch, processes):
    """Put a driver in place that knows one device, and processes as (pid, bytes)."""

    def handle(uuid):
        if uuid != "GPU-1234":
            raise NVMLError("not found")
        return "handle"

    module = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetComputeRunningProcesses=lambda device: [
            types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)


@pytest.mark.parametrize(
    ("uuid", "processes", "known"),
    [
        ("1234", [(1, 9 * MIB), (os.getpid(), 7 * MIB)], 7 * MIB),
        ("GPU-1234", [(os.getpid(), 7 * MIB)], 7 * MIB),
        ("1234", [(1, 9 * MIB)], None),  # A container's process numbers are others.
        ("1234", [(os.getpid(), None)], None),  # The driver does not tell.
        ("5678", [(os.getpid(), 7 * MIB)], None),  # A slice of a device.
    ],
    ids=["own", "prefixed", "other_pid", "untold", "unknown_device"],
)
def test_own_memory_on_the_device(monkeypatch, uuid, processes, known):
    nvml(monkeypatch, processes)
    assert own_device_bytes(uuid) == known


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_readings_of_a_real_device():
    device = torch.device("cuda", 0)
    meter, kept = meter_for(device), torch.empty(3 * MIB, device=device)
    reading = meter.read()
    assert reading.allocated_bytes == torch.cuda.memory_allocated(device) >= kept.nbytes
    assert reading.peak_reserved_bytes == torch.cuda.max_memory_reserved(device)
    assert reading.inactive_split_bytes == torch.cuda.memory_stats(device)["inactive_split_bytes.all.current"]
