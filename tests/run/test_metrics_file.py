from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import pytest

from fsdp_tune.core import files
from fsdp_tune.run import metrics_file
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import Continued
from fsdp_tune.run.metrics_file import (
    Follower,
    MetricsReader,
    append_event,
    metrics_with,
    read_metrics,
)


def steps(lines: list[dict[str, object]]) -> list[object]:
    return [line["step"] for line in lines]


def write(path: Path, *numbers: int) -> None:
    path.write_text("".join(f'{{"step": {number}}}\n' for number in numbers))


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_line_is_yielded_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    append(path, '{"step": 1}\n{"st')
    assert steps(follower.read()) == [1]
    append(path, 'ep": 2}\n')
    assert steps(follower.read()) == [2]
    assert follower.read() == []


def test_earlier_lines_are_not_yielded(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 1, 2)
    follower = Follower(path)
    append(path, '{"step": 3}\n')
    assert steps(follower.read()) == [3]


def test_file_that_grows_to_any_size_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 1)
    follower = Follower(path)
    size = path.stat().st_size + files.LINE_BYTES + 10
    os.truncate(path, size)
    assert follower.read() == []
    append(path, '\n{"step": 2}\n')
    assert steps(follower.read()) == [2], "what has no end of a line is left out"
    os.truncate(path, 2 << 40)
    assert follower.read() == []


def test_read_that_was_refused_is_made_again(tmp_path: Path) -> None:
    path, aside = tmp_path / "m.jsonl", tmp_path / "aside"
    write(path, 1)
    follower = Follower(path)
    append(path, '{"step": 2}\n')
    path.rename(aside)
    for stand_in in (path.mkdir, lambda: path.symlink_to(path)):
        stand_in()
        with pytest.raises(OSError, match=r"directory|symbolic links"):
            follower.read()
        path.unlink() if path.is_symlink() else path.rmdir()
    aside.rename(path)
    assert steps(follower.read()) == [2]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("seen_in_between", [True, False])
def test_truncated_file_yields_lines_after_the_cut(
    tmp_path: Path, in_place: bool, seen_in_between: bool
) -> None:
    path = tmp_path / "m.jsonl"
    write(path, *range(1, 9))
    follower = Follower(path)
    if in_place:
        os.truncate(path, len('{"step": 1}\n') * 3)
    else:
        write(tmp_path / "new", 1, 2, 3)
        os.replace(tmp_path / "new", path)
    if seen_in_between:
        assert follower.read() == []
    append(path, '{"step": 4, "again": 1}\n')
    assert steps(follower.read()) == [4]
    append(path, '{"step": 5, "again": 1}\n')
    assert steps(follower.read()) == [5]


def test_file_that_was_rewritten_twice_and_has_the_number_of_the_first_is_read_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 gives the number of a file that is gone to the next one."""
    path = tmp_path / "m.jsonl"
    write(path, *range(1, 4))
    follower = Follower(path)
    append(path, '{"step": 4}\n')
    assert steps(follower.read()) == [4]
    monkeypatch.setattr(Follower, "_stat", lambda _: (7, path.stat().st_size))
    follower._identity = (7, path.stat().st_size)
    write(path, 1, 2)
    append(path, "".join(f'{{"step": {step}, "again": 1}}\n' for step in range(3, 7)))
    assert steps(follower.read()) == [3, 4, 5, 6]
    append(path, '{"step": 7}\n')
    assert steps(follower.read()) == [7]


def test_lines_that_there_is_no_memory_for_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_text('{"step": 1}\n')
    with monkeypatch.context() as patched:
        patched.setattr(metrics_file, "json_objects", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            follower.read()
    assert follower.read() == [{"step": 1}]


class ShortOnce:
    """A disk that takes a part of the first write, and refuses the next one."""

    def __init__(self, file: Any, taken: int) -> None:
        self._file, self._taken, self._calls = file, taken, 0

    def write(self, data: Any) -> int:
        self._calls += 1
        if self._calls == 2:
            raise OSError(28, "No space left on device")
        return int(self._file.write(data[: self._taken]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.mark.parametrize("before", ["", '{"step": 1}\n', '{"step": 1}\n{"st'])
@pytest.mark.parametrize("taken", [1, 20, -1])
def test_event_that_the_disk_takes_a_part_of_can_be_appended_again(
    before: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*words: Any, **given: Any) -> ShortOnce:
        return ShortOnce(open(*words, **given), taken)

    run = RunDir(tmp_path)
    run.metrics_jsonl.write_text(before)
    with monkeypatch.context() as patched:
        patched.setattr(metrics_file, "open", short, raising=False)
        with pytest.raises(OSError, match="No space"):
            append_event(run, Continued(1, 2.0, "m"))
    assert run.metrics_jsonl.read_text() == before
    append_event(run, Continued(1, 2.0, "m"))
    assert [line.get("event") for line in read_metrics(run)] == [None] * before.count("\n") + ["continued"]


def test_incomplete_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    follower = Follower(path)
    append(path, '{"step": 1\n[1]\n{"step": 2}\n')
    assert steps(follower.read()) == [2]


def test_recreated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, 1)
    follower = Follower(path)
    path.unlink()
    assert follower.read() == []
    write(path, 7)
    assert steps(follower.read()) == [7]


def read(reader: MetricsReader) -> tuple[list[int], bool]:
    lines, are_all = reader.read()
    return [line["step"] for line in lines], are_all


def test_reader_returns_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert read(reader) == ([], False)
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read(reader) == ([1, 2], True)
    assert read(reader) == ([], False)
    with open(path, "a") as file:
        file.write('ep": 3}\ntorn {\n[4]\n{"step": 5}\n')
    assert read(reader) == ([3, 5], False)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "text", ['{"step": 1}\n', '{"step": 1}\n{"step": 8, "loss": 1.25}\n{"step": 9}\n', ""]
)
def test_reader_begins_again_with_a_file_that_was_cut_or_rewritten(
    tmp_path: Path, text: str, in_place: bool
) -> None:
    """Also if it is as long as before, or longer."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "loss": 1.75}\n')
    reader = MetricsReader(path)
    read(reader)
    if in_place:
        path.write_text(text)
    else:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(path)
    assert read(reader) == ([line["step"] for line in read_metrics(RunDir(tmp_path))], True)


def test_reader_begins_again_with_a_file_that_was_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    reader = MetricsReader(path)
    assert read(reader) == ([1], True)
    path.unlink()
    assert read(reader) == ([], True)
    path.write_text('{"step": 7}\n')
    assert read(reader)[0] == [7]


def test_lines_with_a_marker_are_found_wherever_they_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            f'{{"step": {step}, "{"eval_loss" if step % 500 == 0 else "loss"}": 1.0}}\n'
            for step in range(1, 2001)
        )
    )
    assert [line["step"] for line in metrics_with(path, b'"eval_loss"')] == [500, 1000, 1500, 2000]
    assert metrics_with(tmp_path / "absent", b"x") == []
