"""Read what an out-of-memory error says: what was asked for, what was there, and why it was not enough."""

from __future__ import annotations

import builtins
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_memprec._units import GIB, KIB, MIB

__all__ = ["Cause", "MemoryShortage", "shortage_in"]

Cause = Literal["fragmentation", "other processes", "limit", "real need", "unknown"]

# As torch 2.11 to 2.14 write them: format_size in c10/util/Exception and c10/cuda/CUDACachingAllocator.cpp,
# aten/src/ATen/mps/MPSAllocator.mm, c10/xpu/XPUCachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp.
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]i?B)"
_UNITS = {
    "bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024**4,
    "KB": KIB, "MB": MIB, "GB": GIB, "TB": 1024**4,
}  # fmt: skip
_FIGURES = {
    "requested_bytes": (
        rf"(?:Tried to allocate|Requested size:) {_SIZE}",
        rf"you tried to allocate {_SIZE}",
        rf"Unable to allocate {_SIZE}",
    ),
    "total_bytes": (rf"total capacity of {_SIZE}",),
    "free_bytes": (rf"of which {_SIZE} is free",),
    "process_bytes": (rf"this process has {_SIZE} memory in use",),
    "allowed_bytes": (rf"{_SIZE} allowed;", rf"max allowed: {_SIZE}"),
    "allocated_bytes": (rf"{_SIZE} is allocated by PyTorch", rf"MPS allocated: {_SIZE}"),
    "cached_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
}
_PRIVATE_POOLS = rf"with {_SIZE} allocated in private pools"
_OTHER_PROCESS = rf"Process \d+ has {_SIZE} memory in use"
_LIMITED = "it would exceed per_process_memory_fraction limit"
_GPU = r"GPU (\d+) has a total capacity"

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # From Python 3.11 on.

# What each message begins with or holds, and the device that ran out.
_SIGNS = (
    ("MPS backend out of memory", "mps"),
    ("XPU out of memory", "xpu"),
    ("CUDA out of memory", "cuda"),
    ("HIP out of memory", "cuda"),
    ("CUDA error: out of memory", "cuda"),
    ("CUDA ran out of memory outside PyTorch's allocator", "cuda"),
    ("MKL error: SPARSE_STATUS_ALLOC_FAILED", "cpu"),
    ("_ALLOC_FAILED", "cuda"),  # The last part of a code of cuBLAS, cuSOLVER, cuSPARSE, cuFFT, cuDNN.
    ("_DEVICE_ALLOCATION_FAILED", "cuda"),
    ("Cuda failure 2 'out of memory'", "cuda"),  # NCCL's own allocations.
    ("DefaultCPUAllocator: can't allocate memory", "cpu"),
    ("DefaultCPUAllocator: not enough memory", "cpu"),
    ("Cannot allocate memory (12)", "cpu"),  # Mapping a file, or shared memory of a data loader.
)


@dataclass(frozen=True)
class MemoryShortage:
    """What an out-of-memory error tells; ``None`` where it does not say.

    Args:
        device_type: ``"cuda"``, ``"xpu"``, ``"mps"`` or ``"cpu"``.
        device_index: Index of the device.
        requested_bytes: What was asked for.
        total_bytes: Memory of the device.
        free_bytes: What the driver had free.
        process_bytes: What this process used of the device, libraries and context included.
        others_bytes: What other processes used.
        allowed_bytes: A limit on this process that is below the device's memory.
        allocated_bytes: What PyTorch's tensors held.
        cached_bytes: What PyTorch's allocator held beyond that.
        private_pools_bytes: What of the tensors' memory CUDA graphs keep to themselves.
        is_limited: Whether the error says that a limit on this process stopped it, without telling the limit.
    """

    device_type: str
    device_index: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    others_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    cached_bytes: int | None = None
    private_pools_bytes: int | None = None
    is_limited: bool = False

    @property
    def device(self) -> str:
        """The device in torch's notation."""
        return self.device_type if self.device_index is None else f"{self.device_type}:{self.device_index}"

    @property
    def missing_bytes(self) -> int | None:
        """What was asked for beyond all that was free or cached; negative where there was enough, in pieces."""
        if self.requested_bytes is None or self.free_bytes is None:
            return None
        return self.requested_bytes - self._within_reach() - (self.cached_bytes or 0)

    def _within_reach(self) -> int:
        """What the driver would still give to this process."""
        free = self.free_bytes or 0
        if self.allowed_bytes is None or self.allocated_bytes is None:
            return free
        return max(0, min(free, self.allowed_bytes - self.allocated_bytes - (self.cached_bytes or 0)))

    @property
    def cause(self) -> Cause:
        """Why memory was not enough.

        Before PyTorch gives up it returns every segment of its cache that no tensor uses. What is cached then lies in
        pieces between tensors: if these would have been enough, fragmentation is to blame.
        """
        if self.is_limited:
            return "limit"
        missing = self.missing_bytes
        if missing is None or self.requested_bytes is None:
            return "unknown"
        if missing <= 0:
            return "fragmentation"
        if self._within_reach() < (self.free_bytes or 0) and missing <= (self.free_bytes or 0):
            return "limit"
        if self.others_bytes is not None and self.others_bytes >= missing:
            return "other processes"
        return "real need"


def shortage_in(error: BaseException) -> MemoryShortage | None:
    """Read an error, or those that it was raised from.

    Args:
        error: Any exception.

    Returns:
        What it tells about memory; ``None`` if neither it nor its causes are about memory.

    Example:
        >>> error = RuntimeError(
        ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which "
        ...     "1.00 GiB is free. Including non-PyTorch memory, this process has 15.00 GiB memory in use. Of the "
        ...     "allocated memory 12.00 GiB is allocated by PyTorch, and 2.50 GiB is reserved by PyTorch but "
        ...     "unallocated."
        ... )
        >>> shortage_in(error).cause
        'fragmentation'
    """
    for link in _chain(error):
        device_type = _device_type(link)
        if device_type is not None:
            return _read(_text_of(link), device_type)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the errors in it if it is a group, and those that it was raised from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        before = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        waiting += [] if before is None else [before]
        if isinstance(link, _GROUPS):
            waiting += link.exceptions


def _device_type(error: BaseException) -> str | None:
    text = _text_of(error)
    if (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):  # No process to be had, no pages to be mapped.
        return "cpu"
    for sign, device_type in _SIGNS:
        if sign in text and isinstance(error, RuntimeError):
            return device_type
    if isinstance(error, torch.OutOfMemoryError):
        return "cuda"
    return "cpu" if isinstance(error, MemoryError) else None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # The user's own class may fail to print itself.
        return ""


def _read(text: str, device_type: str) -> MemoryShortage:
    figures = {name: _first(patterns, text) for name, patterns in _FIGURES.items()}
    gpu = re.search(_GPU, text)
    total, free, process = (figures[name] for name in ("total_bytes", "free_bytes", "process_bytes"))
    if total is not None and free is not None and process is not None:
        others: int | None = max(0, total - free - process)
    else:
        listed = [_bytes_of(match) for match in re.finditer(_OTHER_PROCESS, text)]
        others = sum(listed) if listed else None
    return MemoryShortage(
        device_type=device_type,
        device_index=int(gpu[1]) if gpu else None,
        others_bytes=others,
        private_pools_bytes=_first((_PRIVATE_POOLS,), text),
        is_limited=_LIMITED in text,
        **figures,
    )


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    matches = (re.search(pattern, text) for pattern in patterns)
    return next((_bytes_of(match) for match in matches if match is not None), None)


def _bytes_of(match: re.Match[str]) -> int:
    return round(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
