"""Blocks of the simulated CUDA caching allocator, and the pools that hold the free ones.

Source: ``Block`` and ``BlockPool`` in c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.14).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

__all__ = ["Block", "Pool"]

_ADDRESS_BITS = 64


class Block:
    """A stretch of a segment: given out, free in its pool, or address space without memory behind it."""

    __slots__ = ("address", "after", "before", "cached_at", "is_free", "is_mapped", "pool", "size_bytes")

    def __init__(self, pool: Pool, address: int, size_bytes: int) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_free = False
        self.is_mapped = True
        self.cached_at = 0

    @property
    def is_split(self) -> bool:
        """Whether its segment holds other blocks too."""
        return self.before is not None or self.after is not None

    def cut(self, size_bytes: int) -> Block:
        """Keep the first ``size_bytes``; return the rest, linked behind."""
        rest = Block(self.pool, self.address + size_bytes, self.size_bytes - size_bytes)
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after = rest
        self.size_bytes = size_bytes
        return rest

    def absorb_before(self) -> None:
        """Take in the block in front."""
        before = self.before
        assert before is not None
        self.address = before.address
        self.size_bytes += before.size_bytes
        self.before = before.before
        if self.before is not None:
            self.before.after = self

    def absorb_after(self) -> None:
        """Take in the block behind."""
        after = self.after
        assert after is not None
        self.size_bytes += after.size_bytes
        self.after = after.after
        if self.after is not None:
            self.after.before = self


class Pool:
    """Free blocks, ordered by size, then address (``BlockPool``, ``BlockComparatorSize``)."""

    __slots__ = ("_blocks", "_keys", "is_small", "lookups")

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.lookups = 0  # Age of cached blocks is counted in lookups (`get_free_blocks_call_count`).
        # Size and address in one integer: compared faster than a tuple.
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, position: int) -> Block:
        return self._blocks[self._keys[position]]

    def __iter__(self) -> Iterator[Block]:
        # Over a copy: blocks may be removed on the way.
        return iter([self._blocks[key] for key in self._keys])

    def add(self, block: Block) -> None:
        """Put a block among the free ones."""
        key = block.size_bytes << _ADDRESS_BITS | block.address
        insort(self._keys, key)
        self._blocks[key] = block
        block.is_free = True
        block.cached_at = self.lookups

    def remove(self, block: Block) -> None:
        """Take a block from the free ones."""
        key = block.size_bytes << _ADDRESS_BITS | block.address
        del self._keys[bisect_left(self._keys, key)]
        del self._blocks[key]
        block.is_free = False

    def at_least(self, size_bytes: int) -> int:
        """Return the position of the smallest block that holds ``size_bytes``; ``len(pool)`` if none does."""
        return bisect_left(self._keys, size_bytes << _ADDRESS_BITS)
