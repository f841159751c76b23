from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_tune.run.metrics_file import Follower


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


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("seen_in_between", [True, False])
def test_truncated_file_yields_lines_after_the_cut(tmp_path: Path, in_place: bool, seen_in_between: bool) -> None:
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
