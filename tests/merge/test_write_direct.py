"""Tensors of full pages are written with direct I/O and others through the page cache; lost and misplaced
blocks are detected."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from fsdp_tune.core.atomic import Disk
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.copy import gather, write
from fsdp_tune.merge.copy.layout import PAGE_BYTES
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.merge.read.reader import is_cold
from tests.merge.checkpoints import SHARDS, make_run, merged_tensors, same_bits, save_dcp

PAGES = {
    "pages": torch.randn(64, 1024),
    "rows of 1.5 pages": torch.randn(9, 8, 1536),
    "wide": torch.randn(3, 65_536).to(torch.bfloat16),
}
ODD = {
    "odd": torch.randn(3000, 7),
    "small": torch.randn(11),
    "scalar": torch.tensor(1.5),
    "many odd rows": torch.randn(513, 1025),
}
FIRST_TENSOR = 3  # writes before it: the test of direct writes, and the header


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def is_direct(request, monkeypatch) -> bool:
    """Small buffers; writes past the page cache, or through it."""
    for module in (gather, write):
        monkeypatch.setattr(module, "BUFFER_BYTES", 16 * PAGE_BYTES)
    monkeypatch.setattr(write, "SAMPLE_BYTES", PAGE_BYTES)
    monkeypatch.setattr(write, "THREADS", 1)
    if not request.param:
        monkeypatch.setattr(write, "takes_direct_writes", lambda path: path.touch())
    return request.param


def opened_direct(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    original, opened = Disk.open_direct, []
    monkeypatch.setattr(
        Disk, "open_direct", lambda self, path: (opened.append(path), original(self, path))[1]
    )
    return opened


def test_tensors_of_full_pages_and_odd_ones_share_a_file(is_direct, tmp_path, monkeypatch):
    state = ODD | PAGES
    save_dcp({"model": state}, tmp_path / "c" / SHARDS)
    opened = opened_direct(monkeypatch)
    merged = merged_tensors(merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "out")).output)
    assert merged.keys() == state.keys()
    assert all(same_bits(merged[name], value) for name, value in state.items())
    assert len(opened) == (1 + len(PAGES) if is_direct else 0)


def change_write(monkeypatch: pytest.MonkeyPatch, number: int, changed) -> None:
    original, count = Disk.write, 0

    def counted(self: Disk, handle, data) -> None:
        nonlocal count
        count += 1
        if count == number:
            changed(original, self, handle, data)
        else:
            original(self, handle, data)

    monkeypatch.setattr(Disk, "write", counted)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_lost_block_is_detected(number, is_direct, tmp_path, monkeypatch):
    save_dcp({"model": {"a": torch.randn(64, 1024)}}, tmp_path / "c" / SHARDS)
    change_write(
        monkeypatch,
        FIRST_TENSOR + number - (not is_direct),
        lambda original, disk, handle, data: handle.seek(len(data), 1),
    )
    with pytest.raises(FsdpTuneError, match="reads back otherwise"):
        merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_misplaced_block_is_detected(is_direct, tmp_path, monkeypatch):
    def shifted(original, disk: Disk, handle, data) -> None:
        handle.seek(PAGE_BYTES, 1)
        original(disk, handle, data)

    save_dcp({"model": {"a": torch.randn(64, 1024)}}, tmp_path / "c" / SHARDS)
    change_write(monkeypatch, FIRST_TENSOR, shifted)
    with pytest.raises(FsdpTuneError, match="reads back otherwise"):
        merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "out"))


def test_partial_writes_are_continued(is_direct, tmp_path, monkeypatch):
    """As after a signal. O_DIRECT takes whole blocks of the disk, so half of a write is some of them."""

    class Halving:
        def __init__(self, handle) -> None:
            self._handle = handle

        def write(self, data) -> int:
            return self._handle.write(
                data[: max(1, len(data) // 2 // 512 * 512)] if len(data) > 512 else data
            )

        def __getattr__(self, name: str):
            return getattr(self._handle, name)

    original = Disk.write
    monkeypatch.setattr(Disk, "write", lambda self, handle, data: original(self, Halving(handle), data))
    save_dcp({"model": PAGES | ODD}, tmp_path / "c" / SHARDS)
    output = merge_checkpoint(tmp_path / "c", MergeOptions(output=tmp_path / "out")).output
    assert all(same_bits(value, (PAGES | ODD)[name]) for name, value in merged_tensors(output).items())


@pytest.mark.parametrize("refuses", ["open_direct", "write"])
def test_file_system_without_direct_io_is_written_through_its_cache(refuses, tmp_path, monkeypatch):
    save_dcp({"model": PAGES | ODD}, tmp_path / "c" / SHARDS)
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
    assert all(same_bits(value, (PAGES | ODD)[name]) for name, value in merged_tensors(output).items())


def test_disk_error_while_testing_direct_writes_is_an_error(tmp_path, monkeypatch):
    def open_direct(self: Disk, path: Path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Disk, "open_direct", open_direct)
    with pytest.raises(OSError, match="Input/output"):
        write.takes_direct_writes(tmp_path / "file")


def test_full_size_is_reserved_before_the_first_byte(tmp_path):
    path = tmp_path / "file"
    with open(path, "w+b") as handle:
        write.allocate(handle, 3 << 20)
        assert os.fstat(handle.fileno()).st_size == 3 << 20
        taken_bytes = os.fstat(handle.fileno()).st_blocks * 512
        with pytest.raises(OSError, match=r"No space|too large"):
            write.allocate(handle, 1 << 55)
    assert taken_bytes in (0, 3 << 20)  # 0: a file system that cannot


def is_file_cold(folder: Path, pattern: str) -> bool:
    (path,) = folder.rglob(pattern)
    with open(path, "rb") as file:
        return is_cold(file.fileno())


@pytest.mark.parametrize("vouched", [False, True], ids=["bare", "with a manifest"])
def test_merge_leaves_the_page_cache_as_it_found_it(vouched, tmp_path):
    state = {f"w{index}": torch.randn(256, 4096) for index in range(12)}
    source = (
        make_run(tmp_path / "run", {1: state}) if vouched else save_dcp({"model": state}, tmp_path / SHARDS)
    )
    for path in source.rglob("*.distcp"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if not is_file_cold(source, "*.distcp"):
        pytest.skip("this file system does not report what is cached")
    merge_checkpoint(source, MergeOptions(output=tmp_path / "first"))
    assert is_file_cold(source, "*.distcp")
    assert is_file_cold(tmp_path / "first", "*.safetensors")
    for path in source.rglob("*.distcp"):
        path.read_bytes()
    merge_checkpoint(source, MergeOptions(output=tmp_path / "second"))
    assert not is_file_cold(source, "*.distcp")
