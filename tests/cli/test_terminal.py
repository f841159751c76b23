"""Tables and lines on terminals of several widths, and what a quiet command prints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.cli.screen import Screen, command
from fsdp_tune.cli.terminal_text import wrapped
from fsdp_tune.core.errors import Notice, Problem
from fsdp_tune.data.format.templates import bundled_text
from fsdp_tune.recipe.read.catalogue import catalogue
from tests.cli.forked import command as started
from tests.cli.forked import lines_on_a_terminal


def lines_of_table(columns: int, head: list[str], rows: list[list[Any]]) -> list[str]:
    def program() -> None:
        with command(False) as screen:
            screen.table("t", head, rows)

    lines = lines_on_a_terminal(program, columns)
    assert max(map(len, lines)) <= columns
    return lines


def test_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(json_output=False).table("Title", ["name", "n"], [["a", 1], ["longer", 22]])
    assert capsys.readouterr().out.splitlines() == [
        "Title",
        "  name    n",
        "  ──────  ──",
        "  a       1",
        "  longer  22",
    ]


def test_last_column_of_a_table_is_wrapped_to_the_terminal() -> None:
    lines = lines_of_table(60, ["key", "because"], [["a.key", "words " * 30], ["b", "short"]])
    assert " ".join(lines).split().count("words") == 30
    assert lines[4].startswith("         words")


def test_table_wider_than_the_terminal_is_printed_as_records() -> None:
    path = "/a/long-path/" + "x" * 50
    rows = [["train", "1,234,567", path, "two words " * 10, ""], ["b", "2", "/b", "c", "d"]]
    lines = lines_of_table(80, ["set", "rows", "path", "because", "last"], rows)
    assert lines[:4] == ["t", "  train", "    rows     1,234,567", f"    path     {path}"]
    assert lines[4].startswith("    because  two words two words")
    assert lines[5].startswith("             ")
    assert lines[6:] == ["  b", "    rows     2", "    path     /b", "    because  c", "    last     d"]
    wide = lines_of_table(240, ["set", "rows", "path", "because", "last"], rows)
    assert wide[1].split() == ["set", "rows", "path", "because", "last"]


def test_paths_and_commands_in_the_last_column_stay_whole() -> None:
    path, command_line = (
        f"/home/my-user/{'x' * 30}/my-env/bin/python",
        "`fsdp-tune runs --set training.seed=1`",
    )

    def program() -> None:
        with command(False) as screen:
            rows = [["python", path], ["spaces", " " * 90], ["lines", "two\nlines"]]
            screen.table(
                "t", ["what", "value"], [*rows, ["hint", f"the same as many words and {command_line}"]]
            )

    lines = lines_on_a_terminal(program, 60)
    assert f"  python  {path}" in lines
    assert "  lines   two lines" in lines
    assert sum(command_line in line for line in lines) == 1


def test_words_of_a_table_without_room_for_them_are_below_its_rows() -> None:
    rows = [["a.key", "x" * 40, "two words " * 6], ["b", "y", ""], ["c", "z", "short"]]
    assert lines_of_table(60, ["key", "value", "because"], rows) == [
        "t",
        "  key    value",
        "      because",
        f"  {'─' * 5}  {'─' * 40}",
        f"  a.key  {'x' * 40}",
        "      two words two words two words two words two words two",
        "      words",
        "  b      y",
        "  c      z",
        "      short",
    ]


@pytest.mark.parametrize(("columns", "lines"), [(40, [3, 4]), (200, [1, 1])])
def test_lines_are_wrapped_between_words_and_code_is_not_broken(
    columns: int, lines: list[int], tmp_path: Path
) -> None:
    """The log has one line whatever the terminal is."""
    text = "batch: two sequences on each rank; write `training.global_batch_size: 8` to fix it"

    def program() -> None:
        os.dup2(1, 2)
        with command(False) as screen:
            screen.log_to(tmp_path / "log")
            screen.message(text)
            screen.notices([Notice("a", text)])

    shown = lines_on_a_terminal(program, columns)
    assert max(map(len, shown)) <= columns
    assert len(shown) == sum(lines)
    assert sum("`training.global_batch_size: 8`" in line for line in shown) == 2
    joined = [" ".join(" ".join(part).split()) for part in (shown[: lines[0]], shown[lines[0] :])]
    assert joined == [text, f"notice: {text}"]
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_code_in_backticks_is_not_broken() -> None:
    text = (
        "what ranks do: sharding, sums over ranks, recomputation (`fsdp-tune rehearse --parity` "
        "compares them)"
    )
    assert wrapped(text, 76, 0) == [
        "what ranks do: sharding, sums over ranks, recomputation",
        "(`fsdp-tune rehearse --parity` compares them)",
    ]
    assert wrapped(f"type `{'word ' * 30}`", 40) == ["type", f"  `{'word ' * 30}`"]


def test_files_are_printed_as_they_are() -> None:
    """A template, or a recipe, may be copied from the terminal."""
    smoke = catalogue()["gpt2_smoke"].read_text(encoding="utf-8")
    for words, text in (
        (["templates", "show", "qwen3"], bundled_text("qwen3")),
        (["recipes", "show", "gpt2_smoke"], smoke),
    ):
        assert "\n".join(lines_on_a_terminal(started(*words), 40)) == text.rstrip("\n")


def test_quiet_prints_problems_and_warnings_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    screen = Screen(json_output=False)
    screen.is_quiet = True
    screen.log_to(tmp_path / "log")
    with screen.training():
        screen.metrics({"event": "train_started", "step": 0, "total_steps": 100})
        screen.metrics({"step": 20, "loss": 2.5})
        screen.metrics({"event": "tracker_failed", "step": 1, "time": 1.0, "message": "no disk"})
    screen.table("t", ["a"], [["b"]])
    screen.close([Problem("c", "failed")])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["warning: step 1: no disk", "error: failed"]
    assert "step 20/100" in (tmp_path / "log").read_text()
