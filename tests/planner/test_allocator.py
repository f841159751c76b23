"""The replay follows the rules of `c10/cuda/CUDACachingAllocator.cpp`; the numbers are derived manually from
that file."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.core.units import KIB, MIB
from fsdp_tune.planner.predict.allocator import CachingAllocator, DeviceMemoryError


def plain(capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(expandable=False, capacity_bytes=capacity)


@pytest.mark.parametrize(("asked", "allocated"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB)])
def test_sizes_are_rounded_to_512_bytes(asked: int, allocated: int) -> None:
    allocator = plain()
    allocator.allocate(asked)
    assert allocator.allocated_bytes == allocated


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments_are_of_two_or_twenty_mebibytes_or_of_the_size_itself(asked: int, reserved: int) -> None:
    allocator = plain()
    allocator.allocate(asked)
    assert allocator.reserved_bytes == reserved


def test_large_block_is_split_only_when_more_than_a_mebibyte_is_left() -> None:
    allocator = plain()
    allocator.allocate(19 * MIB)  # a segment of 20 MiB: one MiB is left, and goes with the block
    assert allocator.allocated_bytes == 20 * MIB
    allocator = plain()
    allocator.allocate(9 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (9 * MIB, 20 * MIB)


def test_small_block_is_split_down_to_512_bytes() -> None:
    allocator = plain()
    for _ in range(4096):
        allocator.allocate(512)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(512)
    assert allocator.reserved_bytes == 4 * MIB


def test_smallest_hole_that_is_large_enough_is_taken() -> None:
    allocator = plain()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 34)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(32 * MIB).segment == blocks[2].segment


def test_freed_neighbours_become_one_block() -> None:
    allocator = plain()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_streams_and_sizes_have_pools_of_their_own() -> None:
    allocator = plain()
    allocator.free(allocator.allocate(12 * MIB, stream=0))
    allocator.allocate(12 * MIB, stream=1)
    assert allocator.reserved_bytes == 24 * MIB
    allocator.allocate(KIB, stream=0)  # not from the large block that is free
    assert allocator.reserved_bytes == 26 * MIB


def test_full_gpu_releases_free_segments_and_retries() -> None:
    allocator = plain(capacity=64 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    held = allocator.allocate(12 * MIB)  # of the freed 40
    other = allocator.allocate(20 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (0, 40 * MIB)
    with pytest.raises(DeviceMemoryError):
        allocator.allocate(30 * MIB)  # 40 are reserved, 8 of them free but in a segment that is in use
    allocator.free(held)
    allocator.free(other)
    allocator.allocate(60 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_expandable_segments_fragment_less() -> None:
    """A hole of 10 and one of 20 that lie side by side take 30; as plain segments they cannot."""
    reserved: dict[bool, int] = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        first, second = allocator.allocate(10 * MIB), allocator.allocate(20 * MIB)
        allocator.free(first)
        allocator.free(second)
        allocator.allocate(30 * MIB)
        reserved[expandable] = allocator.reserved_bytes
    assert reserved == {False: 60 * MIB, True: 40 * MIB}


def test_expandable_segment_grows_by_whole_pages() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(21 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(19 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(KIB)
    assert allocator.reserved_bytes == 42 * MIB


def test_full_gpu_remaps_pages_of_free_blocks() -> None:
    allocator = CachingAllocator(expandable=True, capacity_bytes=100 * MIB)
    first = allocator.allocate(60 * MIB, stream=0)
    allocator.allocate(20 * MIB, stream=0)
    allocator.free(first)
    allocator.allocate(60 * MIB, stream=1)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 80 * MIB)
    again = allocator.allocate(20 * MIB, stream=0)  # into the hole that was left
    assert (again.offset, allocator.reserved_bytes) == (0, 100 * MIB)


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_allocator_totals_stay_consistent(seed: int, expandable: bool, limited: bool) -> None:
    chance = random.Random(seed)
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=300 * MIB if limited else None)
    blocks: list[object] = []
    for _ in range(120):
        if blocks and chance.random() < 0.5:
            allocator.free(blocks.pop(chance.randrange(len(blocks))))  # type: ignore[arg-type]
        else:
            try:
                blocks.append(
                    allocator.allocate(
                        chance.choice([700, 300 * KIB, 3 * MIB, 17 * MIB, 45 * MIB]), chance.randrange(2)
                    )
                )
            except DeviceMemoryError:
                assert limited
        assert allocator.allocated_bytes == sum(block.size for block in blocks)  # type: ignore[attr-defined]
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert not limited or allocator.reserved_bytes <= 300 * MIB
    spans = sorted((block.segment, block.offset, block.size) for block in blocks)  # type: ignore[attr-defined]
    for (segment, offset, size), (other, begin, _) in itertools.pairwise(spans):
        assert segment != other or offset + size <= begin, "two blocks overlap"
    for block in blocks:
        allocator.free(block)  # type: ignore[arg-type]
    allocator.give_back_cached()
    assert allocator.reserved_bytes == 0
