"""Bars of long work on terminals and in pipes, and the lines that training prints next to them."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.cli import progress
from fsdp_tune.cli.screen import Screen, command
from tests.cli.forked import command as started
from tests.cli.forked import frames_on_a_terminal, shown_on_a_terminal, written_to_a_terminal

STARTED = {"event": "train_started", "step": 0, "total_steps": 20000}
STEP = {
    "loss": 2.5,
    "grad_norm": 1.25,
    "learning_rate": 1e-4,
    "tokens_per_second_per_device": 1234.5,
    "peak_host_gib": 0.5,
    "step_seconds": 2.0,
}
SHARES = {"data_wait_seconds": 0.02, "last_step_seconds": 1.0, "optimizer_seconds": 0.05}
FRAME_SECONDS = 0.2
"""A bar is drawn every tenth of a second."""


def long_run(*more: dict[str, Any]) -> None:
    with command(False) as screen, screen.training():
        screen.metrics(STARTED)
        for line in ({"step": 1000}, {"step": 2000, "loss": "nan"}):
            screen.metrics({**STEP, **SHARES, "mfu": 0.412, **line})
        for line in more:
            screen.metrics(line)


def falling_losses() -> None:
    with command(False) as screen, screen.training():
        screen.metrics(STARTED)
        for step in range(1, 31):
            screen.metrics({"loss": 40.0 - step, "step": 600 * step})
        time.sleep(FRAME_SECONDS)


def test_lines_are_printed_above_a_live_bar() -> None:
    def program() -> None:
        with command(False) as screen, screen.progress("training", None, "steps") as bar:
            bar.start(0, 60)
            screen.message("said → in between")
            bar.at(60, "loss 1.5")

    shown = shown_on_a_terminal(program)
    assert "said → in between\r\n" in shown
    assert "training  60/60 steps  loss 1.5  ━" in shown


def test_unused_bar_leaves_no_line() -> None:
    def program() -> None:
        with command(False) as screen, screen.progress("x", None, "rows"):
            pass

    assert shown_on_a_terminal(program).split("\n")[-1].strip("\r ") == ""


def test_piped_output_has_lines_only_for_long_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(json_output=False)
    with screen.progress("tokenising", 100, "rows") as bar:
        bar.advance(50)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_SECONDS", 0.0)
    with screen.progress("tokenising", 100, "rows") as bar:
        bar.advance(50)
    assert capsys.readouterr().out.startswith("tokenising: 50 of 100 rows (50 %)")


def test_piped_phases_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for json_output in (False, True):
        screen = Screen(json_output=json_output)
        screen.phase("planning")
        screen.close()
        assert capsys.readouterr().out == ("{}\n" if json_output else "")


def test_step_is_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(json_output=False)
    with screen.training():
        screen.metrics({**STARTED, "total_steps": 100})
        screen.metrics({**STEP, "step": 20})
        screen.metrics({**STEP, "step": 40, "loss": "nan", "grad_norm": None})
        screen.metrics({"step": 40, "eval_loss": 1.5, "eval_a_loss": 1.0, "eval_b_loss": 2.0})
        screen.metrics({**STEP, **SHARES, "step": 60, "mfu": 0.412, "exposed_communication_seconds": None})
        screen.metrics(
            {
                "event": "witness_cost",
                "step": 40,
                "time": 1.0,
                "cpu_seconds": 0.1,
                "training_cpu_seconds": 3.0,
                "steps": 100,
            }
        )
        screen.metrics({"event": "loss_scale_backed_off", "step": 41, "time": 1.0, "loss_scale": 512.0})
        screen.metrics(
            {
                "event": "samples",
                "step": 42,
                "seconds": 1.0,
                "samples": [{"prompt": "a\n" * 40, "text": "two\nthree"}],
            }
        )
        screen.metrics({"step": 60, "eval_loss": "nan", "eval_a_loss": 1.0, "eval_b_loss": "nan"})
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"step 20/100  2m40s left  loss 2\.5000  grad norm 1\.250  lr 1\.00e-04  1,234 "
        r"tokens/s/device  0\.50 GiB  ends .*:\d\d",
        lines[1],
    )
    assert re.match(r"step 40/100  .* left  loss nan  grad norm -", lines[2])
    assert lines[3] == "step 40: eval loss 1.5000 (a 1.0000, b 2.0000)"
    assert "tokens/s/device  MFU 41%  0.50 GiB  (data 1%, optimizer 5%)" in lines[4]
    assert lines[5] == "step 41: loss scale backed off (loss_scale 512.0)"
    assert lines[6] == "step 42: … " + "a\\n" * 20 + " → two\\nthree"
    assert lines[7] == "step 60: eval loss nan (a 1.0000, b nan)"


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        (60, "loss"),
        (80, "1,234 tok/s"),
        (120, "tok/s  data 1% opt 5%  0.50 GiB  MFU 41%  grad 1.250"),
        (200, "optimizer"),
    ],
)
def test_logged_steps_stay_on_screen_with_step_time_left_and_loss_first(columns: int, last: str) -> None:
    lines = re.split(r"[\r\n]+", shown_on_a_terminal(long_run, columns))
    kept = [line for line in lines if line.startswith("step ")]
    assert [
        re.match(r"step (\d+)/20000  1?\dh..m..s left  loss (2.5000|nan)", line) is not None for line in kept
    ] == [True, True]
    assert last in kept[0]
    drawn = [line for line in lines if line.startswith("training")]
    assert re.match(r"training  2,000/20,000 steps  .*h..m..s left  loss nan", drawn[-1])
    assert max(map(len, kept + drawn)) <= columns


def test_stopped_run_keeps_bar_at_last_step() -> None:
    stopping = {"event": "stopping", "step": 2007, "time": 1.0, "reason": "interrupted"}
    lines = re.split(r"[\r\n]+", shown_on_a_terminal(lambda: long_run(stopping), 80))
    assert "step 2007: stopping (interrupted)" in lines
    assert [line for line in lines if line.startswith("training")][-1].startswith(
        "training  2,007/20,000 steps"
    )


def frames(*positions: tuple[int, str, int, int], total_steps: int = 0) -> list[str]:
    """Return what the bar of a training shows as its ranks report positions."""

    def program() -> None:
        with command(False) as screen, screen.training():
            time.sleep(FRAME_SECONDS)
            if total_steps:
                screen.metrics({**STARTED, "total_steps": total_steps})
            for position in positions:
                screen.position(*position)
                time.sleep(FRAME_SECONDS)

    return frames_on_a_terminal(program, 120)


def test_phases_of_the_start_are_shown_with_elapsed_time() -> None:
    shown = " | ".join(frames((0, "importing", 0, 0), (0, "importing", 0, 0), (0, "loading the model", 0, 0)))
    assert re.search(r"starting the ranks  0\.\ds .*importing  0\.[1-9]s .*loading the model  0\.\ds", shown)
    assert "0 steps" not in shown


def test_phases_before_the_ranks_are_shown_from_the_first_second() -> None:
    def program() -> None:
        with command(False) as screen:
            screen.phase("reading the recipe")
            time.sleep(FRAME_SECONDS)
            screen.began -= 60
            screen.phase("planning")
            screen.message("a line")
            time.sleep(FRAME_SECONDS)
            with screen.progress("tokenising", None, "rows") as bar:
                bar.advance(3)
                time.sleep(FRAME_SECONDS)

    shown = shown_on_a_terminal(program, 80)
    assert re.search(r"reading the recipe  0\.\ds", shown)
    assert re.search(r"a line\r\n", shown)
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert lines[-1] == "tokenising  3 rows"


def test_command_shows_its_first_phase_on_a_terminal() -> None:
    def program() -> None:
        import sys

        sys.stderr = sys.stdout
        started("train", "missing.yaml")()

    first, *rest = frames_on_a_terminal(program, 80)
    assert re.match(r"reading the recipe  \d\.\ds", first)
    assert any(line.startswith("error: missing.yaml: ") for line in rest)


@pytest.mark.parametrize(("columns", "points", "width"), [(80, 10, 12), (120, 20, 24)])
def test_bar_has_a_sparkline_of_the_last_losses(columns: int, points: int, width: int) -> None:
    lines = [line for line in frames_on_a_terminal(falling_losses, columns) if line.startswith("training")]
    assert max(map(len, lines)) <= columns
    found = re.search(r"loss 10\.0000  ([▁▂▃▄▅▆▇█]+)  ([━─]+)$", lines[-1])
    assert found is not None, lines[-1]
    assert (len(found[1]), found[1][0], found[1][-1], len(found[2])) == (points, "█", "▁", width)


@pytest.mark.parametrize(
    ("columns", "detail"),
    [(60, "loss 1.5"), (80, "loss 1.5  eval loss 1.6 (best 1.6)"), (64, "loss 1.5  ▁▂")],
)
def test_bar_shows_the_fields_next_to_it_that_fit(columns: int, detail: str) -> None:
    def program() -> None:
        with command(False) as screen, screen.progress("training", None, "steps") as bar:
            bar.start(0, 20_000)
            bar.at(20_000, "loss 1.5  eval loss 1.6 (best 1.6)  ▁▂")

    line = frames_on_a_terminal(program, columns)[-1]
    assert line.startswith(f"training  20,000/20,000 steps  {detail}")
    assert len(line) <= columns


def test_bar_is_coloured_unless_no_color_is_set() -> None:
    assert "\x1b[32m" in written_to_a_terminal(falling_losses, 120)
    assert (
        re.search(r"\x1b\[(\d+;)*3[0-7]m", written_to_a_terminal(falling_losses, 120, NO_COLOR="1")) is None
    )


def test_bar_moves_with_each_step_and_shows_evaluation_and_saving() -> None:
    shown = frames(
        *(
            (0, "forward", 0, 0),
            (1, "training", 0, 0),
            (7, "forward", 0, 0),
            (12, "evaluating", 3, 40),
            (12, "evaluating", 27, 40),
        ),
        *((12, "saving", 0, 0), (13, "backward", 0, 0), (61, "finished", 0, 0)),
        total_steps=60,
    )
    for pattern in (
        *(r"training  0/60 steps  first step", r"training  1/60 steps", r"training  7/60 steps  .*left"),
        *(
            r"evaluating 3/40 batches 0\.\ds",
            r"evaluating 27/40 batches 0\.[1-9]s",
            r"saving 0\.\ds",
            "13/60",
            "ending the ranks",
        ),
    ):
        assert any(re.search(pattern, line) for line in shown), (pattern, shown)
    assert not any("saving" in line for line in shown if "13/60" in line)
    assert not any("61/60" in line for line in shown)


def test_first_step_counts_from_the_start_of_the_command_and_later_ones_from_the_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks count from their launch, and start again after a failure; a sweep starts its next run."""
    event = {
        "event": "first_step",
        "step": 1,
        "time": 1000.0,
        "phase_seconds": {"launching": 2.0, "training": 3.0},
    }
    screen = Screen(json_output=False)
    monkeypatch.setattr("time.time", lambda: 1000.5)  # the line is half a second old
    monkeypatch.setattr("time.monotonic", lambda: screen.began + 9.5)
    with screen.training():
        screen.metrics(event)
        screen.metrics(event)
    began = screen.began
    monkeypatch.setattr("time.monotonic", lambda: began + 100.0)
    screen.next_run()
    monkeypatch.setattr("time.monotonic", lambda: began + 106.5)
    with screen.training():
        screen.metrics(event)
    assert capsys.readouterr().out.splitlines() == [
        "first step 9.0 s after the start (checking 4.0, launching 2.0, training 3.0)",
        "first step 5.0 s after the launch (launching 2.0, training 3.0)",
        "first step 6.0 s after the start (checking 1.0, launching 2.0, training 3.0)",
    ]


