"""When a failed launch is restarted, and when not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_tune.core.errors import ExitReason, Problem
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.launch.supervise import attempts
from fsdp_tune.launch.supervise.attempts import Attempts, NewerCopy
from fsdp_tune.launch.supervise.launch_events import Event
from fsdp_tune.launch.supervise.restarts import Failure, Restart, decide_restart, is_transient
from fsdp_tune.run.directory import Rejected, RunDir
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.rank_files import Verdict
from tests.launch.fake_ranks import ENDS_WELL, FINISHED, Parts, PlanOf, end_of, ended, messages
from tests.launch.recipes import resolved
from tests.launch.written_runs import checkpoint, write_parts

KILLED = Problem("rank-killed", "rank 1 was killed by SIGKILL")


def failures(*places: tuple[int, int], has_trained: bool = True) -> list[Failure]:
    """From (last step done, newest checkpoint) of each."""
    return [Failure(KILLED, step, checkpoint, has_trained) for step, checkpoint in places]


def no_rows(step: int) -> str | None:
    return None


def test_failure_keeps_its_reason_when_the_files_for_a_restart_cannot_be_read(
    tmp_path: Path, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/run")

    monkeypatch.setattr(attempts, "latest_checkpoint", refuse)
    monkeypatch.setattr(
        attempts.Attempts, "_launch", lambda _: once(ended(ExitReason.LOST_RANK, "rank-killed"))
    )
    last, _ = end_of(
        Attempts(plan_of({"0": []}), resolved(tmp_path, "launch.max_restarts=2"), no_rows).events()
    )
    assert (last.exit_code, last.reason) == (5, ExitReason.LOST_RANK)
    assert last.problem is not None
    assert last.problem.code == "rank-killed"
    assert last.problem.message.endswith(
        "; it is not restarted, since files of the run cannot be used: /run: Permission denied"
    )


def once(judged: Verdict) -> Generator[Event, None, tuple[Any, Verdict]]:
    """A launch that ends with this verdict."""
    yield from ()
    return SimpleNamespace(signals=[], has_trained=True), judged


@pytest.mark.parametrize(
    ("what", "signals", "again"),
    [
        (ended(ExitReason.LOST_RANK, "rank-killed"), [], True),
        (ended(ExitReason.LOST_RANK, "hang"), [], True),
        (ended(ExitReason.LOST_RANK, "lost-rank"), [], True),
        (ended(ExitReason.FAILED, "worker-failed"), [], True),
        (ended(ExitReason.FAILED, "device-failed"), [], True),
        (ended(ExitReason.FAILED, "host-out-of-memory"), [], True),
        (ended(ExitReason.FINISHED, None), [], False),
        (ended(ExitReason.PREEMPTED, None), [], False),
        (ended(ExitReason.INTERRUPTED, None), [], False),
        (ended(ExitReason.MAX_RUNTIME, None), [], False),
        (ended(ExitReason.OUT_OF_MEMORY, "device-out-of-memory"), [], False),
        (ended(ExitReason.NON_FINITE, "non-finite"), [], False),
        (ended(ExitReason.FAILED, "data-changed"), [], False),
        (ended(ExitReason.FAILED, "readback-differs"), [], False),
        (ended(ExitReason.FAILED, "stopped-unsaved"), [], False),
        (ended(ExitReason.FAILED, "save-failed"), [], False),
        (ended(ExitReason.LOST_RANK, "rank-killed"), [signal.SIGTERM], False),
    ],
)
def test_only_transient_failures_are_restarted(what: Verdict, signals: Sequence[int], again: bool) -> None:
    assert is_transient(what, signals) is again


@pytest.mark.parametrize(
    "places",
    [
        [(3, 2), (3, 2)],
        [(3, 2), (3, 2), (4, 4), (7, 6), (7, 6)],
        [(5, 4), (4, 4), (6, 4), (3, 4), (7, 6)],
        [(0, 0), (0, 0)],
    ],
    ids=["twice", "five crashes", "back and forth", "twice in the first step"],
)
def test_failures_with_progress_between_them_are_restarted(places: list[tuple[int, int]]) -> None:
    for count in range(1, len(places) + 1):
        assert decide_restart(failures(*places[:count]), 9, no_rows) == Restart(count)


def test_restarts_are_counted() -> None:
    assert decide_restart(failures((1, 0), (2, 0)), 2, no_rows) == Restart(2)
    stop = decide_restart(failures((1, 0), (2, 0), (3, 0)), 2, no_rows)
    assert isinstance(stop, Problem)
    assert stop.message == "rank 1 was killed by SIGKILL; all 2 restarts (`launch.max_restarts`) are used up"


def test_problem_is_unchanged_without_restarts() -> None:
    assert decide_restart(failures((1, 0)), 0, no_rows) == KILLED


def test_third_failure_at_one_step_ends_run_and_names_rows() -> None:
    stop = decide_restart(failures((1, 0), (3, 2), (3, 2), (3, 2)), 9, lambda step: f"rows of step {step}")
    assert isinstance(stop, Problem)
    assert stop.code == "fails-each-time"
    assert "step 4 failed 3 times in a row; the rows of that step: rows of step 4;" in stop.message


def test_three_failures_without_progress_end_the_run() -> None:
    stop = decide_restart(failures((3, 2), (2, 2), (3, 2)), 9, no_rows)
    assert isinstance(stop, Problem)
    assert "3 launches in a row did not get beyond step 3" in stop.message


def test_two_startup_failures_end_the_run() -> None:
    stop = decide_restart([*failures((6, 4)), *failures((4, 4), has_trained=False)], 9, no_rows)
    assert isinstance(stop, Problem)
    assert "2 launches in a row did not get beyond the start-up" in stop.message


@pytest.fixture
def attempt(
    tmp_path: Path, plan_of: PlanOf, quick_supervisor: None
) -> Callable[..., tuple[Verdict, list[Event]]]:
    """Runs fake ranks to their end, restarts included."""

    def go(parts: Parts, *overrides: str, newer_copy: NewerCopy | None = None) -> tuple[Verdict, list[Event]]:
        restarts = () if any("max_restarts" in each for each in overrides) else ("launch.max_restarts=5",)
        recipe = resolved(tmp_path, *restarts, *overrides)
        return end_of(Attempts(plan_of(parts), recipe, no_rows, newer_copy=newer_copy).events())

    return go


def event_of(run: RunDir, name: str) -> dict[str, Any]:
    (found,) = [line for line in read_metrics(run) if line.get("event") == name]
    return found


def started(step: int) -> list[Any]:
    return ["log", {"event": "train_started", "step": step, "total_steps": 50}]


def dies_once_at(step: int, first_step: int = 0) -> list[list[object]]:
    """A rank that is killed in its first launch and finishes in its second."""
    return [
        ["beat", "training", step],
        started(first_step),
        ["once", "died", "die", int(signal.SIGKILL)],
        *ENDS_WELL,
    ]


def test_killed_rank_restarts_the_run_with_a_message_and_a_metrics_event(attempt: Any, run: RunDir) -> None:
    end, events = attempt({"0": dies_once_at(2), "1": ENDS_WELL})
    assert (end.exit_code, end.problem) == (0, None)
    (said,) = [text for text in messages(events) if "restarting" in text]
    assert said.startswith(
        "rank 0 was killed by SIGKILL at step 2: restarting from step 0 (there is no complete checkpoint yet)"
    )
    assert said.endswith("(restart 1 of 5); 2 steps will be repeated")
    event = event_of(run, "restarted")
    assert (event["step"], event["restart"], event["max_restarts"]) == (0, 1, 5)
    assert (event["failed_after_step"], event["code"]) == (2, "rank-killed")
    assert json.loads(run.resume_json.read_text())["resume_from"] is None


def test_hang_is_restarted(attempt: Any) -> None:
    hangs_once = [["stacks"], ["beat", "training", 2], started(0), ["once", "slept", "sleep", 60]]
    end, events = attempt({"0": [*hangs_once, ["outcome", FINISHED]]}, "launch.hang_timeout=1s")
    assert end.exit_code == 0
    assert any("no progress" in text and "restarting" in text for text in messages(events))


def test_repeated_failure_before_training_is_restarted_once(attempt: Any, run: RunDir) -> None:
    end, events = attempt({"0": [["raise", "no such library"]]})
    assert end.exit_code == 1
    assert "restarting does not help: 2 launches in a row" in str(end.problem)
    assert sum("restarting from" in text for text in messages(events)) == 1
    verdict = json.loads(run.outcome_json.read_text())
    assert "restarting does not help" in verdict["problem"]["message"]


def test_deterministic_failure_is_not_restarted(attempt: Any) -> None:
    outcome = {"exit_code": 3, "exit_reason": "out_of_memory", "problem": {"code": "x", "message": "x"}}
    end, events = attempt({"0": [["beat", "training", 1], ["outcome", outcome], ["exit", 3]]})
    assert end.exit_code == 3
    assert messages(events) == []


def continued(run: RunDir, folder: Path) -> Path:
    """A run that was resumed from the checkpoint of another directory."""
    folder.mkdir()
    start = checkpoint(RunDir(folder), 40)
    ResumeRequest(str(start), digests_checked=True).write(run.resume_json)
    return start


def test_run_without_a_checkpoint_is_restarted_from_that_of_the_directory_it_continues(
    attempt: Any, run: RunDir, tmp_path: Path
) -> None:
    start = continued(run, tmp_path / "earlier")
    end, events = attempt({"0": dies_once_at(42, first_step=40)})
    assert end.exit_code == 0
    (said,) = [text for text in messages(events) if "restarting" in text]
    assert f"restarting from {start} (restart 1 of 5); 2 steps will be repeated" in said
    assert json.loads(run.resume_json.read_text())["resume_from"] == str(start)
    assert event_of(run, "restarted")["step"] == 40


def test_run_whose_start_is_gone_is_not_restarted_at_step_0(
    attempt: Any, run: RunDir, tmp_path: Path
) -> None:
    start = continued(run, tmp_path / "earlier")
    shutil.rmtree(start)
    end, events = attempt({"0": dies_once_at(2)})
    assert end.exit_code != 0
    assert f"it is not restarted, since `{start}`, which it continues, cannot be read" in str(
        end.problem and end.problem.message
    )
    assert not any("restarting from" in text for text in messages(events))


def test_restart_reports_the_damaged_checkpoint_that_it_passes_over(attempt: Any, run: RunDir) -> None:
    checkpoint(run, 5)
    checkpoint(run, 10, damaged=True)
    sought: list[int] = []
    end, events = attempt({"0": dies_once_at(12)}, newer_copy=lambda step, _: sought.append(step))
    assert end.exit_code == 0
    assert sought == [5], "a mirror may have a newer checkpoint"
    (rejected,) = [text for text in messages(events) if text.startswith("checkpoint-10 is not used: ")]
    assert "restarting from checkpoint-5" in messages(events)[-1]
    assert json.loads(run.resume_json.read_text())["resume_from"] == str(run.checkpoint(5))
    event = event_of(run, "checkpoint_rejected")
    assert (event["checkpoint"], event["message"]) == ("checkpoint-10", rejected)


def test_restart_takes_a_newer_copy_from_elsewhere(attempt: Any, run: RunDir) -> None:
    checkpoint(run, 5)
    damaged = checkpoint(run, 10, damaged=True)

    def newer_copy(step: int, _: Callable[[int], object]) -> Path:
        shutil.rmtree(damaged)
        return checkpoint(run, 10)

    end, events = attempt({"0": dies_once_at(12)}, newer_copy=newer_copy)
    assert end.exit_code == 0
    assert any("checkpoint-10 is replaced by the copy of the mirror: " in text for text in messages(events))
    assert "restarting from checkpoint-10" in messages(events)[-1]
    assert json.loads(run.resume_json.read_text())["resume_from"] == str(run.checkpoint(10))


def test_restart_of_what_is_measured_saves_no_checkpoint_either(attempt: Any, run: RunDir) -> None:
    ResumeRequest(saves=False).write(run.resume_json)
    end, _ = attempt({"0": dies_once_at(2)})
    assert end.exit_code == 0
    found = ResumeRequest.read(run.resume_json)
    assert found is not None
    assert not found.saves


def test_files_that_a_restart_lacks_are_those_of_the_newest_checkpoint(
    tmp_path: Path, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = [Rejected(tmp_path / f"checkpoint-{step}", "w is missing", True) for step in (10, 5)]
    monkeypatch.setattr(attempts, "latest_checkpoint", lambda *_, **__: (None, lacking))
    monkeypatch.setattr(
        attempts.Attempts, "_launch", lambda _: once(ended(ExitReason.LOST_RANK, "rank-killed"))
    )
    recipe = resolved(tmp_path, "launch.max_restarts=2")
    last, _ = end_of(Attempts(plan_of({"0": []}), recipe, no_rows).events())
    assert last.problem is not None
    assert "checkpoint-10" in last.problem.message


def test_port_that_is_open_on_all_interfaces_is_said_once(
    tmp_path: Path, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, text = plan_of({"0": []}), "10.0.0.1 is not an address of this machine: port 5 is open on all"
    machines = Machines(plan.run)
    machines.open_channel = cast(Any, SimpleNamespace(notice=text, publish=lambda _: None))
    monkeypatch.setattr(Machines, "gather", lambda *_: None)
    judged = [ended(ExitReason.LOST_RANK, "rank-killed"), ended(ExitReason.FINISHED)]
    monkeypatch.setattr(attempts.Attempts, "_launch", lambda _: once(judged.pop(0)))
    monkeypatch.setattr(Machines, "held_elsewhere", lambda *_: [])
    recipe = resolved(tmp_path, "launch.max_restarts=2")
    _, events = end_of(Attempts(plan, recipe, no_rows, machines=machines).events())
    assert messages(events).count(text) == 1
    assert judged == []


@pytest.mark.parametrize("restarts", [0, 5])
def test_failure_is_named_before_the_files_that_a_restart_would_lack(
    attempt: Any, run: RunDir, tmp_path: Path, restarts: int
) -> None:
    write_parts([run, RunDir(tmp_path / "other")], 10)

    def newer_copy(*_: object) -> None:
        assert restarts, "a copy was downloaded for a run that is not restarted"

    end, _ = attempt({"0": dies_once_at(12)}, f"launch.max_restarts={restarts}", newer_copy=newer_copy)
    assert (end.exit_code, end.problem.code) == (5, "rank-killed")
    cause, _, why = end.problem.message.partition("; it is not restarted, since ")
    assert cause == "rank 0 was killed by SIGKILL at step 12"
    assert (
        why.startswith("checkpoint-10 cannot be used: 1 of its 3 files is not here")
        if restarts
        else why == ""
    )
