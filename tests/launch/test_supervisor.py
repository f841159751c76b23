"""The supervisor over real processes: fake ranks, a fake agent, no torch."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason
from fsdp_tune.core.processes import stop_signals_raise
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.supervise import hang
from fsdp_tune.launch.supervise import rank_watch as watch
from fsdp_tune.launch.supervise import supervisor as supervise
from fsdp_tune.launch.supervise.supervisor import Event, Logged, Message, Position, Supervisor
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import Verdict
from tests.launch.conftest import PlanOf
from tests.launch.orphans import children, left_over

FINISHED = {"exit_code": 0, "exit_reason": "finished", "loss": 1.5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(supervise, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(supervise, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(supervise, "HANG_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(supervise, "ECHO_SECONDS", 0.2)
    monkeypatch.setattr(hang, "ANSWER_SECONDS", 2.0)


def drive(plan: LaunchPlan, *, hang_timeout_seconds: float = 60.0, act: Callable[[], None] | None = None) -> tuple[Verdict, list[Event]]:
    """Runs to the end; `act` runs once, after the first logged line."""
    events: list[Event] = []
    before = children()  # of other tests: multiprocessing keeps helpers of its own
    for event in Supervisor(plan, hang_timeout_seconds=hang_timeout_seconds).events():
        events.append(event)
        if isinstance(event, Logged) and act is not None:
            act()
            act = None
    assert isinstance(events[-1], Verdict)
    assert left_over(before) == []
    return events[-1], events


def signals(*numbers: int, apart: float = 0.3) -> Callable[[], None]:
    """Sends signals to this process, the first at once."""

    def send() -> None:
        for index, number in enumerate(numbers):
            time.sleep(apart if index else 0.0)
            os.kill(os.getpid(), number)

    return lambda: threading.Thread(target=send).start()


def test_lines_are_passed_on_and_a_finished_run_is_exit_0(plan_of: PlanOf) -> None:
    acts = [
        ["beat", "training", 1],
        ["log", {"step": 1, "loss": 2.0}],
        ["sleep", 0.2],
        ["log", {"step": 2, "loss": 1.0}],
        ["outcome", FINISHED],
    ]
    ended, events = drive(plan_of({"0": acts, "1": [["outcome", FINISHED]]}))
    assert (ended.exit_code, ended.reason, ended.problem) == (0, ExitReason.FINISHED, None)
    assert ended.first_outcome is not None
    assert ended.first_outcome.facts == {"loss": 1.5}
    assert [event.line["step"] for event in events if isinstance(event, Logged)] == [1, 2]
    positions = [(event.step, event.phase) for event in events if isinstance(event, Position)]
    assert (1, "training") in positions
    assert len(positions) == len(set(positions)), "only changes are passed on"


def test_lines_of_an_earlier_launch_are_not_shown_again(plan_of: PlanOf, run: RunDir) -> None:
    run.metrics_jsonl.write_text('{"step": 1}\n')
    _, events = drive(plan_of({"0": [["log", {"step": 2}], ["outcome", FINISHED]]}))
    assert [event.line for event in events if isinstance(event, Logged)] == [{"step": 2}]


def test_outcome_of_an_earlier_launch_does_not_count(plan_of: PlanOf, run: RunDir) -> None:
    drive(plan_of({"0": [["outcome", FINISHED]]}))
    ended, _ = drive(plan_of({"0": [["exit", 3]]}))
    assert ended.problem is not None
    assert ended.exit_code == ExitCode.FAILED


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGUSR1, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.slow),
        (signal.SIGINT, 130),
    ],
    ids=["TERM", "USR1", "HUP", "INT"],
)
def test_signal_is_passed_on_and_the_ranks_save(plan_of: PlanOf, number: int, code: int) -> None:
    waiting = [["beat", "training", 7], ["listen"], ["sleep", 1.0], ["log", {"step": 7}], ["wait-for-signal"]]
    ended, events = drive(plan_of({"0": waiting, "1": waiting}), act=signals(number))
    assert ended.exit_code == code
    assert ended.problem is None
    assert ended.step == 7
    assert any(isinstance(event, Message) and "saving a checkpoint within 2 more steps" in event.text for event in events)


@pytest.fixture
def ignoring() -> Iterator[None]:
    """A command under `nohup`, in the background of a shell without job control."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ignoring")
