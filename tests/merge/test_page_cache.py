"""Cold pages are given back once every reader has used them; what was cached before is left alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from fsdp_tune.merge.formats import page_cache
from fsdp_tune.merge.formats.page_cache import PageCache, is_cold
from fsdp_tune.merge.merging import MergeOptions, merge_checkpoint
from tests.merge.checkpoints import SHARDS, make_run, save_dcp

MIB = 1 << 20


@pytest.fixture
def given_back(monkeypatch) -> list[tuple[int, int]]:
    """(start, end) of all that was given back, without the overlap with the run before."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(page_cache, "_FOLIO_BYTES", 0)
    monkeypatch.setattr(page_cache, "is_cold", lambda descriptor: True)
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, start, count, advice: seen.append((start, start + count)))
    return seen


FILE = Path("file")


def opened(*, is_read_twice: bool = False) -> PageCache:
    pages = PageCache()
    pages.opened(FILE, 0, is_read_twice=is_read_twice)
    return pages


def test_runs_of_two_threads_in_one_file_grow_apart_and_are_given_back_when_they_are_long(given_back):
    pages = opened()
    for at in range(0, 8 * MIB, MIB):
        pages.copied(FILE, 0, at, MIB)
        pages.copied(FILE, 0, 100 * MIB + at, MIB)
    assert given_back == [(0, 8 * MIB), (100 * MIB, 108 * MIB)]


def test_a_run_goes_on_over_what_lies_between_two_storages(given_back):
    pages = opened()
    pages.copied(FILE, 0, 0, 7 * MIB)
    pages.copied(FILE, 0, 7 * MIB + 900, 2 * MIB)
    assert given_back == [(0, 9 * MIB + 900)]


def test_tensors_that_end_in_another_order_are_one_run(given_back):
    pages = opened()
    for at in (0, 4, 2, 6):
        pages.copied(FILE, 0, at * MIB, 2 * MIB)
    assert given_back == [(0, 8 * MIB)]


def test_short_runs_go_with_the_oldest_first_and_at_the_end(given_back):
    pages = opened()
    for number in range(100):
        pages.copied(FILE, 0, number * MIB, 1000)
    assert given_back == [(number * MIB, number * MIB + 1000) for number in range(100 - page_cache._MOST_RUNS)]
    pages.closing(FILE, 0)
    assert len(given_back) == 100


def test_what_the_digest_has_not_read_yet_stays(given_back):
    pages = opened(is_read_twice=True)
    pages.copied(FILE, 0, 0, 8 * MIB)
    pages.digested(FILE, 0, 4 * MIB, 4 * MIB)
    assert given_back == []
    pages.digested(FILE, 0, 8 * MIB, 4 * MIB)
    assert given_back == [(0, 8 * MIB)]


def test_what_the_digest_has_read_goes_with_the_copy(given_back):
    pages = opened(is_read_twice=True)
    pages.digested(FILE, 0, 8 * MIB, 8 * MIB)
    assert given_back == []
    pages.copied(FILE, 0, 0, 8 * MIB)
    assert given_back == [(0, 8 * MIB)]


@pytest.mark.parametrize("goes_on", [lambda pages: pages.copied(FILE, 0, 0, 2 * MIB), PageCache.copy_ended], ids=["copied", "ended"])
def test_the_digest_waits_for_the_copy(given_back, monkeypatch, goes_on):
    monkeypatch.setattr(page_cache, "LEAD_BYTES", MIB)
    pages = opened(is_read_twice=True)
    thread = threading.Thread(target=pages.digested, args=(FILE, 0, 2 * MIB, 2 * MIB), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    goes_on(pages)
    thread.join(10)
    assert not thread.is_alive()


def drop(folder: Path) -> None:
    for path in folder.rglob("*.distcp"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cold(folder: Path) -> bool:
    (path,) = folder.rglob("*.distcp")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return is_cold(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("vouched", [False, True], ids=["bare", "with a manifest"])
def test_a_merge_leaves_the_page_cache_as_it_found_it(tmp_path, vouched):
    state = {f"w{index}": torch.randn(256, 4096) for index in range(12)}
    source = make_run(tmp_path / "run", {1: state}) if vouched else save_dcp({"model": state}, tmp_path / SHARDS)
    drop(source)
    if not cold(source):
        pytest.skip("this file system does not tell what is cached")
    merge_checkpoint(source, MergeOptions(output=tmp_path / "first"))
    assert cold(source)
    for path in source.rglob("*.distcp"):
        path.read_bytes()
    merge_checkpoint(source, MergeOptions(output=tmp_path / "second"))
    assert not cold(source)
