"""The disk is asked for everything once, in the order of the copy, and never too far ahead."""

from __future__ import annotations

import time

import pytest
import torch

from fsdp_tune.merge.copy import readahead
from fsdp_tune.merge.copy.readahead import ReadAhead
from fsdp_tune.merge.formats.contents import Source
from fsdp_tune.merge.formats.dcp import read_dcp
from fsdp_tune.merge.formats.reader import SourceFiles
from tests.merge.checkpoints import SHARDS, save_dcp


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Four tensors of 4,000 bytes; what is asked for is recorded in `asked`."""
    save_dcp({"model": {f"t{index}": torch.randn(1000) for index in range(4)}}, tmp_path / SHARDS)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(SourceFiles, "will_need", lambda self, file, at, count: asked.append((at, count)))
    monkeypatch.setattr(readahead, "AHEAD_BYTES", 1000)
    with SourceFiles(tmp_path / SHARDS) as files:
        tensors, _ = read_dcp(files)
        yield Source({tensor.name: tensor for tensor in tensors}), asked


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_it_stays_a_window_ahead_of_what_was_read(source, monkeypatch):
    monkeypatch.setattr(readahead, "WINDOW_BYTES", 2000)
    wanted, asked = source
    with ReadAhead([wanted], ["t0", "t1", "t2", "t3"]) as ahead:
        wait_until(lambda: sum(count for _, count in asked) >= 2000)
        time.sleep(0.05)
        assert sum(count for _, count in asked) <= 4000
        ahead.has_read(10**6)
        total = sum(chunk.place.length_bytes for tensor in wanted.tensors.values() for chunk in tensor.chunks)
        wait_until(lambda: sum(count for _, count in asked) == total)
    ends = [at + count for at, count in asked]
    assert [at for at, _ in asked[1:]] == ends[:-1]


def test_it_stops_when_the_copy_stops(source, monkeypatch):
    monkeypatch.setattr(readahead, "WINDOW_BYTES", 0)
    wanted, _ = source
    started = time.monotonic()
    with ReadAhead([wanted], ["t0"]):
        pass
    assert time.monotonic() - started < 5


def test_reading_ahead_of_a_file_that_is_gone_is_no_error(tmp_path):
    with SourceFiles(tmp_path) as files:
        files.will_need("gone.distcp", 0, 10)
        files.will_need("../outside", 0, 10)