def test_signal_that_was_ignored_at_the_start_stays_ignored(plan_of: PlanOf) -> None:
    acts = [["beat", "training", 7], ["log", {"step": 7}], ["sleep", 1.0], ["outcome", FINISHED]]
    with stop_signals_raise():
        ended, _ = drive(plan_of({"0": acts}), act=signals(signal.SIGHUP, signal.SIGINT))
    assert (ended.exit_code, ended.reason) == (0, ExitReason.FINISHED)
    waiting = [["beat", "training", 7], ["listen"], ["log", {"step": 7}], ["wait-for-signal"]]
    with stop_signals_raise():
        ended, _ = drive(plan_of({"0": waiting}), act=signals(signal.SIGHUP, signal.SIGTERM))
    assert ended.exit_code == 143


def test_duplicate_signal_counts_once(plan_of: PlanOf) -> None:
    waiting = [["beat", "training", 7], ["listen"], ["log", {"step": 7}], ["wait-for-signal"]]
    ended, _ = drive(plan_of({"0": waiting}), act=signals(signal.SIGTERM, signal.SIGTERM, apart=0.02))
    assert ended.exit_code == 143


def test_second_signal_stops_immediately_and_fails(plan_of: PlanOf) -> None:
    slow = [["ignore-signals"], ["beat", "saving", 7], ["log", {"step": 7}], ["sleep", 60]]
    start = time.monotonic()
    ended, _ = drive(plan_of({"0": slow, "1": slow}), act=signals(signal.SIGINT, signal.SIGINT, apart=0.5))
    assert ended.exit_code == 1
    assert ended.problem is not None
    assert ended.problem.code == "stopped-unsaved"
    assert time.monotonic() - start < 5


def test_signal_before_handlers_exits_with_its_code(plan_of: PlanOf) -> None:
    ended, _ = drive(plan_of({"0": [["log", {"event": "x"}], ["sleep", 60]], "1": [["sleep", 60]]}), act=signals(signal.SIGTERM))
    assert (ended.exit_code, ended.problem) == (143, None)


def test_ranks_killed_while_saving_are_a_failure(plan_of: PlanOf) -> None:
    ended, _ = drive(plan_of({"0": [["beat", "saving", 9], ["log", {"step": 9}], ["sleep", 60]]}), act=signals(signal.SIGTERM))
    assert ended.exit_code != 143
    assert ended.problem is not None


def test_save_that_fails_after_a_signal_is_exit_1(plan_of: PlanOf) -> None:
    problem = {"code": "disk-full", "message": "disk full"}
    failing = [
        ["ignore-signals"],
        ["beat", "saving", 9],
        ["log", {"step": 9}],
        ["sleep", 0.5],
        ["outcome", {"exit_code": 1, "exit_reason": "failed", "problem": problem}],
    ]
    ended, _ = drive(plan_of({"0": [*failing, ["exit", 1]]}), act=signals(signal.SIGTERM))
    assert ended.exit_code == 1
    assert ended.problem is not None
    assert ended.problem.code == "disk-full"


