"""The predicted run as a snapshot of PyTorch's caching allocator, which https://pytorch.org/memory_viz opens.

The structure is that of ``torch.cuda.memory._snapshot()``. Its entries carry a ``category``, as those that
``torch.cuda._memory_viz`` makes out of a profile; the viewer then colors by it. The viewer
(torch/utils/viz/MemoryViz.js) reads pickles of protocol 2 to 4 without classes, and needs every block inside a segment.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memprec._files.atomic import replacing
from lightning_memprec.memory.allocator_blocks import Block, Pool
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.allocator_expandable import ExpandableAllocator
from lightning_memprec.memory.allocator_segments import SegmentAllocator, round_size
from lightning_memprec.memory.analysis import categories, owner
from lightning_memprec.memory.events import MemoryEvents
from lightning_memprec.memory.steady import with_more_steps

if TYPE_CHECKING:
    from lightning_memprec.memory.result import MemoryEstimate

__all__ = ["as_snapshot", "write_snapshot"]

_PROTOCOL = 4
# Where CUDA's addresses usually begin. With expandable segments both pools count from 0: the small one moves up. All
# stays below 2**53, up to which a browser's numbers are exact.
_BASE_ADDRESS, _SMALL_POOL_OFFSET = 0x7F00_0000_0000, 1 << 50

_ROOT = "(root)"
_Frames = list[dict[str, Any]]


def write_snapshot(estimate: MemoryEstimate, path: str | Path) -> None:
    """Write the snapshot of an estimate; see :meth:`MemoryEstimate.save_snapshot`."""
    if estimate.events is None:
        raise ValueError(
            "A snapshot needs the events of the trace, and this estimate has none: files do not hold them. Save it "
            "where the estimate is made."
        )
    snapshot = as_snapshot(estimate.events, on_cpu=estimate.device == "cpu")
    with replacing(Path(path)) as file:
        pickle.dump(snapshot, file, protocol=_PROTOCOL)


def as_snapshot(events: MemoryEvents, *, on_cpu: bool = False) -> dict[str, Any]:
    """Replay a trace through the simulated allocator, and write down what PyTorch would.

    The last step is repeated as for ``peak_reserved_bytes``, so that the snapshot reserves as much. Sizes are those
    asked for, times are numbers of events.

    Args:
        events: What a recorder saw.
        on_cpu: Whether no allocator lies between the tensors and the system: each tensor is a segment of its own.

    Returns:
        ``segments`` after the last event, ``device_traces`` of one device, and ``allocator_settings``.

    Raises:
        ValueError: If the environment sets up an allocator that is not simulated.
    """
    config = AllocatorConfig() if on_cpu else AllocatorConfig.from_environment()
    if config.backend != "native":
        raise ValueError(
            f"Only the allocator backend 'native' is simulated, not {config.backend!r}. Unset it in PYTORCH_ALLOC_CONF."
        )
    replayed = events if on_cpu else with_more_steps(events)
    history = _History(_Labels(events, replayed))
    if on_cpu:
        _replay_without_allocator(replayed, history)
    else:
        _replay(replayed, config, history)
    # Where there are categories, `annotate_snapshot` of the viewer needs one of them to be "unknown".
    history.note("snapshot", 0, 0, [], "unknown")
    return {
        "segments": history.segments(),
        "device_traces": [history.entries],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "max_split_size": -1 if config.max_split_size_bytes is None else config.max_split_size_bytes,
            "garbage_collection_threshold": config.garbage_collection_threshold,
            "expandable_segments": config.expandable_segments,
        },
    }


class _Labels:
    """Category and frames of each storage of a replay, which may repeat storages of the trace."""

    def __init__(self, traced: MemoryEvents, replayed: MemoryEvents) -> None:
        self._traced = traced
        self._categories = categories(traced)
        # A repeated storage keeps the event of birth of the one it repeats.
        original = {record.birth: k for k, record in enumerate(traced.storages)}
        self._originals = [original[record.birth] for record in replayed.storages]
        self._known: dict[tuple[int, str, str, str], _Frames] = {}

    def __call__(self, storage: int) -> tuple[str, _Frames]:
        original = self._originals[storage]
        record, category = self._traced.storages[original], self._categories[original]
        key = (record.phase, category, record.owner or "", owner(self._traced, record))
        if key not in self._known:
            self._known[key] = self._frames(*key)
        return category, self._known[key]

    def _frames(self, phase: int, category: str, tensor: str, module: str) -> _Frames:
        """Write what is known of a storage as a stack, the innermost frame first."""
        frames = [_frame(tensor or module or _ROOT, category)]
        while module:
            frames.append(_frame(module, "module"))
            module = module.rpartition(".")[0]
        name, step, _ = self._traced.phases[phase]
        when = f"step {step + 1}" if step >= 0 else "outside the steps"
        return [*frames, _frame(_ROOT, "module"), _frame(when, name.replace("_", " "))]


def _frame(filename: str, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": 0, "name": name}


class _History:
    """What the allocator did, entry by entry, and what it ends with."""

    def __init__(self, labels: _Labels) -> None:
        self.entries: list[dict[str, Any]] = []
        self._labels = labels
        self._time = 0
        self._mapped: dict[int, tuple[int, bool]] = {}  # address -> size, whether it holds small blocks
        self._live: dict[int, tuple[int, int, int]] = {}  # storage -> address, size, size asked for

    def at(self, event: int) -> None:
        """Set the time of the entries to come."""
        self._time = event

    def note(self, action: str, address: int, size_bytes: int, frames: _Frames, category: str = "") -> None:
        entry = {"action": action, "addr": address, "size": size_bytes, "stream": 0, "frames": frames}
        self.entries.append({**entry, "time_us": self._time, **({"category": category} if category else {})})

    def grow(self, action: str, address: int, size_bytes: int, *, is_small: bool) -> None:
        self.note(action, address, size_bytes, [])
        self._mapped[address] = (size_bytes, is_small)

    def shrink(self, address: int) -> None:
        self.note("segment_free", address, self._mapped.pop(address)[0], [])

    def allocate(self, storage: int, address: int, size_bytes: int, asked_bytes: int) -> None:
        category, frames = self._labels(storage)
        self.note("alloc", address, asked_bytes, frames, category)
        self._live[storage] = (address, size_bytes, asked_bytes)

    def free(self, storage: int) -> int:
        address, _, asked_bytes = self._live.pop(storage)
        category, frames = self._labels(storage)
        for action in ("free_requested", "free_completed"):
            self.note(action, address, asked_bytes, frames, category)
        return address

    def segments(self) -> list[dict[str, Any]]:
        """List the segments after the last event, each with its blocks and the gaps between them."""
        live = deque(sorted((place, storage) for storage, place in self._live.items()))
        found = []
        for address, size_bytes, is_small in self._merged():
            inside = []
            while live and live[0][0][0] < address + size_bytes:
                inside.append(live.popleft())
            found.append(self._segment(address, size_bytes, is_small, inside))
        return found

    def _merged(self) -> list[tuple[int, int, bool]]:
        """Join the pages of an expandable segment; segments that were made whole stay apart."""
        pages = {entry["addr"] for entry in self.entries if entry["action"] == "segment_map"}
        found: list[tuple[int, int, bool]] = []
        for address, (size_bytes, is_small) in sorted(self._mapped.items()):
            if found and address in pages and sum(found[-1][:2]) == address:
                found[-1] = (found[-1][0], found[-1][1] + size_bytes, is_small)
            else:
                found.append((address, size_bytes, is_small))
        return found

    def _segment(
        self, address: int, size_bytes: int, is_small: bool, inside: list[tuple[tuple[int, int, int], int]]
    ) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        end = address
        for (start, block_bytes, asked_bytes), storage in inside:
            if start > end:
                blocks.append(_block(end, start - end, start - end, "inactive", []))
            _, frames = self._labels(storage)
            blocks.append(_block(start, block_bytes, asked_bytes, "active_allocated", frames))
            end = start + block_bytes
        if end < address + size_bytes:
            rest_bytes = address + size_bytes - end
            blocks.append(_block(end, rest_bytes, rest_bytes, "inactive", []))
        allocated_bytes = sum(place[1] for place, _ in inside)
        return {
            "device": 0,
            "address": address,
            "total_size": size_bytes,
            "stream": 0,
            "segment_type": "small" if is_small else "large",
            "segment_pool_id": (0, 0),
            "allocated_size": allocated_bytes,
            "active_size": allocated_bytes,
            "requested_size": sum(place[2] for place, _ in inside),
            "frames": [],
            "blocks": blocks,
        }


def _block(address: int, size_bytes: int, asked_bytes: int, state: str, frames: _Frames) -> dict[str, Any]:
    return {
        "address": address,
        "size": size_bytes,
        "requested_size": asked_bytes,
        "state": state,
        "frames": frames,
    }


def _address(pool: Pool, address: int, config: AllocatorConfig) -> int:
    offset = _SMALL_POOL_OFFSET if config.expandable_segments and pool.is_small else 0
    return _BASE_ADDRESS + offset + address


class _Segments(SegmentAllocator):
    """Tells a history of each segment. Without a limit none is ever given back."""

    def __init__(self, config: AllocatorConfig, history: _History) -> None:
        super().__init__(config)
        self._config, self._history = config, history

    def _grow(self, pool: Pool, size_bytes: int) -> Block | None:
        block = super()._grow(pool, size_bytes)
        assert block is not None
        address = _address(pool, block.address, self._config)
        self._history.grow("segment_alloc", address, block.size_bytes, is_small=pool.is_small)
        return block


class _Pages(ExpandableAllocator):
    """Tells a history of each stretch of pages. Without a limit none is ever given back."""

    def __init__(self, config: AllocatorConfig, history: _History) -> None:
        super().__init__(config)
        self._config, self._history = config, history

    def _map(self, block: Block, size_bytes: int) -> bool:
        address, before_bytes = _address(block.pool, block.address, self._config), self.reserved_bytes
        mapped = super()._map(block, size_bytes)
        size = self.reserved_bytes - before_bytes
        self._history.grow("segment_map", address, size, is_small=block.pool.is_small)
        return mapped


def _replay(events: MemoryEvents, config: AllocatorConfig, history: _History) -> None:
    allocator = (_Pages if config.expandable_segments else _Segments)(config, history)
    blocks: dict[int, Block] = {}
    for event, storage in enumerate(events.order):
        history.at(event)
        if storage < 0:
            if ~storage in blocks:
                history.free(~storage)
                allocator.free(blocks.pop(~storage))
            continue
        asked_bytes = events.storages[storage].size_bytes
        if not asked_bytes:
            continue
        block = allocator.allocate(round_size(asked_bytes, config))
        assert block is not None
        blocks[storage] = block
        address = _address(block.pool, block.address, config)
        history.allocate(storage, address, block.size_bytes, asked_bytes)


def _replay_without_allocator(events: MemoryEvents, history: _History) -> None:
    """Give each storage addresses of its own, and give them back when it dies."""
    address = _BASE_ADDRESS
    for event, storage in enumerate(events.order):
        history.at(event)
        if storage < 0:
            if events.storages[~storage].size_bytes:
                history.shrink(history.free(~storage))
            continue
        size_bytes = events.storages[storage].size_bytes
        if size_bytes:
            history.grow("segment_alloc", address, size_bytes, is_small=False)
            history.allocate(storage, address, size_bytes, size_bytes)
            address += size_bytes
