"""Whole pages past the cache, their edges through it; every byte once, in its place, and what is misplaced is seen."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.core.atomic import Disk
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.copy import sink
from fsdp_tune.merge.copy.layout import PAGE_BYTES
from fsdp_tune.merge.copy.sink import TensorSink, allocate, block_buffer, pieces, takes_direct_writes
from fsdp_tune.merge.merging import MergeOptions, merge_checkpoint
from tests.merge.checkpoints import SHARDS, merged_tensors, same_bits, save_dcp

BLOCK_BYTES = 4 * PAGE_BYTES
SAMPLE_BYTES = PAGE_BYTES


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def file(request, tmp_path, monkeypatch) -> tuple[Path, bool]:
    """300,000 bytes, to be written past the cache or through it."""
    monkeypatch.setattr(sink, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(sink, "SAMPLE_BYTES", SAMPLE_BYTES)
    path = tmp_path / "file"
    path.touch()
    if request.param and not takes_direct_writes(path):
        pytest.skip("this file system cannot write past its cache")
    with open(path, "r+b") as handle:
        allocate(handle, 300_000)
    return path, request.param


def put(file: tuple[Path, bool], first_byte: int, data: bytes, portion_bytes: int = 5000) -> tuple[bool, bytes]:
    """Whether it reads back, and the digest."""
    path, is_direct = file
    with TensorSink(path, first_byte, len(data), block_buffer(), is_direct=is_direct) as target:
        for at in range(0, len(data), portion_bytes):
            target.write(np.frombuffer(data[at : at + portion_bytes], np.uint8))
        return target.reads_back(), target.digest.digest()


@given(st.integers(0, 3 * PAGE_BYTES), st.integers(0, 40 * PAGE_BYTES))
def test_pieces_cover_every_byte_once_and_pages_are_whole(first_byte, size_bytes):
    found = list(pieces(first_byte, size_bytes))
    at = first_byte
    for piece in found:
        assert piece.offset == at
        assert 0 < piece.size_bytes <= sink.BLOCK_BYTES
        if piece.is_paged:
            assert piece.offset % PAGE_BYTES == piece.size_bytes % PAGE_BYTES == 0
        else:
            assert piece.size_bytes < 2 * PAGE_BYTES
        at += piece.size_bytes
    assert at == first_byte + size_bytes


@pytest.mark.parametrize("portion_bytes", [1000, 5000, 100_000])
def test_neighbours_that_share_pages_both_stay_whole(portion_bytes, file):
    first, second = os.urandom(100_001), os.urandom(123_457)
    for data, at in ((first, 137), (second, 137 + len(first))):
        reads_back, digest = put(file, at, data, portion_bytes)
        assert reads_back
        assert digest == xxhash.xxh3_128_digest(data)
    assert file[0].read_bytes()[137 : 137 + len(first) + len(second)] == first + second
    assert file[0].stat().st_size == 300_000


def test_a_block_in_a_wrong_place_is_seen(file, monkeypatch):
    """The disk writes the second block one page further on, and says nothing."""
    original, count = Disk.write, 0

    def write(self: Disk, handle, data) -> None:
        nonlocal count
        count += 1
        if count == 2:
            handle.seek(PAGE_BYTES, os.SEEK_CUR)
        original(self, handle, data)

    monkeypatch.setattr(Disk, "write", write)
    assert not put(file, 0, os.urandom(3 * BLOCK_BYTES))[0]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_block_that_never_arrived_is_seen(number, file, monkeypatch):
    original, count = Disk.write, 0

    def write(self: Disk, handle, data) -> None:
        nonlocal count
        count += 1
        if count != number:
            original(self, handle, data)

    monkeypatch.setattr(Disk, "write", write)
    assert not put(file, 100, os.urandom(2 * BLOCK_BYTES + 100))[0]


def test_what_changes_between_the_copy_and_the_disk_is_seen_by_the_digest(tmp_path, monkeypatch):
    """A bit of the block that no sample covers: read back it would not be noticed."""
    save_dcp({"model": {"a": torch.randn(1 << 19)}}, tmp_path / "c" / SHARDS)
    original = TensorSink._put

    def flipping(self, piece) -> None:
        self._block[piece.size_bytes - 1] ^= 1
        original(self, piece)

    monkeypatch.setattr(TensorSink, "_put", flipping)
    with pytest.raises(FsdpTuneError, match="reads back otherwise"):
        merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_kernel_that_takes_half_is_given_the_rest(file, monkeypatch):
    """As at a signal; O_DIRECT takes whole blocks of the disk, so a half is one too."""

    class Halving:
        def __init__(self, handle) -> None:
            self._handle = handle

        def write(self, data) -> int:
            return self._handle.write(data[: max(1, len(data) // 2 // 512 * 512)] if len(data) > 512 else data)

        def __getattr__(self, name: str):
            return getattr(self._handle, name)

    original = Disk.write
    monkeypatch.setattr(Disk, "write", lambda self, handle, data: original(self, Halving(handle), data))
    data = os.urandom(2 * BLOCK_BYTES)
    assert put(file, 0, data)[0]
    assert file[0].read_bytes()[: len(data)] == data


@pytest.mark.parametrize("refuses", ["open_direct", "write"])
def test_a_file_system_that_cannot_is_written_through_its_cache(refuses, tmp_path, monkeypatch):
    state = {"a": torch.randn(3000, 7), "b": __import__("torch").randn(11)}
    save_dcp({"model": state}, tmp_path / "c" / SHARDS)
    original, opened = Disk.open_direct, []

    def open_direct(self: Disk, path: Path):
        opened.append(path)
        if refuses == "open_direct":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        handle = original(self, path)

        def write(data) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        handle.write = write
        return handle

    monkeypatch.setattr(Disk, "open_direct", open_direct)
    output = merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "out")).output
    assert len(opened) == 1
    assert all(same_bits(value, state[name]) for name, value in merged_tensors(output).items())


def test_a_disk_that_breaks_while_it_is_asked_is_an_error(tmp_path, monkeypatch):
    def open_direct(self: Disk, path: Path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Disk, "open_direct", open_direct)
    with pytest.raises(OSError, match="Input/output"):
        takes_direct_writes(tmp_path / "file")


def test_what_went_past_the_cache_is_not_in_it(file):
    path, is_direct = file
    put(file, 0, os.urandom(8 * BLOCK_BYTES))
    if not is_direct or not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("only what goes past the cache stays out of it")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            os.preadv(descriptor, [bytearray(1)], BLOCK_BYTES, os.RWF_NOWAIT)
    finally:
        os.close(descriptor)


def test_room_for_the_whole_file_is_taken_before_the_first_byte(tmp_path):
    path = tmp_path / "file"
    with open(path, "w+b") as handle:
        allocate(handle, 3 << 20)
        assert os.fstat(handle.fileno()).st_size == 3 << 20
        taken_bytes = os.fstat(handle.fileno()).st_blocks * 512
        with pytest.raises(OSError, match=r"No space|too large"):
            allocate(handle, 1 << 55)
    assert taken_bytes in (0, 3 << 20)  # 0: a file system that cannot


@pytest.mark.parametrize(("first_byte", "least_in_place"), [(0, 20), (137, 1), (PAGE_BYTES - 16, 20)])
def test_bytes_made_in_place_and_bytes_copied_there_are_the_same(first_byte, least_in_place, file):
    """Made in place where an element could lie there, copied where its address would be odd or two pieces share it."""
    path, is_direct = file
    data, at = np.frombuffer(os.urandom(9 * PAGE_BYTES + 48), np.uint8), 0
    in_place = 0
    with TensorSink(path, first_byte, data.size, block_buffer(), is_direct=is_direct) as target:
        while at < data.size:
            portion = data[at : at + 1008]
            room = target.room(portion.size)
            if room is not None:
                np.copyto(room, portion)
                in_place += 1
            target.write(portion if room is None else room)
            at += portion.size
        assert target.reads_back()
    assert in_place >= least_in_place
    assert path.read_bytes()[first_byte : first_byte + data.size] == data.tobytes()
