"""What a real step allocates, phase by phase: the CPU allocator's events, or the CUDA allocator's own peaks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["CpuMeter", "CudaMeter", "Meter", "Phase", "Watch"]

_MARK = "lightning_memprec.phase"
_KINETO_LEVEL = "KINETO_LOG_LEVEL"


@dataclass
class Phase:
    """One phase of one step.

    Args:
        name: As in :class:`~lightning_memprec.memory.result.PhasePeak`.
        step: Optimizer step, counted from 0; -1 before the first.
        held: Bytes of gradients and of optimizer states when it began.
        start_bytes: Live tensors when it began.
        peak_bytes: Largest sum of live tensors while it lasted.
        reserved_bytes: What the caching allocator then held at most; ``None`` without one.
        events: What was allocated (above zero) and freed (below) one after the other; empty where that is not known.
    """

    name: str
    step: int
    held: tuple[int, int] = (0, 0)
    start_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int | None = None
    events: tuple[int, ...] = ()


class Meter(Protocol):
    """Measures between ``start`` and ``stop``."""

    def start(self, base_bytes: int) -> None:
        """Begin; ``base_bytes`` of the run's own tensors live already."""

    def next_phase(self) -> None:
        """End a phase and begin the next."""

    def stop(self, phases: list[Phase]) -> None:
        """Fill in what the phases took."""


class CpuMeter:
    """Takes the events that the CPU allocator reports to the profiler.

    Buffers that oneDNN, MKL and other libraries take from the system's own allocator are not among them.
    """

    def start(self, base_bytes: int) -> None:
        """Begin to listen."""
        self._base_bytes = base_bytes
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        with _quiet_kineto():
            self._profile.__enter__()  # type: ignore[no-untyped-call]

    def next_phase(self) -> None:
        """Leave a mark among the events."""
        with record_function(_MARK):
            pass

    def stop(self, phases: list[Phase]) -> None:
        """Divide the events by the marks, and add them up."""
        with _quiet_kineto():
            self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        events: list[Any] = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        wanted = [event for event in events if event.name() in ("[memory]", _MARK)]
        changes: list[list[int]] = [[]]
        for event in sorted(wanted, key=lambda event: event.start_ns()):
            if event.name() == _MARK:
                changes.append([])
            elif event.device_type() == DeviceType.CPU:
                changes[-1].append(event.nbytes())
        live = self._base_bytes
        for phase, inside in zip(phases, changes, strict=True):
            totals = list(itertools.accumulate(inside, initial=live))
            phase.start_bytes, phase.peak_bytes, phase.events = live, max(totals), tuple(inside)
            live = totals[-1]


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler's library from writing that it started, stopped, and found no GPU."""
    before = os.environ.get(_KINETO_LEVEL)
    os.environ.setdefault(_KINETO_LEVEL, "6")  # Above its errors, which are 5.
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_KINETO_LEVEL, None)


class CudaMeter:
    """Reads the peaks that the CUDA caching allocator keeps itself.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readings: list[tuple[int, int, int]] = []

    def start(self, base_bytes: int) -> None:
        """Begin from an empty cache."""
        torch.cuda.empty_cache()
        self._foreign_bytes = torch.cuda.memory_allocated(self._device) - base_bytes
        self._begin()

    def _begin(self) -> None:
        self._start_bytes = torch.cuda.memory_allocated(self._device) - self._foreign_bytes
        torch.cuda.reset_peak_memory_stats(self._device)

    def next_phase(self) -> None:
        """Read the peaks of the phase that ends."""
        allocated = torch.cuda.max_memory_allocated(self._device) - self._foreign_bytes
        reserved = torch.cuda.max_memory_reserved(self._device) - self._foreign_bytes
        self._readings.append((self._start_bytes, allocated, reserved))
        self._begin()

    def stop(self, phases: list[Phase]) -> None:
        """Read the last peaks, and give the cache back, so that the run starts from the same allocator."""
        self.next_phase()
        torch.cuda.empty_cache()
        for phase, reading in zip(phases, self._readings, strict=True):
            phase.start_bytes, phase.peak_bytes, phase.reserved_bytes = reading


@dataclass
class Watch:
    """What the training loop tells of itself, in place of the recorder of a trace.

    Args:
        meter: Told of every phase.
        held: Returns the bytes of gradients and of optimizer states at the moment.
    """

    meter: Meter
    held: Callable[[], tuple[int, int]]
    phases: list[Phase] = field(default_factory=lambda: [Phase("setup", -1)])
    events: Any = field(default_factory=lambda: SimpleNamespace(storages=[]))
    on_unknown: Any = None

    def enter_phase(self, name: str, step: int) -> None:
        """Begin a phase."""
        self.phases.append(Phase(name, step, self.held()))
        self.meter.next_phase()

    def mark(self, *args: Any) -> None:
        """A trace would note what a tensor is for; a probe walks over them."""

    def register(self, *args: Any) -> None:
        """A trace would number the tensor's storage."""

    def stop(self) -> tuple[Phase, ...]:
        """End the measurement and return its phases with what they took."""
        self.meter.stop(self.phases)
        return tuple(self.phases)