def test_time_left_of_resumed_run_uses_steps_since_its_start() -> None:
    with progress.SilentBar(Screen(json_output=False), "training", None, "steps") as bar:
        bar.start(90, 100)
        assert bar.seconds_left() is None
        bar._started -= 5.0
        bar.at(95)
        assert bar.seconds_left() == pytest.approx(5.0, abs=0.5)


def test_lines_of_long_work_in_a_pipe_are_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.PlainBar(Screen(json_output=False), "trying recipes", None, "recipes") as bar:
        for _ in range(3600):
            now += 1.0
            bar.advance()
    printed = capsys.readouterr()
    lines = (printed.out + printed.err).splitlines()
    assert lines[0].startswith("trying recipes: 10 recipes")
    assert lines[-1].startswith("trying recipes: 3,600 recipes")
    assert len(lines) == 11


def test_work_with_lines_of_its_own_prints_none_of_its_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.SilentBar(Screen(json_output=False), "training", None, "steps") as bar:
        for _ in range(100):
            now += 60.0
            bar.advance()
    assert capsys.readouterr() == ("", "")


def test_texts_grow_in_columns_under_their_titles() -> None:
    """Answers of two models, whose letters are not the terminal's commands."""
    screen: Any = SimpleNamespace(talk=io.StringIO())
    with progress.LiveColumns(screen, ["base\x1b[2J", "tuned"]) as columns:
        for column, piece in ((0, "one "), (1, "three"), (0, "two"), (1, "\x1b[31m")):
            columns.add(column, piece)
    head, row = (line.split() for line in screen.talk.getvalue().splitlines() if line.strip())
    assert head == ["base\\x1b[2J", "tuned"]
    assert row == ["one", "two", "three\\x1b[31m"]


@pytest.mark.parametrize(("draws", "has_bar"), [(True, True), (False, False)])
def test_bar_is_drawn_with_letters_that_the_terminal_has(*, draws: bool, has_bar: bool) -> None:
    screen: Any = SimpleNamespace(talk=io.StringIO(), began=0.0, draws=draws)
    bar = progress.LiveBar(screen, "training", 4, "steps")
    bar.at(2, "loss 1.5", [3.0, 1.0])
    line = bar._line().plain
    assert line.startswith("training  2/4 steps")
    assert "loss 1.5" in line
    assert ("━" in line, "█▁" in line) == (has_bar, has_bar)
