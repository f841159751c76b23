"""The estimate of the time left: from the last lines, without what a step does not cost, the same for `train`
and `status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.run.time_left import WINDOW_LINES, TimeLeft

STARTED = {"event": "train_started", "step": 0, "time": 1000.0, "total_steps": 100}


def line(step: int, seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.0,
        "step_seconds": seconds,
        "last_step_seconds": seconds,
        "time": 1000.0 + step,
        **more,
    }


def estimate(*lines: dict[str, Any], now: float = 0.0) -> TimeLeft:
    found = TimeLeft(clock=lambda: now)
    for each in lines:
        found.add(each)
    return found


def test_nothing_is_known_before_the_first_line() -> None:
    assert TimeLeft().seconds_left() is None
    assert estimate(STARTED).seconds_left() is None
    assert estimate(line(10), line(20)).seconds_left() is None  # of how many?


def test_first_step_evaluations_and_saves_do_not_count() -> None:
    lines = [
        STARTED,
        line(1, 600.0),
        {"event": "checkpoint_probed", "step": 1, "seconds": 300.0},
        *(line(step, time=10_000.0 * step) for step in range(2, 11)),
        {"step": 10, "eval_loss": 1.0, "eval_seconds": 400.0},
    ]
    assert estimate(*lines).seconds_left() == pytest.approx(90 * 2.0)


def test_first_line_of_several_steps_counts_its_last_step() -> None:
    assert estimate(STARTED, line(10, 60.0, last_step_seconds=3.0)).seconds_left() == pytest.approx(90 * 3.0)


def test_last_lines_count_by_their_steps() -> None:
    slow = [line(step, 9.0) for step in range(1, 41)]
    lines = [line(40 + at, 1.0) for at in range(1, WINDOW_LINES)] + [line(80, 2.0)]
    steps = WINDOW_LINES - 1 + 80 - 40 - (WINDOW_LINES - 1)
    seconds = (WINDOW_LINES - 1) * 1.0 + (80 - 40 - (WINDOW_LINES - 1)) * 2.0
    assert estimate(STARTED, *slow, *lines).seconds_left() == pytest.approx(20 * seconds / steps)


def test_ranks_wait_for_the_scores_of_coming_checkpoints_but_the_last() -> None:
    """Also for one that failed. Evaluations next to the ranks cost them nothing."""
    names = ("checkpoint_evaluated", "checkpoint_evaluation_failed")
    for waited, expected in ((30.0, 2 * 30.0), (None, 0.0)):
        waits = [
            {"event": name, "step": step, "ranks_waited_seconds": waited}
            for name, step in zip(names, (20, 40), strict=True)
        ]
        lines = [STARTED, *(line(step) for step in range(10, 41, 10)), *waits]
        assert estimate(*lines).seconds_left() == pytest.approx(60 * 2.0 + expected)


def test_coming_evaluations_cost_what_the_last_did() -> None:
    evaluations = [{"step": step, "eval_loss": 1.0, "eval_seconds": 30.0} for step in (20, 40)]
    lines = [STARTED, *(line(step) for step in range(10, 41, 10)), *evaluations]
    assert estimate(*lines).seconds_left() == pytest.approx(60 * 2.0 + 3 * 30.0)


def test_time_that_passes_since_the_last_line_is_at_most_a_step() -> None:
    lines = [STARTED, line(10), line(20)]
    assert estimate(*lines, now=1020.5).seconds_left() == pytest.approx(80 * 2.0 - 0.5)
    assert estimate(*lines, now=99_999.0).seconds_left() == pytest.approx(79 * 2.0)
    # a heartbeat knows of more steps
    assert estimate(*lines, now=99_999.0).seconds_left(25) == pytest.approx(75 * 2.0)
    assert estimate(*lines, now=1020.5).ends_at() == pytest.approx(1020.5 + 159.5)


def test_resumed_run_is_estimated_from_its_own_lines() -> None:
    resumed = {"event": "train_started", "step": 50, "time": 1.0, "total_steps": 200}
    lines = [STARTED, line(10), line(50, 9.0), resumed, line(60, 100.0, last_step_seconds=1.0)]
    assert estimate(*lines).seconds_left() == pytest.approx(140 * 1.0)
    assert estimate(*lines, line(70, 4.0)).seconds_left() == pytest.approx(130 * 4.0)


def test_heartbeats_count_until_there_is_a_line() -> None:
    now = [0.0]
    left = TimeLeft(clock=lambda: now[0])
    left.add(STARTED)
    for now[0], step in ((600.0, 1), (602.0, 2), (604.0, 3)):
        left.see(step)
    assert left.seconds_left(3) == pytest.approx(97 * 2.0)
    left.add(line(5, 7.0))
    assert left.seconds_left(5) == pytest.approx(95 * 7.0)


def test_lines_of_other_versions_are_ignored() -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"step": True, "loss": 1.0},
        {"step": "1", "loss": 1.0},
        {"step": 3, "loss": 1.0, "step_seconds": "nan"},
    ]
    assert estimate(STARTED, *odd).seconds_left() is None


def test_bar_and_status_have_the_same_estimate(tmp_path: Path) -> None:
    """`status` reads the end of the file alone, and the bar takes every line."""
    from fsdp_tune.launch.run_status import _time_left, last_lines

    lines = [
        STARTED,
        line(1, 500.0),
        *(line(step, 1.0 + step % 7, padding="x" * 9000) for step in range(2, 81)),
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    found = _time_left(last_lines(path), 100)
    assert len(last_lines(path)) < 40
    assert found.seconds_left(90) == estimate(*lines).seconds_left(90)
