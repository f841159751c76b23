"""CUDA's caching allocator, reproduced exactly: the memory that it reserves for a sequence of allocations and
frees.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with the default settings (no `max_split_size_mb`,
no garbage collection, no rounding to powers of two), with plain segments and with `expandable_segments:True`.
Names in comments are those of that file. Memory that was used on another stream counts as free immediately,
since FSDP2 orders its streams by waits and does not call `record_stream`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from fsdp_tune.core.units import KIB, MIB

MIN_BLOCK = 512  # kMinBlockSize: all sizes are rounded up to it
SMALL = MIB  # kSmallSize: up to here an allocation comes from the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer
MIN_LARGE = 10 * MIB  # kMinLargeAlloc: from here on a separate segment
ROUND_LARGE = 2 * MIB  # kRoundLarge
assert MIN_BLOCK * 2 == KIB


class DeviceMemoryError(Exception):
    """The device is full, even after all cached memory was returned to the driver."""

    def __init__(self, wanted_bytes: int, reserved_bytes: int, allocated_bytes: int) -> None:
        super().__init__(f"{wanted_bytes} more bytes do not fit")
        self.wanted_bytes, self.reserved_bytes, self.allocated_bytes = (
            wanted_bytes,
            reserved_bytes,
            allocated_bytes,
        )


class Block:
    """A part of a segment. `mapped` is False only for a part of an expandable segment without physical
    memory."""

    __slots__ = ("allocated", "mapped", "next", "offset", "pool", "prev", "segment", "size")

    def __init__(self, pool: Pool, segment: int, offset: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.segment, self.offset, self.size, self.mapped = pool, segment, offset, size, mapped
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False

    @property
    def is_free(self) -> bool:
        return not self.allocated and self.mapped


class Pool:
    """The free blocks of one stream, small or large: (size, segment, offset, block), sorted, so that the best
    fit is the first large enough one."""

    __slots__ = ("free", "last", "page", "small")

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT  # what an expandable segment maps at a time
        self.free: list[tuple[int, int, int, Block]] = []
        self.last: Block | None = None  # last mapped block of the pool's expandable segment

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.segment, block.offset, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.segment, block.offset))]


def rounded(size_bytes: int) -> int:
    """Return `round_size`."""
    return MIN_BLOCK if size_bytes < MIN_BLOCK else -(-size_bytes // MIN_BLOCK) * MIN_BLOCK


def segment_size(size_bytes: int) -> int:
    """Return `get_allocation_size`: the size to request from the driver for a block of this (rounded)
    size."""
    if size_bytes <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size_bytes < MIN_LARGE else -(-size_bytes // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """The allocator of one device. `capacity_bytes` is the memory that the driver can provide; None for no
    limit."""

    def __init__(self, *, expandable: bool, capacity_bytes: int | None = None) -> None:
        self.expandable, self.capacity_bytes = expandable, capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0  # num_alloc_retries: number of times all cached memory was returned
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._segments = 0

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Allocate a block. Raises: DeviceMemoryError if the device is full."""
        size = rounded(size_bytes)
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(small=small)
        free = pool.free
        at = bisect_left(free, (size,))  # get_free_block
        if at == len(free):
            block = self._from_driver(pool, size)
        else:
            # A free block that can still grow counts with its largest possible size, so any other large
            # enough block is used first.
            if free[at][3] is pool.last and at + 1 < len(free):
                at += 1
            block = free.pop(at)[3]
        rest = block.size - size
        if rest >= MIN_BLOCK if (small or self.expandable) else rest > SMALL:  # should_split
            self._split(block, size)
        block.allocated = True
        allocated = self.allocated_bytes = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        block.allocated = False
        pool = block.pool
        for other in (block.prev, block.next):
            if other is not None and other.mapped and not other.allocated:
                pool.remove(other)
                self._swallow(block, other)
        pool.add(block)

    def _split(self, block: Block, size: int) -> None:
        tail = Block(block.pool, block.segment, block.offset + size, block.size - size)
        tail.prev, tail.next, block.next = block, block.next, tail
        if tail.next is not None:
            tail.next.prev = tail
        block.size = size
        if block.pool.last is block:
            block.pool.last = tail
        block.pool.add(tail)

    def _swallow(self, block: Block, other: Block) -> None:
        """Merge a free neighbour into `block`."""
        if other is block.prev:
            block.offset, block.prev = other.offset, other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size
        if block.pool.last is other:
            block.pool.last = block

    def _from_driver(self, pool: Pool, size: int) -> Block:
        """Do `alloc_block` after `get_free_block` found nothing: request memory, and again after returning
        all cached memory."""
        block = self._new(pool, size)
        if block is None:
            self.retries += 1
            self.give_back_cached()
            block = self._new(pool, size)
        if block is None:
            raise DeviceMemoryError(size, self.reserved_bytes, self.allocated_bytes)
        return block

    def _new(self, pool: Pool, size: int) -> Block | None:
        if self.expandable:
            return self._expand(pool, size)
        if not self._reserve(segment_size(size)):
            return None
        self._segments += 1
        return Block(pool, self._segments, 0, segment_size(size))

    def _reserve(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Do `try_allocate_expandable_block`: map the lowest large enough hole, together with the free block
        before it."""
        hole = self._hole(pool, size)
        if hole is None:
            tail = pool.last
            free = tail.size if tail is not None and tail.is_free else 0
            more = -(-(size - free) // pool.page) * pool.page
            if not self._reserve(more):
                return None
            end = 0 if tail is None else tail.offset + tail.size
            segment = 0 if tail is None else tail.segment
            if tail is None:
                self._segments += 1
                segment = self._segments
            block = Block(pool, segment, end, more)
            block.prev = tail
            if tail is not None:
                tail.next = block
            pool.last = block
        else:
            block = self._map(pool, hole, size)
            if block is None:
                return None
        for other in (block.prev, block.next):
            if other is not None and other.is_free:
                pool.remove(other)
                self._swallow(block, other)
        return block

    def _hole(self, pool: Pool, size: int) -> Block | None:
        """Return an unmapped part between mapped ones, which `give_back_cached` left; None if there is
        none."""
        if not self.retries:
            return None
        found, block = None, pool.last
        while block is not None:
            if not block.mapped:
                room = sum(
                    b.size
                    for b in (block.prev, block, block.next)
                    if b is not None and (b is block or b.is_free)
                )
                if room >= size:
                    found = block
            block = block.prev
        return found

    def _map(self, pool: Pool, hole: Block, size: int) -> Block | None:
        """Map memory at the beginning of a hole. Return None if the device is full."""
        before = hole.prev.size if hole.prev is not None and hole.prev.is_free else 0
        more = min(hole.size, -(-(size - before) // pool.page) * pool.page)
        if not self._reserve(more):
            return None
        if more < hole.size:
            rest = Block(pool, hole.segment, hole.offset + more, hole.size - more, mapped=False)
            rest.prev, rest.next, hole.next = hole, hole.next, rest
            if rest.next is not None:
                rest.next.prev = rest
            hole.size = more
        hole.mapped = True
        return hole

    def give_back_cached(self) -> None:
        """Do `release_cached_blocks`: release free segments, or the complete pages inside free blocks of
        expandable segments."""
        for pool in self._pools.values():
            for block in [each[3] for each in pool.free]:
                if self.expandable:
                    self._unmap(pool, block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Do `unmap_block`: release the memory of pages that are entirely inside the free block, and keep
        their addresses."""
        begin = -(-block.offset // pool.page) * pool.page
        end = (block.offset + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.remove(block)
        self.reserved_bytes -= end - begin
        head, tail = begin - block.offset, block.offset + block.size - end
        if tail:
            after = Block(pool, block.segment, end, tail)
            after.prev, after.next = block, block.next
            if block.next is not None:
                block.next.prev = after
            block.next = after
            pool.last = after if pool.last is block else pool.last
            pool.add(after)
        if head:
            before = Block(pool, block.segment, block.offset, head)
            before.prev, before.next = block.prev, block
            if block.prev is not None:
                block.prev.next = before
            block.prev = before
            pool.add(before)
        block.offset, block.size, block.mapped = begin, end - begin, False
        if pool.last is block:  # an unmapped part at the end of the range is not a hole but room to grow
            last = block.prev
            while last is not None and not last.mapped:
                last = last.prev
            pool.last = last
            if last is not None:
                last.next = None
