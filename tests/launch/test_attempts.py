"""When a failed launch is restarted, and when not."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitReason, Problem
from fsdp_tune.launch.supervise import supervisor as supervise
from fsdp_tune.launch.supervise.attempts import Attempts, Failure, NewerCopy, Restart, decide, is_transient
from fsdp_tune.launch.supervise.supervisor import Event, Message
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import ResumeRequest, Verdict
from tests.launch.conftest import Parts, PlanOf
from tests.launch.orphans import children, left_over
from tests.launch.test_accelerate import resolved
from tests.launch.test_machine_own_directories import write_parts
from tests.launch.test_resume import checkpoint

KILLED = Problem("rank-killed", "rank 1 was killed by SIGKILL")
FINISHED = {"exit_code": 0, "exit_reason": "finished", "loss": 1.5}


def failures(*places: tuple[int, int], has_trained: bool = True) -> list[Failure]:
    """From (last step done, newest checkpoint) of each."""
    return [Failure(KILLED, step, checkpoint, has_trained) for step, checkpoint in places]


def no_rows(step: int) -> str | None:
    return None


def ended(reason: ExitReason, code: str | None) -> Verdict:
    return Verdict(EXIT_CODE_OF_REASON[reason], reason, 3, Problem(code, "x") if code else None)


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
        assert decide(failures(*places[:count]), 9, no_rows) == Restart(count)


def test_restarts_are_counted() -> None:
    assert decide(failures((1, 0), (2, 0)), 2, no_rows) == Restart(2)
    stop = decide(failures((1, 0), (2, 0), (3, 0)), 2, no_rows)
    assert isinstance(stop, Problem)
    assert stop.message == "rank 1 was killed by SIGKILL; all 2 restarts (`launch.max_restarts`) are used up"


def test_problem_is_unchanged_without_restarts() -> None:
    assert decide(failures((1, 0)), 0, no_rows) == KILLED


def test_third_failure_at_one_step_ends_run_and_names_rows() -> None:
    stop = decide(failures((1, 0), (3, 2), (3, 2), (3, 2)), 9, lambda step: f"rows of step {step}")
    assert isinstance(stop, Problem)
    assert stop.code == "fails-each-time"
    assert "step 4 failed 3 times in a row; the rows of that step: rows of step 4;" in stop.message


def test_three_failures_without_progress_end_the_run() -> None:
    stop = decide(failures((3, 2), (2, 2), (3, 2)), 9, no_rows)
    assert isinstance(stop, Problem)
    assert "3 launches in a row did not get beyond step 3" in stop.message


def test_two_startup_failures_end_the_run() -> None:
    stop = decide([*failures((6, 4)), *failures((4, 4), has_trained=False)], 9, no_rows)
    assert isinstance(stop, Problem)
    assert "2 launches in a row did not get beyond the start-up" in stop.message


@pytest.fixture
def attempt(tmp_path: Path, run: RunDir, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Verdict, list[Event]]]:
    """Runs fake ranks to their end, restarts included."""
    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(supervise, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(supervise, "HANG_MARGIN_SECONDS", 0.0)

    def go(parts: Parts, *overrides: str, newer_copy: NewerCopy | None = None) -> tuple[Verdict, list[Event]]:
        before = children()
        restarts = () if any("max_restarts" in each for each in overrides) else ("launch.max_restarts=5",)
        recipe = resolved(tmp_path, *restarts, *overrides)
        events = list(Attempts(plan_of(parts), recipe, no_rows, newer_copy=newer_copy).events())
        assert isinstance(events[-1], Verdict)
        assert left_over(before) == []
        return events[-1], events

    return go


def lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]


def started(step: int) -> list[Any]:
    return ["log", {"event": "train_started", "step": step, "total_steps": 50}]


DIES_ONCE = [
    ["beat", "training", 2],
    started(0),
    ["once", "died", "die", int(signal.SIGKILL)],
]


def test_killed_rank_restarts_the_run_with_a_message_and_a_metrics_event(attempt: Any, run: RunDir) -> None:
    end, events = attempt({"0": [*DIES_ONCE, ["outcome", FINISHED]], "1": [["outcome", FINISHED]]})
    assert (end.exit_code, end.problem) == (0, None)
    (said,) = [event.text for event in events if isinstance(event, Message) and "restarting" in event.text]
    assert said.startswith("rank 0 was killed by SIGKILL at step 2: restarting from step 0 (there is no complete checkpoint yet)")
    assert said.endswith("(restart 1 of 5); 2 steps will be repeated")
    (event,) = [line for line in lines(run) if line.get("event") == "restarted"]
    assert {name: event[name] for name in ("step", "restart", "max_restarts", "failed_after_step", "code")} == {
        "step": 0,
        "restart": 1,
        "max_restarts": 5,
        "failed_after_step": 2,
        "code": "rank-killed",
    }
    assert json.loads((run.path / "resume.json").read_text())["resume_from"] is None


def test_hang_is_restarted(attempt: Any) -> None:
    hangs_once = [
        ["stacks"],
        ["beat", "training", 2],
        started(0),
        ["once", "slept", "sleep", 60],
    ]
    end, events = attempt({"0": [*hangs_once, ["outcome", FINISHED]]}, "launch.hang_timeout=1s")
    assert end.exit_code == 0
    assert any(isinstance(event, Message) and "no progress" in event.text and "restarting" in event.text for event in events)


def test_repeated_failure_before_training_is_restarted_once(attempt: Any, run: RunDir) -> None:
    end, events = attempt({"0": [["raise", "no such library"]]})
    assert end.exit_code == 1
    assert end.problem is not None
    assert "restarting does not help: 2 launches in a row" in end.problem.message
    assert sum(isinstance(event, Message) and "restarting from" in event.text for event in events) == 1
    verdict = json.loads((run.logs / "outcome.json").read_text())
    assert "restarting does not help" in verdict["problem"]["message"]


@pytest.mark.parametrize(
    ("code", "reason"), [(2, "failed"), (3, "out_of_memory"), (4, "non_finite"), (130, "interrupted"), (143, "preempted")]
)
def test_deterministic_failure_is_not_restarted(attempt: Any, run: RunDir, code: int, reason: str) -> None:
    outcome = {"exit_code": code, "exit_reason": reason, "problem": {"code": "x", "message": "x"} if code < 100 else None}
    end, events = attempt({"0": [["beat", "training", 1], ["outcome", outcome], ["exit", code]]})
    assert end.exit_code == code
    assert not any(isinstance(event, Message) for event in events)


def continued(run: RunDir, folder: Path) -> Path:
    """A run that was resumed from the checkpoint of another directory."""
    folder.mkdir()
    start = checkpoint(RunDir(folder), 40)
    ResumeRequest(str(start), digests_checked=True).write(run.resume_json)
    return start


def test_run_without_a_checkpoint_is_restarted_from_that_of_the_directory_it_continues(attempt: Any, run: RunDir, tmp_path: Path) -> None:
    start = continued(run, tmp_path / "earlier")
    parts = [
        ["beat", "training", 42],
        started(40),
        ["once", "died", "die", int(signal.SIGKILL)],
    ]
    end, events = attempt({"0": [*parts, ["outcome", FINISHED]]})
    assert end.exit_code == 0
    (said,) = [event.text for event in events if isinstance(event, Message) and "restarting" in event.text]
    assert f"restarting from {start} (restart 1 of 5); 2 steps will be repeated" in said
    assert json.loads(run.resume_json.read_text())["resume_from"] == str(start)
    (event,) = [line for line in lines(run) if line.get("event") == "restarted"]
    assert event["step"] == 40


def test_run_whose_start_is_gone_is_not_restarted_at_step_0(attempt: Any, run: RunDir, tmp_path: Path) -> None:
    start = continued(run, tmp_path / "earlier")
    shutil.rmtree(start)
    end, events = attempt({"0": [*DIES_ONCE, ["outcome", FINISHED]]})
    assert end.exit_code != 0
    assert f"it is not restarted, since `{start}`, which it continues, cannot be read" in str(end.problem and end.problem.message)
    assert not any(isinstance(event, Message) and "restarting from" in event.text for event in events)


DIES_AT_12 = [
    ["beat", "training", 12],
    started(0),
    ["once", "died", "die", int(signal.SIGKILL)],
]


def test_restart_reports_the_damaged_checkpoint_that_it_passes_over(attempt: Any, run: RunDir) -> None:
    checkpoint(run, 5)
    checkpoint(run, 10, damaged=True)
    end, events = attempt({"0": [*DIES_AT_12, ["outcome", FINISHED]]})
    assert end.exit_code == 0
    texts = [event.text for event in events if isinstance(event, Message)]
    (rejected,) = [text for text in texts if text.startswith("checkpoint-10 is not used: ")]
    assert "restarting from checkpoint-5" in texts[-1]
    (event,) = [line for line in lines(run) if line.get("event") == "checkpoint_rejected"]
    assert event["checkpoint"] == "checkpoint-10"
    assert event["message"] == rejected


@pytest.mark.parametrize("has_copy", [True, False])
def test_restart_takes_a_newer_copy_from_elsewhere(attempt: Any, run: RunDir, *, has_copy: bool) -> None:
    checkpoint(run, 5)
    damaged, asked = checkpoint(run, 10, damaged=True), list[int]()

    def newer_copy(step: int, _: Callable[[int], object]) -> Path | None:
        asked.append(step)
        if not has_copy:
            return None
        shutil.rmtree(damaged)
        return checkpoint(run, 10)

    end, events = attempt({"0": [*DIES_AT_12, ["outcome", FINISHED]]}, newer_copy=newer_copy)
    assert end.exit_code == 0
    assert asked == [5]
    texts = [event.text for event in events if isinstance(event, Message)]
    assert any(f"checkpoint-10 is {'replaced by the copy of the mirror' if has_copy else 'not used'}: " in text for text in texts)
    assert f"restarting from checkpoint-{10 if has_copy else 5}" in texts[-1]
    assert json.loads(run.resume_json.read_text())["resume_from"] == str(run.checkpoint(10 if has_copy else 5))


def test_run_that_is_not_restarted_downloads_nothing(attempt: Any) -> None:
    end, _ = attempt({"0": DIES_AT_12}, "launch.max_restarts=0", newer_copy=lambda *_: pytest.fail("a copy was downloaded"))
    assert end.exit_code == 5


@pytest.mark.parametrize("restarts", [0, 5])
def test_failure_is_named_before_the_files_that_a_restart_would_lack(attempt: Any, run: RunDir, tmp_path: Path, restarts: int) -> None:
    write_parts([run, RunDir(tmp_path / "other")], 10)
    end, _ = attempt({"0": DIES_AT_12}, f"launch.max_restarts={restarts}")
    assert (end.exit_code, end.problem.code) == (5, "rank-killed")
    cause, _, why = end.problem.message.partition("; it is not restarted, since ")
    assert cause == "rank 0 was killed by SIGKILL at step 12"
    assert why.startswith("checkpoint-10 cannot be used: 1 of its 3 files is not here") if restarts else why == ""
