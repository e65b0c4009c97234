"""Settings of PyTorch's CUDA caching allocator, read from the environment as PyTorch reads them.

Source of keys, limits and defaults: c10/core/AllocatorConfig.{h,cpp} (``AcceleratorAllocatorConfig``) and
c10/cuda/CUDAAllocatorConfig.{h,cpp} (``CUDAAllocatorConfig``) of PyTorch 2.14.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lightning_memprec._units import MIB

__all__ = ["AllocatorConfig"]

_Value = TypeVar("_Value")

# c10/core/AllocatorConfig.cpp: 16 intervals from 1 MiB to 64 GiB, each a power of two wide.
_INTERVALS = 16
_FIRST_INTERVAL_BITS = 20
# c10/core/AllocatorConfig.h, kMinLargeAlloc: a large segment must exceed it.
_MIN_LARGE_ALLOCATION_MIB = 10

# Known to PyTorch 2.14, without effect on the size of any device allocation: pinned host memory, locks, capture
# of graphs, and the moment at which an out-of-memory error is raised.
_IGNORED_KEYS = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
_USED_KEYS = frozenset(
    {
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "roundup_power2_divisions",
    }
)
_ENTRY = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")


@dataclass(frozen=True)
class AllocatorConfig:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` can change about sizes of device memory.

    Attributes:
        max_split_size_bytes: Blocks of this size and above are never split; ``None``: all may be.
        max_non_split_rounding_bytes: How much larger than the request an unsplit block may be.
        roundup_power2_divisions: Steps between two powers of two to which sizes are rounded up, for each of the
            16 intervals from [1, 2) MiB to 32 GiB and above; the first holds for all smaller sizes too. 0 and 1
            round to 512 bytes only.
        garbage_collection_threshold: Share of the limit above which cached blocks are given back; 0: never.
            Has effect only with ``per_process_memory_fraction`` below 1.
        expandable_segments: Grow one segment by pages instead of adding segments.
        large_segment_bytes: Segment for requests from 1 to 10 MiB, and the page of a large expandable segment.
        per_process_memory_fraction: Share of the capacity that this process may reserve.
        backend: ``"native"`` or ``"cudaMallocAsync"``.

    Example:
        >>> config = AllocatorConfig.from_environment({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
        >>> config.max_split_size_bytes // 2**20
        128
    """

    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_bytes: int = 20 * MIB
    per_process_memory_fraction: float = 1.0
    backend: str = "native"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> AllocatorConfig:
        """Read the settings of this process.

        ``PYTORCH_CUDA_ALLOC_CONF`` hides ``PYTORCH_ALLOC_CONF`` wherever it is set, even to nothing
        (``AcceleratorAllocatorConfig::instance``; the header's comment says the opposite of what PyTorch does).

        Args:
            environ: Environment variables by name.

        Raises:
            ValueError: If a key is unknown or a value is out of range, as in PyTorch.
        """
        entries = _entries(environ.get("PYTORCH_CUDA_ALLOC_CONF", environ.get("PYTORCH_ALLOC_CONF", "")))
        # PyTorch reads the large segment first: it bounds two other keys and is the default of one.
        segment_mib = _read(entries, "large_segment_size_mb", _whole(_MIN_LARGE_ALLOCATION_MIB + 1), 20)
        max_split_mib = _read(entries, "max_split_size_mb", _whole(segment_mib), None)
        return cls(
            max_split_size_bytes=None if max_split_mib is None else max_split_mib * MIB,
            max_non_split_rounding_bytes=MIB
            * _read(entries, "max_non_split_rounding_mb", _whole(segment_mib), segment_mib),
            roundup_power2_divisions=_read(
                entries, "roundup_power2_divisions", _divisions, cls.roundup_power2_divisions
            ),
            garbage_collection_threshold=_read(entries, "garbage_collection_threshold", _threshold, 0.0),
            expandable_segments=_read(entries, "expandable_segments", _one_of("True", "False"), "False")
            == "True",
            large_segment_bytes=segment_mib * MIB,
            per_process_memory_fraction=_read(entries, "per_process_memory_fraction", _fraction, 1.0),
            backend=_read(entries, "backend", _one_of("native", "cudaMallocAsync"), "native"),
        )

    def divisions_for(self, size_bytes: int) -> int:
        """Return the steps between powers of two for a size (``roundup_power2_divisions`` in AllocatorConfig.cpp)."""
        interval = size_bytes.bit_length() - 1 - _FIRST_INTERVAL_BITS
        return self.roundup_power2_divisions[min(max(interval, 0), _INTERVALS - 1)]


def _entries(text: str) -> dict[str, str]:
    """Split ``key:value,key:[a:b,c:d]``; a later key replaces an earlier one, as in PyTorch."""
    text = "".join(text.split())
    entries: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _ENTRY.match(text, position)
        if match is None:
            raise ValueError(
                f"Cannot read {text[position:]!r} in the allocator settings {text!r}. "
                "Write `key:value` pairs with commas between them, such as 'max_split_size_mb:128'."
            )
        key = match[1]
        if key not in _USED_KEYS | _IGNORED_KEYS:
            raise ValueError(
                f"Unknown key {key!r} with value {match[2]!r} in the allocator settings. "
                f"Use one of: {', '.join(sorted(_USED_KEYS | _IGNORED_KEYS))}."
            )
        entries[key] = match[2]
        position = match.end()
    return entries


def _read(entries: dict[str, str], key: str, parse: Callable[[str], _Value], default: _Value) -> _Value:
    if key not in entries:
        return default
    try:
        return parse(entries[key])
    except _Refused as refused:
        raise ValueError(
            f"The allocator setting {key!r} cannot be {entries[key]!r}. Write {refused}."
        ) from None


class _Refused(Exception):
    """A value is malformed or out of range; the message says what is accepted."""


def _whole(smallest: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not value.isdecimal() or int(value) < smallest:
            raise _Refused(f"a whole number of MiB, {smallest} or more")
        return int(value)

    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise _Refused(" or ".join(f"{choice!r}" for choice in choices))
        return value

    return parse


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _threshold(value: str) -> float:
    if not 0 < _number(value) < 1:
        raise _Refused("a number between 0 and 1, both excluded")
    return float(value)


def _fraction(value: str) -> float:
    if not 0 <= _number(value) <= 1:
        raise _Refused("a number from 0 to 1")
    return float(value)


def _divisions(value: str) -> tuple[int, ...]:
    """Read one number, or ``[256:1,512:2,>:4]``: an interval's start in MiB and its number of steps.

    As ``parseRoundUpPower2Divisions`` does: the first entry also holds for all smaller intervals, ``>`` for all
    after the last one named, and intervals between two named ones stay at 0.
    """
    if not value.startswith("["):
        return (_power_of_two(value),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last = 0
    named = False
    for entry in value[1:-1].split(","):
        start, _, steps_text = entry.partition(":")
        steps = 0 if steps_text == "0" else _power_of_two(steps_text)
        if start == ">":
            divisions[last + 1 :] = [steps] * (_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(start).bit_length() - 1, _INTERVALS - 1)
        if not named:
            divisions[:last] = [steps] * last
            named = True
        divisions[last] = steps
    return tuple(divisions)


def _power_of_two(text: str) -> int:
    if not text.isdecimal() or int(text).bit_count() != 1:
        raise _Refused("a power of two, or a list such as '[256:1,512:2,>:4]' of powers of two")
    return int(text)
