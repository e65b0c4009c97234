"""The CUDA caching allocator's bookkeeping on segments that the driver hands out whole.

Every rule is one of ``DeviceCachingAllocator`` in c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.14); its function is
named where the rule stands. One stream is assumed: a freed block can be reused at once, so that bytes "active" are
bytes allocated. Addresses only order blocks of equal size; new segments are taken to lie above all earlier ones.
"""

from __future__ import annotations

from lightning_memprec._units import MIB
from lightning_memprec.memory.allocator_blocks import Block, Pool
from lightning_memprec.memory.allocator_config import AllocatorConfig

__all__ = ["MIN_BLOCK_BYTES", "SMALL_SEGMENT_BYTES", "SegmentAllocator", "round_size"]

# Constants of c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc and
# kRoundLarge.
MIN_BLOCK_BYTES = 512
_SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
_MIN_LARGE_BYTES = 10 * MIB
_ROUND_LARGE_BYTES = 2 * MIB

_UNLIMITED = 1 << 62


def round_size(size_bytes: int, config: AllocatorConfig) -> int:
    """Round a request to the size of the block that is looked for (``round_size``).

    Args:
        size_bytes: Bytes asked for, at least 1.
        config: Settings of the allocator.

    Returns:
        A multiple of 512 bytes, or the next of the steps between two powers of two.

    Example:
        >>> round_size(513, AllocatorConfig())
        1024
        >>> round_size(1200 * 2**20, AllocatorConfig(roundup_power2_divisions=(4,) * 16)) // 2**20
        1280
    """
    divisions = config.divisions_for(size_bytes)
    step = MIN_BLOCK_BYTES
    if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
        # `roundup_power2_next_division`; a power of two is a multiple of its step and stays as it is.
        step = (1 << (size_bytes.bit_length() - 1)) // divisions
    return -(-size_bytes // step) * step


class SegmentAllocator:
    """The allocator with its default segments: each is one ``cudaMalloc``, split and merged inside.

    Args:
        config: Settings of the allocator.
        capacity_bytes: What the driver can hand out; ``None`` is without limit.

    Attributes:
        reserved_bytes: Bytes of all segments.
        inactive_split_bytes: Bytes of free blocks whose segment is in use: cached, but not to be given back.
        segment_allocations: Segments made so far.
        retries: How often everything cached was given back to make room (``num_alloc_retries``).
    """

    def __init__(self, config: AllocatorConfig, capacity_bytes: int | None = None) -> None:
        self.reserved_bytes = 0
        self.inactive_split_bytes = 0
        self.segment_allocations = 0
        self.retries = 0
        self.pools = (Pool(is_small=False), Pool(is_small=True))
        self._large, self._small = self.pools
        self._next_address = 0
        self._capacity_bytes = _UNLIMITED if capacity_bytes is None else capacity_bytes
        # `setMemoryFraction`: a fraction of 1 sets no limit, and without a limit nothing is collected.
        has_fraction = config.per_process_memory_fraction < 1 and capacity_bytes is not None
        self._allowed_bytes = (
            int(config.per_process_memory_fraction * self._capacity_bytes) if has_fraction else _UNLIMITED
        )
        self._collects = has_fraction and config.garbage_collection_threshold > 0
        self._collect_above_bytes = int(config.garbage_collection_threshold * self._allowed_bytes)
        self._max_split_bytes = (
            _UNLIMITED if config.max_split_size_bytes is None else config.max_split_size_bytes
        )
        self._rounding_bytes = config.max_non_split_rounding_bytes
        self._large_segment_bytes = config.large_segment_bytes

    def allocate(self, size_bytes: int) -> Block | None:
        """Give out a block (``malloc``, ``alloc_found_block``).

        Args:
            size_bytes: Rounded size, see :func:`round_size`.

        Returns:
            A block of at least that size; ``None`` is an out-of-memory error.
        """
        pool = self._small if size_bytes <= _SMALL_BYTES else self._large
        block = self._take_cached(pool, size_bytes) or self._take_new(pool, size_bytes)
        if block is None:
            return None
        if block.is_split:
            self.inactive_split_bytes -= block.size_bytes
        if self._splits(pool, size_bytes, block.size_bytes - size_bytes):
            rest = block.cut(size_bytes)
            pool.add(rest)
            self.inactive_split_bytes += rest.size_bytes
        return block

    def free(self, block: Block) -> None:
        """Take a block back and merge it with free neighbors (``free_block``, ``try_merge_blocks``)."""
        self._cache(block)
        if block.is_split:
            self.inactive_split_bytes += block.size_bytes

    def _cache(self, block: Block) -> None:
        pool = block.pool
        before, after = block.before, block.after
        if before is not None and before.is_free:
            pool.remove(before)
            self.inactive_split_bytes -= before.size_bytes
            block.absorb_before()
        if after is not None and after.is_free:
            pool.remove(after)
            self.inactive_split_bytes -= after.size_bytes
            block.absorb_after()
        pool.add(block)

    def _splits(self, pool: Pool, size_bytes: int, rest_bytes: int) -> bool:
        """Whether the rest of a block becomes a block of its own (``should_split``)."""
        if pool.is_small:
            return rest_bytes >= MIN_BLOCK_BYTES
        return size_bytes < self._max_split_bytes and rest_bytes > _SMALL_BYTES

    def _take_cached(self, pool: Pool, size_bytes: int) -> Block | None:
        """Take the best fit from the pool (``get_free_block``)."""
        pool.lookups += 1
        position = pool.at_least(size_bytes)
        if position == len(pool):
            return None
        block = self._best_fit(pool, position)
        limit_bytes = self._max_split_bytes
        if size_bytes < limit_bytes <= block.size_bytes:
            return None
        if limit_bytes <= size_bytes <= block.size_bytes - self._rounding_bytes:
            return None
        pool.remove(block)
        return block

    def _best_fit(self, pool: Pool, position: int) -> Block:
        return pool[position]

    def _take_new(self, pool: Pool, size_bytes: int) -> Block | None:
        """Get memory from the driver, giving back what is cached if need be (``malloc``)."""
        if self._collects:
            self._collect_garbage()
        block = self._grow(pool, size_bytes)
        if block is None and self._release_oversize(pool, size_bytes):
            block = self._grow(pool, size_bytes)
        if block is None:
            self._release_cached()
            self.retries += 1
            block = self._grow(pool, size_bytes)
        return block

    def _segment_bytes(self, size_bytes: int) -> int:
        """Return the size of the segment made for a request (``get_allocation_size``)."""
        if size_bytes <= _SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size_bytes < _MIN_LARGE_BYTES:
            return self._large_segment_bytes
        return -(-size_bytes // _ROUND_LARGE_BYTES) * _ROUND_LARGE_BYTES

    def _grow(self, pool: Pool, size_bytes: int) -> Block | None:
        """Make a segment (``alloc_block``)."""
        segment_bytes = self._segment_bytes(size_bytes)
        if self.reserved_bytes + segment_bytes > min(self._allowed_bytes, self._capacity_bytes):
            return None
        block = Block(pool, self._next_address, segment_bytes)
        self._next_address += segment_bytes
        self.reserved_bytes += segment_bytes
        self.segment_allocations += 1
        return block

    def _release(self, block: Block) -> None:
        """Give an unsplit segment back (``release_block``)."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size_bytes

    def _release_cached(self) -> None:
        """Give back every segment without a block in use (``release_cached_blocks``)."""
        for pool in self.pools:
            for block in pool:
                if not block.is_split:
                    self._release(block)

    def _release_oversize(self, pool: Pool, size_bytes: int) -> bool:
        """Give back just enough blocks too large to be split (``release_available_cached_blocks``)."""
        if self._max_split_bytes == _UNLIMITED:
            return False
        wanted_bytes = max(size_bytes, self._max_split_bytes)
        position = pool.at_least(wanted_bytes)
        if position < len(pool):
            self._release(pool[position])
            return True
        released_bytes = 0
        while released_bytes < wanted_bytes and len(pool) and pool[-1].size_bytes >= self._max_split_bytes:
            released_bytes += pool[-1].size_bytes
            self._release(pool[-1])
        return released_bytes >= wanted_bytes

    def _collect_garbage(self) -> None:
        """Give back large segments that were not used for long (``garbage_collect_cached_blocks``)."""
        wanted_bytes = self.reserved_bytes - self._collect_above_bytes
        pool = self._large
        ages = {block: pool.lookups - block.cached_at for block in pool if not block.is_split}
        while wanted_bytes > 0 and ages:
            mean_age = sum(ages.values()) / len(ages)
            # A pass frees all that are this old, even once it has freed enough: it should not run often.
            for block in [block for block, age in ages.items() if age >= mean_age]:
                del ages[block]
                self._release(block)
                wanted_bytes -= block.size_bytes
