from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_tune.cli import runs, status_view
from fsdp_tune.cli.screen import Screen
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.launch.run_status import DirectoryStatus, run_status
from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import refuse_undeclared
from tests.cli.forked import command, ended, lines_on_a_terminal, shown_on_a_terminal
from tests.cli.in_process import errors
from tests.launch.test_accelerate import resolved

LINES: list[dict[str, object]] = [
    {"event": "train_started", "step": 0, "total_steps": 60, "time": 0.0},
    *(
        {
            "step": step,
            "loss": 60.0 / step,
            "time": 2.0 * step,
            "tokens_per_second_per_device": 1234.5,
            "peak_reserved_gib": 9.0,
        }
        for step in range(1, 31)
    ),
]


def run_in(folder: Path, name: str) -> Path:
    """A run directory with metrics and a plan; no process works on it."""
    run = folder / name
    (run / "logs").mkdir(parents=True)
    (run / "recipe.json").write_text(resolved(folder).model_dump_json(by_alias=True))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    (run / "plan.json").write_text('{"peak_reserved_gib": 10.0}')
    return run


def status(*arguments: object, columns: int = 80) -> list[str]:
    """The lines of `status` on a terminal."""
    return [line.rstrip() for line in lines_on_a_terminal(command("status", *arguments), columns)]


def test_status_names_the_rows_of_the_newest_spike_wherever_it_is(tmp_path: Path) -> None:
    place = {"tokens": 40, "step": 4, "rank": 1, "micro_batch": 2, "sequence": 3}
    rows = [{"file": "a.jsonl", "row": row, **place, "loss": 9.0} for row in range(1, 11)]
    spikes = [
        {"event": name, "step": 4, "message": name, "rows": rows, "rows_total": 64}
        for name in ("loss_spike", "gradient_spike")
    ]
    run = run_in(tmp_path, "a")
    assert run_status(RunDir(run)).spike is None
    lines = [*spikes, *({"step": step, "loss": 1.0, "padding": "x" * 1000} for step in range(5, 400))]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = run_status(RunDir(run)).spike
    assert found is not None
    assert (found.event, found.step, found.rows_total, [row.row for row in found.rows]) == (
        "gradient_spike",
        4,
        64,
        list(range(1, 11)),
    )
    shown = status(run)
    at = shown.index("gradient spike at step 4: gradient_spike")
    assert shown[at + 3].split() == ["a.jsonl:1", "40", "4/1/2", "9.0000"]
    assert shown[at + 11] == "8 of 64 rows (`--json` names 10); `train --skip-rows FILE` leaves rows out"


def test_steps_are_those_of_the_newest_start_wherever_it_is(tmp_path: Path) -> None:
    """A run that was extended, and has more lines since than are read from the end."""
    run = run_in(tmp_path, "a")
    starts = [{"event": "train_started", "step": step, "total_steps": 10 * step} for step in (10, 90)]
    lines = [*starts, *({"step": step, "loss": 1.0, "padding": "x" * 1000} for step in range(91, 400))]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run_status(RunDir(run)).total_steps == 900


def test_status_has_speed_memory_and_sparkline(tmp_path: Path) -> None:
    lines = status(run_in(tmp_path, "a"))
    # after the path, which may take two lines
    at = next(number for number, line in enumerate(lines) if line.startswith("step "))
    assert re.fullmatch(r"step 30 of 60, last line \d+\.\ds ago, loss 2\.0000", lines[at])
    assert lines[at + 1] == "last losses: █▇▆▅▄▄▃▂▂▁"
    assert lines[at + 2] == "1,234 tokens/s/device, 9.00 GiB reserved, 10.00 GiB planned (-10%)"


EVALUATIONS: list[dict[str, object]] = [
    {"step": step, "eval_loss": 3.0 - step / 30, "time": 2.0 * step} for step in (10, 20, 30)
]


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (60, ["loss", "eval", "loss", "best", "eval"]),
        (80, ["loss", "eval", "loss", "best", "eval", "losses", "eval", "losses"]),
        (
            160,
            ["loss", "eval", "loss", "best", "eval", "tokens/s/device", "memory", "losses", "eval", "losses"],
        ),
    ],
)
def test_status_of_a_directory_is_a_table_sorted_by_loss_that_fits(
    tmp_path: Path, columns: int, names: list[str]
) -> None:
    for name, best in (("a", 0.5), ("b", 0.1), ("c", None)):
        lines = [
            *LINES,
            *(
                [*EVALUATIONS, {"step": 30, "eval_loss": best}, {"step": 30, "eval_loss": 9.0}]
                if best
                else []
            ),
        ]
        (run_in(tmp_path, name) / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(line)}\n" for line in lines)
        )
    head, rule, *rows = status(tmp_path, columns=columns)
    assert head.split() == ["run", "state", "step", *names]
    assert [row.split()[0] for row in rows] == ["b", "a", "c"]
    assert ["0.1000" in row for row in rows] == [True, False, False]
    assert max(map(len, [head, rule, *rows])) <= columns


def test_runs_of_a_directory_are_ordered_by_state(tmp_path: Path) -> None:
    run = run_status(RunDir(run_in(tmp_path, "a")))
    states = ["not started", "finished", "hang", "starting or merging", "running"]
    ordered = sorted(
        (replace(run, state=state, loss=float(at)) for at, state in enumerate(states)), key=status_view._order
    )
    assert [each.state for each in ordered] == [
        "running",
        "starting or merging",
        "hang",
        "finished",
        "not started",
    ]


