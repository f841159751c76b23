"""Streams of a terminal: their width, what is asked on them, and what happens when one fails."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest

from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.terminal import write_text
from fsdp_tune.core.errors import Notice


class Tty(io.StringIO):
    """A terminal without a descriptor."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """Make stdout a terminal. Not a fixture: pytest replaces stdout after these."""
    stream = Tty()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


@pytest.fixture
def screen() -> Screen:
    return Screen(json_output=False)


@pytest.mark.parametrize(("columns", "width"), [("50", 50), ("wide", 80), ("", 80), ("0", 80)])
def test_width_is_that_of_columns_or_80(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", columns)
    assert (screen.wrap_width, screen.is_narrow) == (width, True)


@pytest.mark.parametrize(
    ("encoding", "term", "is_live", "draws"),
    [("utf-8", "xterm", True, True), ("ascii", "xterm", True, False), ("utf-8", "dumb", False, False)],
)
def test_sparklines_need_a_terminal_that_redraws_and_has_their_letters(
    screen: Screen,
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    term: str,
    is_live: bool,
    draws: bool,
) -> None:
    monkeypatch.setattr(on_a_terminal(monkeypatch), "encoding", encoding)
    monkeypatch.setenv("TERM", term)
    assert (screen.is_live, screen.draws) == (is_live, draws)
    screen.is_quiet = True
    assert not screen.is_live


def test_fields_that_do_not_fit_are_left_out_on_a_terminal_and_kept_in_the_log(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tty = on_a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "20")
    screen.log_to(tmp_path / "log")
    screen.fields(["step 1", "tokens per second 1,234", "loss 2.5"], ["step 1", "loss 2.5", "1,234 tok/s"])
    screen.fields(["step 2", "loss 2.5"], ["step 2"])
    screen.close()
    assert tty.getvalue().splitlines() == ["step 1  loss 2.5", "step 2  loss 2.5"]
    assert "step 1  tokens per second 1,234  loss 2.5\n" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.usefixtures("capsys")
def test_log_of_each_run_has_the_lines_from_its_start(screen: Screen, tmp_path: Path, waits: bool) -> None:
    screen.message("before")
    if not waits:
        screen.stop_waiting()
        screen.stop_waiting()
    first, second = tmp_path / "first" / "log", tmp_path / "second" / "log"
    screen.log_to(first)
    screen.message("one")
    began = screen.began
    screen.next_run()
    assert screen.began > began
    screen.message("between")
    screen.log_to(second)
    screen.message("two")
    screen.close()
    words = [[line.split("  ")[1] for line in path.read_text().splitlines()] for path in (first, second)]
    assert words == [["before", "one"], ["between", "two"]]
    assert first.stat().st_mode & 0o077 == 0


def test_log_that_cannot_be_opened_is_a_warning(
    screen: Screen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    screen.log_to(tmp_path / "file" / "log")
    screen.message("shown")
    screen.close()
    shown = capsys.readouterr()
    assert shown.out == "shown\n"
    assert shown.err.startswith(f"warning: {tmp_path}/file/log cannot be written (File exists)")


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        (
            "stdout",
            errno.ENOSPC,
            ["warning: stdout cannot be written (full) and is closed; the command continues"],
        ),
        ("stderr", errno.ENOSPC, []),
        ("stdout", errno.EPIPE, []),
    ],
)
def test_stream_that_fails_in_its_thread_is_reported_on_the_other_one(
    screen: Screen,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    number: int,
    words: list[str],
) -> None:
    screen.log_to(tmp_path / "log")
    screen._stream_failed(name, OSError(number, "full"))
    screen.close()
    assert capsys.readouterr().err.splitlines() == words
    assert ("cannot be written" in (tmp_path / "log").read_text()) == (number != errno.EPIPE)


def closed_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk() -> io.TextIOWrapper:
    return open("/dev/full", "w")


def test_full_disk_closes_stdout_with_one_warning(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        screen.message("one")
        screen.message("two")
        monkeypatch.undo()
    assert capsys.readouterr().err.splitlines() == [
        "warning: stdout cannot be written (No space left on device) and is closed; the command continues"
    ]


def test_reader_that_has_ended_is_ignored_and_a_result_that_is_not_written_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with closed_pipe() as stream:
        write_text(stream, "one")
        write_text(stream, "two", is_result=True)
    with full_disk() as stream, pytest.raises(OSError, match="No space left"):
        write_text(stream, "one", is_result=True)
    assert capsys.readouterr().err == ""


def test_letters_that_a_stream_lacks_are_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_text(stream, "a → b")
    assert stream.buffer.getvalue() == b"a \\u2192 b"


def typed(text: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text), encoding="utf-8")


def test_line_of_a_pipe_is_printed_after_the_prompt(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", typed(b"hello\ncaf\xe9\nlast"))
    assert [screen.ask("> ") for _ in range(4)] == ["hello", "caf\ufffd", "last", None]
    assert capsys.readouterr().out == "> hello\n> caf\ufffd\n> last\n"


def test_prompt_of_a_json_command_is_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = Tty("hello\n")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert Screen(json_output=True).ask("> ") == "hello"
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "> "), "the terminal shows what is typed"


def test_line_that_is_typed_has_a_history(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    tty = on_a_terminal(monkeypatch)
    monkeypatch.setattr(sys, "stdin", Tty())
    answers = iter(["hello"])

    def read(prompt: str) -> str:
        tty.write(prompt)
        for answer in answers:
            return answer
        raise EOFError

    monkeypatch.setattr(builtins, "input", read)
    assert (screen.ask("> "), screen.ask("> ")) == ("hello", None)
    assert tty.getvalue() == "> > \n", "the shell's prompt is on a line of its own"


@pytest.mark.parametrize(("no_color", "head"), [(None, "\x1b[33m\x1b[1mnotice:\x1b[0m"), ("1", "notice:")])
def test_notice_is_printed_once_in_colour_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_color: str | None, head: str
) -> None:
    stderr, screen = Tty(), Screen(json_output=True)
    monkeypatch.setattr(sys, "stderr", stderr)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    notice = Notice("a", "something is ignored", hint="leave it out")
    screen.notices([notice])
    screen.notices([notice, notice])
    screen.document({"answer": 1})
    screen.close()
    first, second = stderr.getvalue().splitlines()
    assert first == f"{head} something is ignored"
    assert second.endswith(" leave it out")
    document = json.loads(capsys.readouterr().out)
    assert (document["answer"], [each["code"] for each in document["notices"]]) == (1, ["a"])
