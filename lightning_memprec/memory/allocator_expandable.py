"""The CUDA caching allocator with ``expandable_segments:True``.

Source: "Note [Expandable Segments]" and the functions named below in c10/cuda/CUDACachingAllocator.cpp (PyTorch
2.14). One stream has one segment for each pool; memory is mapped behind its addresses page by page.
"""

from __future__ import annotations

from bisect import insort

from lightning_memprec.memory.allocator_blocks import Block, Pool
from lightning_memprec.memory.allocator_config import AllocatorConfig
from lightning_memprec.memory.allocator_segments import MIN_BLOCK_BYTES, SMALL_SEGMENT_BYTES, SegmentAllocator

__all__ = ["ExpandableAllocator"]

# PyTorch reserves addresses for 9/8 of the device's memory and adds a segment when they run out, which takes a
# device full of holes. Here addresses do not run out.
_ADDRESS_SPACE_BYTES = 1 << 60


def _address(block: Block) -> int:
    return block.address


class ExpandableAllocator(SegmentAllocator):
    """The allocator with one growing segment for each pool.

    Args:
        config: Settings of the allocator.
        capacity_bytes: What the driver can hand out; ``None`` is without limit.
    """

    def __init__(self, config: AllocatorConfig, capacity_bytes: int | None = None) -> None:
        super().__init__(config, capacity_bytes)
        self._page_bytes = {self._small: SMALL_SEGMENT_BYTES, self._large: config.large_segment_bytes}
        self._unmapped: dict[Pool, list[Block]] = {}
        for pool in self.pools:
            space = Block(pool, 0, _ADDRESS_SPACE_BYTES)
            space.is_mapped = False
            self._unmapped[pool] = [space]

    def _splits(self, pool: Pool, size_bytes: int, rest_bytes: int) -> bool:
        return rest_bytes >= MIN_BLOCK_BYTES

    def _best_fit(self, pool: Pool, position: int) -> Block:
        """Count with a block the addresses behind it into which it can grow (``get_free_block``)."""
        block = pool[position]
        for following in range(position + 1, len(pool)):
            if _expandable_bytes(pool[following]) >= _expandable_bytes(block):
                break
            block = pool[following]
        return block

    def _grow(self, pool: Pool, size_bytes: int) -> Block | None:
        """Map pages at the lowest addresses that do (``try_allocate_expandable_block``)."""
        # `alloc_block` counts a whole segment against the fraction, whatever will be mapped.
        if self.reserved_bytes + self._segment_bytes(size_bytes) > self._allowed_bytes:
            return None
        block = self._candidate(pool, size_bytes)
        if not block.is_mapped and not self._map(block, min(block.size_bytes, size_bytes)):
            return None
        while block.size_bytes < size_bytes:
            space = block.after
            assert space is not None
            if not self._map(space, min(size_bytes - block.size_bytes, space.size_bytes)):
                return None
            block = space  # It has taken in the free block before it.
        pool.remove(block)
        return block

    def _candidate(self, pool: Pool, size_bytes: int) -> Block:
        """Return the first of the blocks, free or unmapped, that together offer enough (``find_expandable_block``)."""
        for space in self._unmapped[pool]:
            first = space.before if space.before is not None and space.before.is_free else space
            available_bytes = 0
            block: Block | None = first
            while (
                available_bytes < size_bytes and block is not None and (block.is_free or not block.is_mapped)
            ):
                available_bytes += block.size_bytes
                block = block.after
            if available_bytes >= size_bytes:
                return first
        raise AssertionError("The last stretch of addresses is larger than any request.")

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Map whole pages from the start of an unmapped block (``map_block``, ``ExpandableSegment::map``)."""
        pool = block.pool
        page_bytes = self._page_bytes[pool]
        mapped_bytes = -(-size_bytes // page_bytes) * page_bytes
        if self.reserved_bytes + mapped_bytes > self._capacity_bytes:
            return False
        self._unmapped[pool].remove(block)
        if mapped_bytes < block.size_bytes:
            rest = block.cut(mapped_bytes)
            rest.is_mapped = False
            insort(self._unmapped[pool], rest, key=_address)
        block.is_mapped = True
        self._cache(block)
        self.reserved_bytes += mapped_bytes
        self.segment_allocations += 1
        return True

    def _release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        return False  # `release_available_cached_blocks` skips expandable blocks.

    def _release_cached(self) -> None:
        """Unmap all pages without a block in use (``release_blocks``, ``unmap_block``)."""
        for pool in self.pools:
            for block in pool:
                self._unmap(block)

    def _unmap(self, block: Block) -> None:
        pool = block.pool
        page_bytes = self._page_bytes[pool]
        first = -(-block.address // page_bytes) * page_bytes
        last = (block.address + block.size_bytes) // page_bytes * page_bytes
        if first >= last:
            return
        pool.remove(block)
        if last < block.address + block.size_bytes:
            pool.add(block.cut(last - block.address))
        if first > block.address:
            head, block = block, block.cut(first - block.address)
            pool.add(head)
        block.is_mapped = False
        unmapped = self._unmapped[pool]
        if block.before is not None and not block.before.is_mapped:
            unmapped.remove(block.before)
            block.absorb_before()
        if block.after is not None and not block.after.is_mapped:
            unmapped.remove(block.after)
            block.absorb_after()
        insort(unmapped, block, key=_address)
        self.reserved_bytes -= last - first


def _expandable_bytes(block: Block) -> int:
    space = block.after
    return block.size_bytes + (space.size_bytes if space is not None and not space.is_mapped else 0)