def test_first_failing_rank_is_reported(plan_of: PlanOf) -> None:
    problem = {"code": "out-of-memory", "message": "out of memory", "hint": "use less"}
    first = [
        ["beat", "training", 4],
        ["sleep", 0.2],
        ["outcome", {"exit_code": 3, "exit_reason": "out_of_memory", "problem": problem}],
        ["exit", 3],
    ]
    lost = {"code": "lost-peer", "message": "connection closed by peer"}
    second = [["ignore-signals"], ["sleep", 0.4], ["outcome", {"exit_code": 5, "exit_reason": "lost_rank", "problem": lost}], ["exit", 5]]
    ended, _ = drive(plan_of({"0": second, "1": first}))
    assert ended.exit_code == ExitCode.OUT_OF_MEMORY
    assert ended.problem is not None
    assert ended.problem.message == "out of memory (rank 1, step 4)"
    assert "rank-0001.log" in (ended.problem.hint or "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_rank_ends_the_others_and_is_named(plan_of: PlanOf, number: int) -> None:
    start = time.monotonic()
    stuck = [["ignore-signals"], ["beat", "training", 3], ["spawn"], ["sleep", 60]]
    ended, _ = drive(plan_of({"0": stuck, "1": [["beat", "training", 3], ["sleep", 0.3], ["die", number]]}))
    assert time.monotonic() - start < 5
    assert ended.exit_code == ExitCode.LOST_RANK
    assert ended.problem is not None
    assert f"rank 1 was killed by {signal.Signals(number).name} at step 3" in ended.problem.message


def test_disk_that_refuses_the_outcome_of_a_rank_is_named(plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(supervise, "write_file", refuse)
    ended, _ = drive(plan_of({"0": [["ignore-signals"], ["sleep", 60]], "1": [["exit", 1]]}))
    assert ended.problem is not None
    assert "rank 1 ended with exit code 1 before it could report: " in ended.problem.message
    assert ended.problem.message.endswith("/logs cannot be written (No space left on device)")


def test_rank_that_dies_early_shows_its_exception(plan_of: PlanOf) -> None:
    ended, _ = drive(plan_of({"0": [["ignore-signals"], ["sleep", 60]], "1": [["raise", "no such library"]]}))
    assert ended.exit_code == ExitCode.FAILED
    assert ended.problem is not None
    assert "rank 1 ended with exit code 1 before it could report: RuntimeError: no such library" in ended.problem.message
    assert "launcher.log" in (ended.problem.hint or "")


def test_launcher_log_is_readable_by_its_owner_alone(plan_of: PlanOf) -> None:
    plan = plan_of({"0": [["raise", "no such library"]]})
    drive(plan)
    assert plan.launcher_log.stat().st_mode & 0o777 == 0o600


def test_rank_that_starts_and_ends_between_two_polls_is_missed(plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine so busy that the rank is gone before it is seen: without it the other one, deaf to signals, would be waited for."""
    see = watch.find_ranks
    monkeypatch.setattr(watch, "find_ranks", lambda pid, wanted: {rank: found for rank, found in see(pid, wanted).items() if rank != 1})
    monkeypatch.setattr(watch, "UNSEEN_SECONDS", 4.0)
    began = time.monotonic()
    ended, _ = drive(plan_of({"0": [["ignore-signals"], ["sleep", 300]], "1": [["raise", "no such library"]]}), hang_timeout_seconds=250.0)
    assert time.monotonic() - began < 200
    assert ended.exit_code == ExitCode.FAILED
    assert ended.problem is not None
    assert "rank 1 ended with exit code 1 before it could report: RuntimeError: no such library" in ended.problem.message


def test_hanging_rank_is_named_with_its_location(plan_of: PlanOf, run: RunDir) -> None:
    beats = [["stacks"], ["beat", "backward", 5]]
    ended, events = drive(plan_of({"0": [*beats, ["wait"]], "1": [*beats, ["sleep", 60]]}), hang_timeout_seconds=6.0)
    assert ended.exit_code == ExitCode.LOST_RANK
    assert ended.problem is not None
    assert ended.problem.code == "hang"
    assert "rank 1 (step 5, `backward`, at " in ended.problem.message
    assert "in act" in ended.problem.message
    assert ended.problem.message.endswith("waiting for it: rank 0 in all_reduce")
    assert str(run.hang_report) in (ended.problem.hint or "")
    report = run.hang_report.read_text()
    assert "── stacks of rank 0" in report
    assert "distributed_c10d.py" in report
    assert any(isinstance(event, Message) and "no progress" in event.text for event in events)


def test_stopped_rank_is_late_and_its_location_is_reported(plan_of: PlanOf, run: RunDir) -> None:
    beats = [["stacks"], ["beat", "training", 2]]
    ended, _ = drive(plan_of({"0": [*beats, ["sleep", 60]], "1": [*beats, ["die", int(signal.SIGSTOP)]]}), hang_timeout_seconds=6.0)
    assert ended.problem is not None
    assert "rank 1 (step 2, `training`, stopped (SIGSTOP), at " in ended.problem.message
    assert "rank 0" not in ended.problem.message
    stacks = run.hang_report.read_text().split("── stacks of rank ")
    assert all("fake_worker.py" in text for text in stacks[1:])


def test_stopped_launcher_is_named_as_cause(plan_of: PlanOf) -> None:
    """torchrun's agent serves the store through which ranks find each other."""
    before = set(psutil.Process().children())

    def stop_launcher() -> None:
        (launcher,) = set(psutil.Process().children()) - before
        launcher.suspend()

    acts = [["stacks"], ["beat", "importing", 0], ["log", {"step": 0}], ["wait"]]
    ended, _ = drive(plan_of({"0": acts, "1": acts}), hang_timeout_seconds=6.0, act=stop_launcher)
    assert ended.problem is not None
    assert ended.exit_code == ExitCode.LOST_RANK
    assert "rank 0 (step 0, `importing`, its launcher is stopped (SIGSTOP)" in ended.problem.message


def test_stack_request_does_not_kill_rank_without_handler(plan_of: PlanOf) -> None:
    """SIGUSR2 ends a process without a handler; a rank that is stuck before it has one is named all the same."""
    ended, _ = drive(plan_of({"0": [["sleep", 60]], "1": [["sleep", 60]]}), hang_timeout_seconds=6.0)
    assert ended.problem is not None
    assert ended.problem.code == "hang"
    assert "before its first heartbeat" in ended.problem.message


def test_waiting_for_slow_rank_is_not_a_hang(plan_of: PlanOf) -> None:
    slow = [act for _ in range(20) for act in (["beat", "saving", 5], ["sleep", 0.35])]
    ended, _ = drive(
        plan_of({"0": [["beat", "saving", 5], ["sleep", 7.4], ["outcome", FINISHED]], "1": [*slow, ["outcome", FINISHED]]}),
        hang_timeout_seconds=6.0,
    )
    assert (ended.exit_code, ended.problem) == (0, None)


def test_rank_hanging_in_cleanup_does_not_block_the_run(plan_of: PlanOf) -> None:
    start = time.monotonic()
    ended, _ = drive(plan_of({"0": [["outcome", FINISHED], ["ignore-signals"], ["sleep", 20]]}))
    assert (ended.exit_code, ended.problem) == (0, None)
    assert time.monotonic() - start < 6


def test_vanished_run_directory_is_reported_and_not_recreated(plan_of: PlanOf, run: RunDir) -> None:
    elsewhere = run.path.with_name("elsewhere")
    ended, _ = drive(plan_of({"0": [["beat", "training", 1], ["rename-run", str(elsewhere)], ["exit", 1]]}))
    assert ended.exit_code == 1
    assert ended.problem is not None
    assert ended.problem.code == "run-directory-gone"
    assert not run.path.exists()
    assert elsewhere.exists()


def test_failed_launcher_shows_its_error(plan_of: PlanOf, run: RunDir) -> None:
    plan = plan_of({"0": []})
    program = "import sys; sys.exit('accelerate: error: unrecognized arguments: --x')"
    broken = LaunchPlan((sys.executable, "-c", program), plan.env, {}, (), run, range(1), 0, 1)
    ended, _ = drive(broken)
    assert ended.exit_code == 1
    assert ended.problem is not None
    assert "unrecognized arguments: --x" in ended.problem.message


def test_no_process_survives_killed_launcher(plan_of: PlanOf) -> None:
    plan = plan_of({"0": [["beat", "training", 1], ["log", {"step": 1}], ["ignore-signals"], ["sleep", 60]]})

    before = set(psutil.Process().children())

    def kill_launcher() -> None:
        (launcher,) = set(psutil.Process().children()) - before
        launcher.kill()

    ended, _ = drive(plan, act=kill_launcher)
    assert ended.exit_code == ExitCode.LOST_RANK
    assert ended.problem is not None
    assert ended.problem.message == "the launcher was killed by SIGKILL"


def test_no_process_survives_killed_supervisor(plan_of: PlanOf, run: RunDir, repository: Path) -> None:
    plan_of({"0": [["beat", "training", 1], ["ignore-signals"], ["sleep", 60]]})
    program = f"""
import os, sys
from pathlib import Path
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.run.directory import RunDir
run = RunDir(Path({str(run.path)!r}))
agent = {str(repository / "tests/launch/fake_agent.py")!r}
plan = LaunchPlan((sys.executable, agent, "1", str(run.path)), dict(os.environ), {{}}, (), run, range(1), 0, 1)
for _ in Supervisor(plan, hang_timeout_seconds=60).events(): pass
"""
    supervisor = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(repository)})
    while not run.rank_heartbeat(0).exists():
        time.sleep(0.02)
    family = psutil.Process(supervisor.pid).children(recursive=True)
    assert len(family) == 2
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_closing_the_events_ends_the_ranks(plan_of: PlanOf) -> None:
    plan = plan_of({"0": [["beat", "training", 1], ["log", {"step": 1}], ["ignore-signals"], ["sleep", 60]]})
    before = children()
    events = Supervisor(plan, hang_timeout_seconds=60).events()
    next(events)
    events.close()
    assert left_over(before) == []