def test_names_of_runs_are_shortened_to_what_differs_in_a_narrow_terminal(tmp_path: Path) -> None:
    run = run_status(RunDir(run_in(tmp_path, "a")))
    found = [
        replace(run, run_dir=f"/runs/qwen3-8b-tulu3-{name}") for name in ("lr1e-5-seed0", "lr2e-5-seed0")
    ]

    def names(*, is_narrow: bool) -> list[str]:
        shown = list[str]()

        def table(_: str, __: Sequence[str], rows: Sequence[Sequence[str]], **___: object) -> None:
            shown.extend(row[0] for row in rows)

        status_view.show_runs(
            cast(Screen, SimpleNamespace(is_narrow=is_narrow, draws=False, table=table)), found
        )
        return shown

    assert names(is_narrow=True) == ["lr1e-5", "lr2e-5"]
    assert names(is_narrow=False) == ["qwen3-8b-tulu3-lr1e-5-seed0", "qwen3-8b-tulu3-lr2e-5-seed0"]


def test_status_has_last_and_best_evaluation_loss_and_paths_last(tmp_path: Path) -> None:
    run = run_in(tmp_path, "a")
    lines = [*LINES, *EVALUATIONS, {"step": 30, "eval_loss": 2.5}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shown = status(run, columns=120)
    assert "evaluation loss 2.5000 at step 30, best 2.0000 at step 30: █▅▁▆" in shown
    kinds = [
        line.partition(" ")[0] for line in shown if line.startswith(("step", "evaluation", "newest", "logs"))
    ]
    assert kinds == ["step", "evaluation", "newest", "logs:"]


def test_status_has_the_scores_of_the_last_evaluated_checkpoint_and_a_later_failure(tmp_path: Path) -> None:
    run = run_in(tmp_path, "a")
    score = {"value": 0.5, "low": 0.25, "high": 0.75, "rows": 8}
    evaluated = {
        "event": "checkpoint_evaluated",
        "step": 20,
        "checkpoint": "1",
        "seconds": 1.0,
        "scores": {"sums/exact_match": score},
        "time": 1.0,
    }
    failed = {
        "event": "checkpoint_evaluation_failed",
        "step": 30,
        "checkpoint": "2",
        "code": "evaluation-failed",
        "message": "no room",
        "time": 1.0,
    }
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in (evaluated, failed))
    shown = status(run, columns=120)
    assert "scores of checkpoint-20: sums/exact_match 0.5000 [0.2500, 0.7500]" in shown
    assert "checkpoint-30 was not evaluated: no room" in shown


def test_damaged_run_of_a_directory_is_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path, "good")
    (run_in(tmp_path, "bad") / "plan.json").write_text("{")
    screen = Screen(json_output=True)
    answer = runs._read_status(screen, tmp_path)
    assert isinstance(answer, DirectoryStatus)
    assert [Path(run.run_dir).name for run in answer.runs] == ["good"]
    screen.document(answer)
    screen.close()
    document = capsys.readouterr().out
    assert [notice["code"] for notice in json.loads(document)["notices"]] == ["run-unreadable"]
    refuse_undeclared(["status"], document)
    with pytest.raises(FsdpTuneError, match="not a run directory"):
        runs._read_status(screen, tmp_path / "good" / "logs")


def watched(run: Path, *, last: int, stop: int = 0) -> Callable[[], object]:
    """Return `status --watch` of a run that ends at reading `last`, and which is interrupted at reading
    `stop`."""

    def program() -> None:
        read, seen = runs._read_status, list[int]()

        def running(screen: Screen, path: Path) -> Any:
            seen.append(1)
            if len(seen) == stop:
                os.kill(os.getpid(), signal.SIGINT)
            training = {"state": "running", "seconds_left": 9.0} if len(seen) < last else {}
            return replace(read(screen, path), step=len(seen), **training)

        runs.WATCH_SECONDS, runs._read_status = 0.2, running
        command("status", "--watch", run)()

    return program


def test_watch_redraws_until_the_run_has_ended(tmp_path: Path) -> None:
    lines = re.split(r"[\r\n]+", shown_on_a_terminal(watched(run_in(tmp_path, "a"), last=3), 80))
    steps = list(dict.fromkeys(line for line in lines if line.startswith("step ")))
    assert [re.match(r"step (\d)", line)[1] for line in steps] == ["1", "2", "3"]  # type: ignore[index]
    assert ["9.0s left" in line for line in steps] == [True, True, False]


def test_watch_in_a_pipe_prints_the_last_status_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    run = run_in(tmp_path, "a")
    done = ended(watched(run, last=3))
    assert (done.code, "\nstep 3 of 60" in done.out) == (0, True)
    done = ended(watched(run, last=999, stop=2))
    assert (done.code, done.out, done.err) == (130, "no longer watched; the run is not affected\n", "")


def test_directory_that_is_not_a_run_exits_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "recipe.json").write_text("{}")
    (error,) = errors("status", "runs/one/checkpoint-3")
    assert error["code"] == "not-a-run"
    assert "the run that contains it: runs/one" in error["hint"]
