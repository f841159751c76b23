"""The cache: keyed by content, published atomically, built once; a killed process leaves no partial entry."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

import pytest

import fsdp_tune.core.atomic as atomic
from fsdp_tune.core.atomic import Disk
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data import build, cache, preparation
from fsdp_tune.data.preparation import prepare
from fsdp_tune.data.read import file_access
from fsdp_tune.run.manifest import digest_file
from tests.data.support import ByteEncoder, prepared, recipe_for, rows_of, write_jsonl

FORKS = multiprocessing.get_context("fork")
ROWS = [{"prompt": f"{n} ", "completion": str(n)} for n in range(30)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


def stores(folder: Path) -> list[str]:
    return sorted(
        path.name
        for path in (folder / "cache" / "data").iterdir()
        if not path.name.endswith((".lock", ".json"))
    )


def test_identical_data_are_prepared_once(tmp_path: Path, rows: Path) -> None:
    first, second = (
        prepared(tmp_path, rows),
        prepared(tmp_path, rows, num_proc=3, shuffle=False, pad_to_multiple_of=1),
    )
    assert (first.reused, second.reused) == (False, True)
    assert first.path == second.path


def test_moved_file_reuses_cache_entry(tmp_path: Path, rows: Path) -> None:
    first = prepared(tmp_path, rows)
    moved = rows.rename(tmp_path / "moved.jsonl")
    assert prepared(tmp_path, moved).reused
    assert prepared(tmp_path, moved).key == first.key


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 65},
        {"packing": True},
        {"separator": "\n"},
        {"append_eos": False},
        {"loss_on": "all"},
        {"eval": {"rows": 2}},
        {"overlong": "drop"},
    ],
    ids=str,
)
def test_cache_key_changes_with_every_row_changing_setting(
    tmp_path: Path, rows: Path, change: dict[str, Any]
) -> None:
    assert prepared(tmp_path, rows).key != prepared(tmp_path, rows, **change).key


def test_tokenizer_and_its_template_change_the_key(tmp_path: Path, rows: Path) -> None:
    keys = {
        prepared(tmp_path, rows, encoder=encoder).key
        for encoder in (ByteEncoder(), ByteEncoder(merges=["12"]), ByteEncoder(template="t"))
    }
    assert len(keys) == 3


def test_eval_set_does_not_change_training_key(tmp_path: Path, rows: Path) -> None:
    """A resumed run may be evaluated on more; it must be trained on the same."""
    first = prepared(tmp_path, rows)
    second = prepared(tmp_path, rows, eval=[{"path": str(rows), "label": "more"}])
    assert first.key == second.key
    assert first.path != second.path


def test_changed_file_gets_new_entry_and_old_one_is_kept(tmp_path: Path, rows: Path) -> None:
    first = prepared(tmp_path, rows)
    before = rows.stat()
    rows.write_text(rows.read_text().replace("12", "21"))
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync -t or tar leave it
    second = prepared(tmp_path, rows)
    assert not second.reused
    assert second.key != first.key
    assert rows_of(first)[12].input_ids.tolist() != rows_of(second)[12].input_ids.tolist()


def read_by_digest(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed from here on, as they are hashed."""
    names: list[str] = []
    monkeypatch.setattr(file_access, "digest_file", lambda path: names.append(path.name) or digest_file(path))
    return names


