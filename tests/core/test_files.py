"""Files that others may have replaced: nothing blocks, and nothing is read without a limit."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fsdp_tune.core import files
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.files import UnsuitableFileError, expanded, folders_in, lines_of, open_regular, read_end_of_log, read_regular
from tests.time_limit import limited


def unsuitable(folder: Path) -> dict[str, Path]:
    """Paths that are no regular files, by the word of the message."""
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/dev/null")
    (folder / "inside").mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "s"))
    return {"a FIFO": folder / "fifo", "a device": folder / "link", "a directory": folder / "inside", "a socket": folder / "s"}


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    for kind, path in unsuitable(tmp_path).items():
        for read in (open_regular, read_regular, lambda each: list(lines_of(each))):
            with limited(kind), pytest.raises(UnsuitableFileError) as caught:
                read(path)
            (problem,) = caught.value.problems
            assert (problem.where.source, problem.message) == (str(path), f"is {kind}, not a regular file")
            assert problem.hint is not None


def test_end_of_a_log_is_read_from_where_a_launch_began_and_no_more_than_its_last_part(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("of an earlier launch\nof this launch\n")
    assert read_end_of_log(log, log.read_text().index("of this")) == "of this launch\n"
    os.truncate(log, 8 << 30)
    with open(log, "a") as file:
        file.write("\nfailed\n")
    text = read_end_of_log(log, 0)
    assert text.endswith("\nfailed\n")
    assert len(text) <= files.LOG_BYTES


def test_error_is_a_usage_error_and_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        read_regular(tmp_path)
    assert isinstance(caught.value, OSError)
    assert (caught.value.exit_code, caught.value.filename, caught.value.strerror) == (
        2,
        str(tmp_path),
        "is a directory, not a regular file",
    )


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent")


def test_file_above_the_limit_is_refused_by_path_and_size(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.truncate(40_000_000_000)
    with pytest.raises(UnsuitableFileError, match=r"metrics\.jsonl: has 37\.25 GiB, and at most 1\.00 KiB are read") as caught:
        read_regular(path, most_bytes=1024)
    assert "tail -n" in str(caught.value.problems[0].hint)
    path.write_bytes(b"12345")
    assert read_regular(path, most_bytes=5) == b"12345"


def test_lines_are_those_with_the_marker_whatever_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    lines = [b"%d %s" % (number, b"eval" if number % 7 == 0 else b"x" * (number % 11)) for number in range(100)]
    path.write_bytes(b"\n".join(lines))
    wanted = [line for line in lines if b"eval" in line]
    for piece in (1, 3, 17, 1000, 10_000):
        monkeypatch.setattr(files, "PIECE_BYTES", piece)
        assert list(lines_of(path, marker=b"eval")) == wanted
        assert list(lines_of(path)) == lines
        assert list(lines_of(path, last_bytes=60)) == [line for at, line in enumerate(lines) if len(b"\n".join(lines[at:])) <= 60]


def test_line_without_end_is_left_out_above_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 10)
    monkeypatch.setattr(files, "LINE_BYTES", 50)
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + b"x" * 500 + b"\ntwo\n" + b"y" * 500)
    assert list(lines_of(path)) == [b"one", b"two"]


def test_folders_of_a_directory_that_holds_closed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b" / "inner").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("a")
    assert folders_in(tmp_path) == [tmp_path / "a", tmp_path / "b", tmp_path / "link"]
    monkeypatch.setattr(os, "scandir", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert folders_in(tmp_path) == []


def test_home_of_nobody_is_the_name_of_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object) -> None:
        raise KeyError

    monkeypatch.setenv("HOME", "/home/me")
    assert (expanded("~/x"), expanded("a/~")) == (Path("/home/me/x"), Path("a/~"))
    assert expanded("~no-such-user/x") == Path("~no-such-user/x")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert expanded(Path("~/x")) == Path("~/x")
