"""Kill, refuse or cut any file operation of a save on any rank: the checkpoint is old or new, and the run
continues."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import on_devices
from tests.faults import ranks
from tests.faults.checks import half_files, stages, verified_steps
from tests.faults.conftest import Count
from tests.faults.disk import Fault, kill_points
from tests.ranks import KILLED, Ranks

pytestmark = pytest.mark.ranks
RANKS = 2
BATCH = 40
"""Directories that one world comes back to: its start costs more than a directory."""


class Cases:
    """Copies of a run that has its first checkpoint."""

    def __init__(self, folder: Path, on_ranks: Ranks, *, full: bool = False) -> None:
        self.folder, self.on_ranks, self.full = folder, on_ranks, full
        self.first = folder / "first"
        self.first.mkdir()
        on_ranks.run(RANKS, ranks.save, self.first, ranks.FIRST, full)

    def new(self, name: object) -> Path:
        return shutil.copytree(self.first, self.folder / str(name))

    def operations(self, *, asynchronous: bool = False) -> list[list[tuple[str, str]]]:
        """Return the disk operations of a successful save, by rank."""
        path = self.new("counted")
        counted: list[list[tuple[str, str]]] = self.on_ranks.run(
            RANKS, ranks.save_counting, path, ranks.SECOND, asynchronous, self.full
        )
        shutil.rmtree(path)
        return counted


def kill_each(cases: Cases, points: Sequence[tuple[int, Fault]], *, asynchronous: bool = False) -> None:
    """A save for each (rank, point) in which that rank dies there; then all come back."""
    for batch in _batches(points, BATCH):
        paths: list[Path] = []
        for number, (rank, fault) in enumerate(batch):
            path = cases.new(number)
            ends = cases.on_ranks.ends(
                RANKS, ranks.save_killed, path, ranks.SECOND, rank, fault, asynchronous, cases.full
            )
            what = f"rank {rank}, {fault}"
            assert ends[rank].code == KILLED, f"{what}: {ends[rank].text}"
            assert not any(end.stuck for end in ends), what
            assert half_files(path) == [], what
            assert verified_steps(RunDir(path)) in (
                [ranks.FIRST],
                [ranks.FIRST, ranks.SECOND],
                [ranks.SECOND],
            ), what
            paths.append(path)
        newest = [verified_steps(RunDir(path))[-1] for path in paths]
        back = cases.on_ranks.run(RANKS, ranks.come_back, paths)
        assert back[0] == back[1], "all ranks load one checkpoint"
        for path, wanted, (step, same), case in zip(paths, newest, back[0], batch, strict=True):
            assert (step, same) == (wanted, True), case
            assert stages(path) == [], case
            assert verified_steps(RunDir(path))[-1] == ranks.THIRD, case
            shutil.rmtree(path)


def _batches(points: Sequence[tuple[int, Fault]], size: int) -> list[Sequence[tuple[int, Fault]]]:
    return [points[start : start + size] for start in range(0, len(points), size)]


def points_of(
    operations: list[list[tuple[str, str]]], *, every_write: int, every: int = 1
) -> list[tuple[int, Fault]]:
    return [
        (rank, fault) for rank, log in enumerate(operations) for fault in kill_points(log, every_write, every)
    ]


@pytest.mark.slow
def test_save_operations_are_deterministic(tmp_path: Path, on_ranks: Ranks) -> None:
    """Else the n-th would not be the same one twice."""
    cases = Cases(tmp_path, on_ranks)

    def without_pids(logs: list[list[tuple[str, str]]]) -> list[list[tuple[str, str]]]:
        return [[(name, path.rstrip("0123456789")) for name, path in log] for log in logs]

    first = without_pids(cases.operations())
    assert without_pids(cases.operations()) == first
    kinds = {name for log in first for name, _ in log}
    assert {"mkdir", "open", "write", "fsync", "fsync_dir", "rename", "rmtree"} <= kinds


@on_devices
def test_rank_killed_at_any_of_a_few_operations_leaves_old_or_new(
    tmp_path: Path, on_ranks: Ranks, count: Count
) -> None:
    cases = Cases(tmp_path, on_ranks)
    points = points_of(cases.operations(), every_write=60, every=29)
    kill_each(cases, points[::2])
    kill_each(cases, points[1::2], asynchronous=True)
    count(kill_points_in_a_save=len(points))


@on_devices
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["sharded", "background", "full"])
def test_rank_killed_at_any_operation_leaves_old_or_new(
    variant: str, tmp_path: Path, on_ranks: Ranks, count: Count
) -> None:
    cases = Cases(tmp_path, on_ranks, full=variant == "full")
    background = variant == "background"  # the same operations, in a thread: every other one
    points = points_of(
        cases.operations(asynchronous=background), every_write=12, every=2 if background else 1
    )
    assert len(points) >= 90
    kill_each(cases, points, asynchronous=background)
    count(kill_points_in_a_save=len(points))


ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EMFILE)


def refuse_each(cases: Cases, faults: Sequence[tuple[int, Fault]]) -> None:
    """Save once for each (rank, fault). It fails with a reason or is complete; the older one is kept; the
    next save succeeds."""
    paths = [cases.new(number) for number in range(len(faults))]
    told = cases.on_ranks.run(
        RANKS,
        ranks.save_on_broken_disks,
        [(path, *fault) for path, fault in zip(paths, faults, strict=True)],
        ranks.SECOND,
    )
    for path, (rank, fault), messages in zip(paths, faults, zip(*told, strict=True), strict=True):
        what = f"rank {rank}, {fault}: {messages}"
        assert half_files(path) == [], what
        steps = verified_steps(RunDir(path))
        assert steps[-1] == ranks.THIRD, what
        assert ranks.FIRST in steps or ranks.SECOND in steps, what
        assert stages(path) == [], what
        assert all(messages) or not any(messages), f"the ranks agree: {what}"
        if all(messages):
            assert any(_reason(fault.error) in str(message) for message in messages), what
            if fault.error in (errno.ENOSPC, errno.EDQUOT):
                assert all(
                    re.search(r"; [\d.]+ [KMGT]?i?B are free$", str(message)) for message in messages
                ), what
        else:
            assert ranks.SECOND in steps or ranks.THIRD in steps, what
        shutil.rmtree(path)


def _reason(number: int) -> str:
    return os.strerror(number)


def broken(
    cases: Cases, errors: Sequence[int], *, every_write: int, every: int = 1
) -> list[tuple[int, Fault]]:
    faults: list[tuple[int, Fault]] = []
    for rank, log in enumerate(cases.operations()):
        numbers = sorted({point.number for point in kill_points(log, every_write)})[::every]
        faults += [
            (rank, Fault(number, "error", error, sticky))
            for number in numbers
            for error in errors
            for sticky in (False, True)
        ]
    return faults


@on_devices
def test_disk_refusing_any_of_a_few_operations_is_reported_and_the_next_save_succeeds(
    tmp_path: Path, on_ranks: Ranks, count: Count
) -> None:
    cases = Cases(tmp_path, on_ranks)
    # each error, for once and for ever
    faults = broken(cases, (errno.ENOSPC, errno.EIO), every_write=60, every=10)[::3]
    refuse_each(cases, faults)
    count(refused_operations=len(faults))


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS, ids=[errno.errorcode[error] for error in ERRORS])
def test_disk_refusing_any_operation_is_reported_and_the_next_save_succeeds(
    error: int, tmp_path: Path, on_ranks: Ranks, count: Count
) -> None:
    cases = Cases(tmp_path, on_ranks)
    # Which of them the disk gives is all one to what writes; every operation has two that it may meet.
    faults = broken(cases, [error], every_write=12, every=1 if error in (errno.ENOSPC, errno.EIO) else 3)
    for batch in _batches(faults, 60):
        refuse_each(cases, batch)
    count(refused_operations=len(faults))


def test_short_and_interrupted_writes_are_completed(tmp_path: Path, on_ranks: Ranks) -> None:
    cases = Cases(tmp_path, on_ranks)
    path = cases.new("short")
    on_ranks.run(RANKS, ranks.save_with_short_writes, path, ranks.SECOND)
    assert verified_steps(RunDir(path)) == [ranks.SECOND]
    assert on_ranks.run(RANKS, ranks.come_back, [path]) == [[(ranks.SECOND, True)]] * RANKS


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_limit_on_file_sizes_fails_the_save_and_keeps_the_older_checkpoint(
    rank: int, tmp_path: Path, on_ranks: Ranks, count: Count
) -> None:
    """A limit of the kernel: no writer can pass it by, neither Python nor C++."""
    cases = Cases(tmp_path, on_ranks)
    sizes = {path.name: path.stat().st_size for path in cases.first.rglob("*") if path.is_file()}
    # Each kind of file is once the first that is cut.
    limits = sorted({1, max(sizes.values()) // 2, *(size - 1 for size in sizes.values())})
    paths = [cases.new(limit) for limit in limits]
    told = on_ranks.run(RANKS, ranks.save_limited, list(zip(paths, limits, strict=True)), ranks.SECOND, rank)[
        rank
    ]
    for path, limit, message in zip(paths, limits, told, strict=True):
        assert half_files(path) == [], limit
        if message is None:
            assert verified_steps(RunDir(path)) == [ranks.SECOND], limit
        else:
            assert "File too large" in message, message
            assert verified_steps(RunDir(path)) == [ranks.FIRST], limit
        assert stages(path) == [], limit
    count(limits=len(limits))