def test_unchanged_file_is_hashed_once(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = read_by_digest(monkeypatch)
    monkeypatch.setattr(file_access, "SETTLED_SECONDS", -10.0)
    first = prepared(tmp_path, rows)
    second = prepared(tmp_path, rows)
    assert hashed.count("rows.jsonl") == 1
    assert (second.reused, second.key) == (True, first.key)
    prepare(recipe_for(tmp_path, rows), ByteEncoder(), verify=True)
    assert (hashed.count("rows.jsonl"), hashed.count("tokens.int32")) == (2, 2), (
        "`--verify-data` hashes every file"
    )


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_change_that_keeps_size_and_modification_time_is_noticed(
    tmp_path: Path, rows: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_access, "SETTLED_SECONDS", -10.0)
    first, before = prepared(tmp_path, rows), rows.stat()
    changed = rows.read_text().replace("12", "21")
    if how == "replaced":
        (tmp_path / "new").write_text(changed)
        (tmp_path / "new").rename(rows)
    else:
        rows.write_text(changed)
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prepared(tmp_path, rows).key != first.key


def test_recently_written_file_is_hashed_again(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of the file system's clock a second write of the same size leaves the same times."""
    hashed = read_by_digest(monkeypatch)
    prepared(tmp_path, rows)
    prepared(tmp_path, rows)
    assert hashed.count("rows.jsonl") == 2


def test_damaged_digest_cache_only_costs_rehashing(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_access, "SETTLED_SECONDS", -10.0)
    first = prepared(tmp_path, rows)
    records = list((tmp_path / "cache" / "digests").iterdir())
    (record,) = (path for path in records if json.loads(path.read_bytes())["directory"] == str(rows.parent))
    for damaged in ("", "[]", '{"files": {"rows.jsonl": 3}}', '{"files": {"rows.jsonl": [1, 2, 3, 4, 5]}}'):
        record.write_text(damaged)
        assert prepared(tmp_path, rows).key == first.key


def test_verification_rebuilds_a_store_with_flipped_bits(tmp_path: Path, rows: Path) -> None:
    first = prepared(tmp_path, rows)
    tokens = Path(first.path) / "tokens.int32"
    tokens.write_bytes(b"\x01" + tokens.read_bytes()[1:])
    again = prepared(tmp_path, rows)
    assert not again.reused
    assert rows_of(again)[0].input_ids[0] == ord("0")


def test_prepared_rows_are_hashed_again_only_if_they_changed(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 GB would cost a start 20 s; a write changes the times of a file, and `--verify-data` reads all of
    them."""
    monkeypatch.setattr(file_access, "SETTLED_SECONDS", -10.0)
    tokens = Path(prepared(tmp_path, rows).path) / "tokens.int32"
    assert prepared(tmp_path, rows).reused  # hashed, and remembered
    hashed = read_by_digest(monkeypatch)
    assert prepared(tmp_path, rows).reused
    assert hashed == []
    times = tokens.stat().st_atime_ns, tokens.stat().st_mtime_ns
    tokens.write_bytes(b"\x01" + tokens.read_bytes()[1:])
    os.utime(tokens, ns=times)
    assert not prepared(tmp_path, rows).reused
    assert "tokens.int32" in hashed
    hashed.clear()
    assert prepare(recipe_for(tmp_path, rows), ByteEncoder(), verify=True).reused
    assert {"rows.jsonl", "tokens.int32"} <= set(hashed)


def test_failed_rebuild_does_not_return_the_damaged_store(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Path(prepared(tmp_path, rows).path) / "tokens.int32"
    tokens.write_bytes(b"\x01" + tokens.read_bytes()[1:])

    def no_space(*_: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparation, "build_store", no_space)
    with pytest.raises(OSError, match="No space left"):
        prepare(recipe_for(tmp_path, rows), ByteEncoder(), verify=True)


def test_in_memory_data_sets_have_separate_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr("datasets.config.IN_MEMORY_MAX_SIZE", 1 << 30)
    for name in ("one", "two"):
        datasets.Dataset.from_dict({"text": [f"row of {name}"] * 3}).save_to_disk(str(tmp_path / name))
    first, second = prepared(tmp_path, tmp_path / "one"), prepared(tmp_path, tmp_path / "two")
    assert first.path != second.path
    assert rows_of(first)[0].input_ids.tolist() != rows_of(second)[0].input_ids.tolist()


def test_file_modified_while_read_is_refused(tmp_path: Path, rows: Path) -> None:
    class Writing(ByteEncoder):
        def encode(self, texts: list[str]) -> list[list[int]]:
            with open(rows, "a") as file:
                file.write('{"prompt": "late ", "completion": "row"}\n')
            return super().encode(texts)

    with pytest.raises(FsdpTuneError, match="written to while it was read"):
        prepared(tmp_path, rows, encoder=Writing())
    assert stores(tmp_path) == []


def test_damaged_store_is_built_again(tmp_path: Path, rows: Path) -> None:
    first = prepared(tmp_path, rows)
    with open(Path(first.path) / "tokens.int32", "ab") as file:
        file.write(b"x")
    assert not prepared(tmp_path, rows).reused
    assert len(rows_of(prepared(tmp_path, rows))) == 30


class FailingDisk(Disk):
    """Every operation counts; from the n-th on they raise, as on a disk that is full or gone."""

    def __init__(self, fail_at: int) -> None:
        self.operations, self.fail_at = 0, fail_at

    def _count(self) -> None:
        self.operations += 1
        if self.operations >= self.fail_at:
            raise OSError(28, "No space left on device")

    def open(self, path: Path, mode: str = "wb") -> IO[bytes]:
        self._count()
        return super().open(path, mode)

    def write(self, file: IO[bytes], data: bytes | memoryview) -> None:
        self._count()
        super().write(file, data)

    def fsync(self, file: IO[bytes]) -> None:
        self._count()
        super().fsync(file)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)


def replace_disks(disk: Disk) -> None:
    for module in (atomic, cache, build):
        module.DISK = disk


def failing_disks() -> Iterator[FailingDisk]:
    for fail_at in count(1):
        disk = FailingDisk(fail_at)
        replace_disks(disk)
        yield disk
        if disk.operations < fail_at:
            return


def test_disk_failure_at_any_operation_leaves_no_partial_store(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (atomic, cache, build):
        monkeypatch.setattr(module, "DISK", module.DISK)  # restored at the end
    failures = 0
    for _ in failing_disks():
        try:
            prepared(tmp_path, rows)
        except OSError:
            failures += 1
            assert stores(tmp_path) == [] if (tmp_path / "cache" / "data").exists() else True
        else:
            assert len(stores(tmp_path)) == 1
    assert failures > 15
    assert len(rows_of(prepared(tmp_path, rows))) == 30


class KillingDisk(FailingDisk):
    """From the n-th operation on the process is killed."""

    def _count(self) -> None:
        self.operations += 1
        if self.operations >= self.fail_at:
            os.kill(os.getpid(), signal.SIGKILL)


def test_kill_at_any_operation_leaves_no_partial_store_and_is_cleaned_up(tmp_path: Path, rows: Path) -> None:
    def prepare_until(operation: int) -> None:
        replace_disks(KillingDisk(operation))
        prepared(tmp_path, rows)

    kills = 0
    while True:
        child = FORKS.Process(target=prepare_until, args=(kills + 1,))
        child.start()
        child.join()
        data = tmp_path / "cache" / "data"
        for store in data.iterdir() if data.exists() else ():
            if not store.name.startswith("."):
                assert cache.complete(store) is not None, store
        if child.exitcode != -signal.SIGKILL:
            break
        kills += 1
    assert (child.exitcode, kills > 20) == (0, True)
    assert len(rows_of(prepared(tmp_path, rows))) == 30
    assert len(stores(tmp_path)) == 1, "stages of the killed are gone"


def test_concurrent_processes_build_one_store(tmp_path: Path, rows: Path) -> None:
    together, results = FORKS.Barrier(3), FORKS.SimpleQueue()

    class Slow(ByteEncoder):
        def encode(self, texts: list[str]) -> list[list[int]]:
            time.sleep(0.2)
            return super().encode(texts)

    def race() -> None:
        together.wait()
        found = prepare(recipe_for(tmp_path, rows), Slow())
        results.put((found.reused, found.train_rows))

    racers = [FORKS.Process(target=race) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(results.get() for _ in racers) == [(False, 30), (True, 30), (True, 30)]


def test_without_locks_the_second_process_uses_the_existing_entry(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(cache.LOCKLESS[0], "no locks")

    monkeypatch.setattr("fcntl.flock", no_locks)
    build = prepare(recipe_for(tmp_path, rows), ByteEncoder())
    path = Path(build.path)
    aside = path.rename(path.with_name("aside"))

    def other_was_faster(stage: Path) -> dict[str, Any]:
        aside.rename(path)
        (stage / "half").write_text("")
        return {}

    _, reused = cache.built(path, other_was_faster)
    assert not reused
    assert len(rows_of(build)) == 30
    assert atomic.STAGE_MARK not in "".join(stores(tmp_path))
