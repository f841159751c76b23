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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fsdp_tune.core.clocks import Gap
from fsdp_tune.core.errors import ExitCode, ExitReason, Problem
from fsdp_tune.core.signals import stop_signals_raise
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.supervise import hang_diagnosis, signal_relay
from fsdp_tune.launch.supervise import rank_watch as watch
from fsdp_tune.launch.supervise import supervisor as supervise
from fsdp_tune.launch.supervise.launch_events import Event, Logged, Position
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.run import launch_files
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import MetricsEvent
from fsdp_tune.run.metrics_file import append_event, read_metrics
from fsdp_tune.run.rank_files import Verdict
from tests.launch.fake_ranks import ENDS_WELL, FINISHED, SAVES_ON_SIGNAL, PlanOf, end_of, messages
from tests.launch.links import until
from tests.launch.orphans import children, left_over

HANG_SECONDS = 0.7
pytestmark = pytest.mark.usefixtures("quick_supervisor")


def drive(plan: LaunchPlan, act: Callable[[Supervisor], object] | None = None) -> tuple[Verdict, list[Event]]:
    """Run to the end; `act` runs once, after the first logged line."""
    supervisor, acts = Supervisor(plan, hang_timeout_seconds=60.0), [act] if act is not None else []

    def on_event(event: Event) -> None:
        if isinstance(event, Logged) and acts:
            acts.pop()(supervisor)

    return end_of(supervisor.events(), on_event)


def failure(plan: LaunchPlan, act: Callable[[Supervisor], object] | None = None) -> tuple[Verdict, Problem]:
    """Run to the end, which is a failure."""
    ended, _ = drive(plan, act)
    assert ended.problem is not None
    return ended, ended.problem


def signals(*numbers: int, apart: float = 0.3) -> Callable[[object], None]:
    """Sends signals to this process, the first at once."""

    def send() -> None:
        for index, number in enumerate(numbers):
            time.sleep(apart if index else 0.0)
            os.kill(os.getpid(), number)

    return lambda _: threading.Thread(target=send).start()


def signal_listeners(number: int) -> Callable[[Supervisor], None]:
    """Sends a signal once every rank has its handlers, after which it has logged a line."""

    def send(supervisor: Supervisor) -> None:
        until(lambda: supervisor._run.metrics_jsonl.read_text().count("\n") == len(supervisor._plan.ranks))
        os.kill(os.getpid(), number)

    return send


def limit_hangs(supervisor: Supervisor) -> None:
    """Report a hang after `HANG_SECONDS` from now on: at the start, a busy machine may need longer to start
    the ranks."""
    run, ranks = supervisor._run, supervisor._plan.ranks
    until(lambda: all(run.rank_heartbeat(rank).exists() for rank in ranks))
    supervisor._hang_seconds = HANG_SECONDS


def test_lines_are_passed_on_and_a_finished_run_is_exit_0(plan_of: PlanOf, run: RunDir) -> None:
    acts = [
        ["beat", "training", 1],
        ["log", {"step": 1, "loss": 2.0}],
        ["sleep", 0.2],
        ["log", {"step": 2, "loss": 1.0}],
        ["outcome", FINISHED],
    ]
    run.metrics_jsonl.write_text('{"step": 0}\n')  # of an earlier launch
    ended, events = drive(plan_of({"0": acts, "1": ENDS_WELL}))
    assert (ended.exit_code, ended.reason, ended.problem) == (0, ExitReason.FINISHED, None)
    assert ended.first_outcome is not None
    assert ended.first_outcome.facts == {"loss": 1.5}
    assert [event.line["step"] for event in events if isinstance(event, Logged)] == [1, 2]
    positions = [(event.step, event.phase) for event in events if isinstance(event, Position)]
    assert (1, "training") in positions
    assert len(positions) == len(set(positions)), "only changes are passed on"


def test_every_stop_signal_is_recorded(plan_of: PlanOf) -> None:
    numbers = [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGQUIT,
        signal.SIGPWR,
        signal.SIGIO,
    ]
    supervisor = Supervisor(plan_of({"0": []}), hang_timeout_seconds=60.0)
    with supervisor._signals.listening():
        for number in numbers:
            os.kill(os.getpid(), number)
    assert supervisor.signals == numbers


def test_used_up_cpu_time_is_one_request(plan_of: PlanOf) -> None:
    """The kernel repeats SIGXCPU each second, which is no second request."""
    for first in (signal.SIGXCPU, signal.SIGTERM):
        supervisor = Supervisor(plan_of({"0": []}), hang_timeout_seconds=60.0)
        with supervisor._signals.listening():
            for number in (first, signal.SIGXCPU, signal.SIGXCPU):
                os.kill(os.getpid(), number)
        assert supervisor.signals == [first]


def test_alarm_that_nobody_handles_is_a_stop_signal(plan_of: PlanOf) -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        supervisor = Supervisor(plan_of({"0": []}), hang_timeout_seconds=60.0)
        with supervisor._signals.listening():
            os.kill(os.getpid(), signal.SIGALRM)
        signal.signal(signal.SIGALRM, lambda *_: None)
        with supervisor._signals.listening():
            os.kill(os.getpid(), signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert supervisor.signals == [signal.SIGALRM]


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGUSR2, "SIGUSR2"), (signal.SIGXCPU, "SIGXCPU (the limit of CPU time, `ulimit -t`)")],
)
def test_signal_that_means_another_thing_to_a_rank_reaches_it_as_sigterm(
    plan_of: PlanOf, number: int, name: str
) -> None:
    ended, events = drive(plan_of({"0": SAVES_ON_SIGNAL}), signal_listeners(number))
    assert (ended.exit_code, ended.problem, ended.step, ended.signal) == (143, None, 7, number)
    assert any(text.startswith(f"{name}: ") and "saving a checkpoint" in text for text in messages(events))


def test_handler_does_not_wait_for_the_clock(plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that a signal interrupts may hold the clock's lock, and would wait for itself."""
    supervisor = Supervisor(plan_of({"0": []}), hang_timeout_seconds=60.0)
    monkeypatch.setattr(supervise.LIVED, "now", lambda: pytest.fail("the handler waits for the lock"))
    with supervisor._signals.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert supervisor.signals == [signal.SIGTERM]


def test_signal_is_passed_on_and_the_ranks_save(plan_of: PlanOf) -> None:
    ended, events = drive(
        plan_of({"0": SAVES_ON_SIGNAL, "1": SAVES_ON_SIGNAL}), signal_listeners(signal.SIGINT)
    )
    assert (ended.exit_code, ended.problem, ended.step) == (130, None, 7)
    assert any("saving a checkpoint within 2 more steps" in text for text in messages(events))


@pytest.fixture
def ignoring() -> Iterator[None]:
    """A command under `nohup`, in the background of a shell without job control."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_reaches_the_ranks_while_the_reader_of_the_events_waits(plan_of: PlanOf) -> None:
    """As a screen that takes nothing makes it wait."""
    plan = plan_of({"0": SAVES_ON_SIGNAL, "1": SAVES_ON_SIGNAL})

    def wait_for_outcomes(supervisor: Supervisor) -> None:
        until(lambda: supervisor._run.metrics_jsonl.read_text().count("\n") == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: all(supervisor._run.rank_outcome(rank).exists() for rank in plan.ranks))

    ended, events = drive(plan, wait_for_outcomes)
    assert (ended.exit_code, ended.problem) == (ExitCode.PREEMPTED, None)
    assert sum(text.startswith("SIGTERM: ") for text in messages(events)) == 1


def test_signal_reaches_the_ranks_of_a_stopped_launcher(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal_relay, "PENDING_SECONDS", 0.1)

    def stop_launcher(supervisor: Supervisor) -> None:
        [launcher] = [
            child for child in psutil.Process().children() if "fake_agent.py" in " ".join(child.cmdline())
        ]
        launcher.suspend()
        signal_listeners(signal.SIGTERM)(supervisor)

    ended, events = drive(plan_of({"0": SAVES_ON_SIGNAL, "1": SAVES_ON_SIGNAL}), stop_launcher)
    assert (ended.exit_code, ended.problem, ended.step) == (143, None, 7)
    assert any("was stopped; it is continued" in text for text in messages(events))


def test_line_of_metrics_that_someone_changed_does_not_end_the_command(plan_of: PlanOf) -> None:
    saves: list[list[object]] = [
        ["beat", "training", 7],
        ["listen"],
        ["log", {"step": 7, "step_seconds": "slow"}],
        ["wait-for-signal"],
    ]
    ended, _ = drive(plan_of({"0": saves}), signal_listeners(signal.SIGTERM))
    assert (ended.exit_code, ended.problem) == (143, None)


@pytest.mark.parametrize("refusals", [0, 3, 10**6])
def test_suspension_of_the_command_is_a_message_and_an_event(
    refusals: int, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    outcomes = iter([full] * refusals)

    def append(run: RunDir, event: MetricsEvent) -> None:
        if (error := next(outcomes, None)) is not None:
            raise error
        append_event(run, event)

    monkeypatch.setattr(supervise, "append_event", append)
    monkeypatch.setattr(supervise.LIVED, "gaps", [*supervise.LIVED.gaps])

    def suspend(_supervisor: Supervisor) -> None:
        supervise.LIVED.gaps.append(Gap(time.monotonic() - 3600, time.monotonic()))

    plan = plan_of({"0": [["beat", "training", 7], ["log", {"step": 7}], ["sleep", 1.0], *ENDS_WELL]})
    ended, events = drive(plan, suspend)
    assert ended.exit_code == ExitCode.OK
    [text] = [text for text in messages(events) if "suspended for" in text]
    assert any("recording a suspension fails" in text for text in messages(events)) == (refusals > 0)
    assert text == "this command was stopped or suspended for 1h00m00s, which no limit counts, and continues"
    lines = [line for line in read_metrics(plan.run) if line.get("event") == "continued"]
    assert [(line["step"], line["seconds"], line["message"]) for line in lines] == (
        [(7, pytest.approx(3600), text)] if refusals < 10 else []
    )


@pytest.mark.usefixtures("ignoring")
def test_signal_that_was_ignored_at_the_start_stays_ignored(plan_of: PlanOf) -> None:
    with stop_signals_raise():
        ended, events = drive(
            plan_of({"0": SAVES_ON_SIGNAL}), signals(signal.SIGHUP, signal.SIGINT, signal.SIGTERM, apart=0.1)
        )
    assert ended.exit_code == 143
    assert [text.partition(":")[0] for text in messages(events)] == ["SIGTERM"]


def test_duplicate_signal_counts_once(plan_of: PlanOf) -> None:
    ended, _ = drive(plan_of({"0": SAVES_ON_SIGNAL}), signals(signal.SIGTERM, signal.SIGTERM, apart=0.02))
    assert (ended.exit_code, ended.problem) == (143, None)


def test_second_signal_stops_immediately_and_fails(plan_of: PlanOf) -> None:
    slow = [["ignore-signals"], ["beat", "saving", 7], ["log", {"step": 7}], ["sleep", 60]]
    start = time.monotonic()
    ended, problem = failure(plan_of({"0": slow, "1": slow}), signals(signal.SIGINT, signal.SIGINT))
    assert (ended.exit_code, problem.code) == (1, "stopped-unsaved")
    assert time.monotonic() - start < 5


def test_signal_before_handlers_exits_with_its_code(plan_of: PlanOf) -> None:
    ended, _ = drive(
        plan_of({"0": [["log", {"event": "x"}], ["sleep", 60]], "1": [["sleep", 60]]}),
        signals(signal.SIGTERM),
    )
    assert (ended.exit_code, ended.problem) == (143, None)


def test_signal_in_the_start_up_ends_a_rank_that_does_not_handle_it(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that connects to a machine which is gone, in C++. Later phases have the time that they need."""
    monkeypatch.setattr(supervise, "STOP_SECONDS", 0.3)
    starting = [["ignore-signals"], ["beat", "importing", 0], ["log", {"event": "x"}], ["sleep", 60]]
    start = time.monotonic()
    ended, _ = drive(plan_of({"0": starting, "1": starting}), signals(signal.SIGTERM))
    assert (ended.exit_code, ended.problem) == (143, None)
    assert time.monotonic() - start < 20
    saving = [["beat", "training", 7], ["listen"], ["log", {"step": 7}], ["sleep", 1.0], ["wait-for-signal"]]
    ended, _ = drive(plan_of({"0": saving}), signals(signal.SIGTERM))
    assert (ended.exit_code, ended.problem, ended.step) == (143, None, 7)


def test_signal_ends_a_launcher_that_has_started_no_rank_and_does_not_handle_it(
    plan_of: PlanOf, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for `launch.hang_timeout`, and ended as a hang."""
    monkeypatch.setattr(supervise, "STOP_SECONDS", 0.3)
    ready = run.path / "ready"
    program = (
        "import pathlib, signal, sys, time; [signal.signal(number, signal.SIG_IGN) for number in "
        "(signal.SIGINT, signal.SIGTERM)]; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    plan = replace(plan_of({"0": []}), argv=(sys.executable, "-c", program, str(ready)))

    def interrupt() -> None:
        until(ready.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    ended, _ = drive(plan)
    assert (ended.exit_code, ended.problem) == (130, None)


def test_save_that_fails_after_a_signal_is_exit_1(plan_of: PlanOf) -> None:
    outcome = {
        "exit_code": 1,
        "exit_reason": "failed",
        "problem": {"code": "disk-full", "message": "disk full"},
    }
    failing = [
        ["ignore-signals"],
        ["beat", "saving", 9],
        ["log", {"step": 9}],
        ["sleep", 0.3],
        ["outcome", outcome],
        ["exit", 1],
    ]
    ended, problem = failure(plan_of({"0": failing}), signals(signal.SIGTERM))
    assert (ended.exit_code, problem.code, problem.message) == (1, "disk-full", "disk full (rank 0, step 9)")
    assert "rank-0000.log" in (problem.hint or "")


def test_killed_rank_ends_the_others_and_is_named(plan_of: PlanOf) -> None:
    start = time.monotonic()
    stuck = [["ignore-signals"], ["beat", "training", 3], ["spawn"], ["sleep", 60]]
    ended, problem = failure(
        plan_of({"0": stuck, "1": [["beat", "training", 3], ["sleep", 0.3], ["die", int(signal.SIGKILL)]]})
    )
    assert time.monotonic() - start < 5
    assert ended.exit_code == ExitCode.LOST_RANK
    assert "rank 1 was killed by SIGKILL at step 3" in problem.message


def test_disk_that_refuses_the_outcome_of_a_rank_is_named(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(launch_files, "write_file", refuse)
    _, problem = failure(plan_of({"0": [["exit", 1]]}))
    assert problem.message.startswith("rank 0 ended with exit code 1 before it could report: ")
    assert problem.message.endswith("/logs cannot be written (No space left on device)")


def garbled(exit_code: int) -> list[list[object]]:
    return [["beat", "training", 3], ["outcome", FINISHED], ["garble-outcome"], ["exit", exit_code]]


def test_damaged_outcome_of_a_rank_that_finished_is_not_a_failure(plan_of: PlanOf) -> None:
    ended, events = drive(
        plan_of({"0": garbled(0), "1": [["beat", "training", 3], ["sleep", 0.5], *ENDS_WELL]})
    )
    assert (ended.exit_code, ended.problem, ended.step) == (0, None, 3)
    [text] = [text for text in messages(events) if "exit code" in text]
    assert text.startswith("rank 0 left an outcome that cannot be read: it is damaged: ")
    assert text.endswith("; it ended with exit code 0 (finished)")


def test_damaged_outcome_of_a_rank_that_failed_has_its_exit_code(plan_of: PlanOf) -> None:
    ended, problem = failure(plan_of({"0": garbled(4), "1": [["listen"], ["wait-for-signal"]]}))
    assert (ended.exit_code, ended.reason, problem.code) == (
        ExitCode.NON_FINITE,
        ExitReason.NON_FINITE,
        "outcome-unreadable",
    )


def test_damaged_outcome_of_a_rank_that_saved_is_a_stop_like_those_of_the_others(plan_of: PlanOf) -> None:
    saves: list[list[object]] = [["beat", "training", 7], ["listen"], ["log", {"step": 7}], ["signalled"]]
    parts = {"0": [*saves, ["outcome", FINISHED], ["garble-outcome"], ["exit", 143]], "1": SAVES_ON_SIGNAL}
    ended, _ = drive(plan_of(parts), signal_listeners(signal.SIGTERM))
    assert (ended.exit_code, ended.reason, ended.problem) == (143, ExitReason.PREEMPTED, None)


@pytest.fixture
def full_disk(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes nothing of the supervisor; checkpoints are those that fake ranks have saved."""

    def newest(*_: object, **__: object) -> tuple[SimpleNamespace | None, list[object]]:
        steps = sorted(int(path.name.removeprefix("checkpoint-")) for path in run.path.glob("checkpoint-*"))
        return (SimpleNamespace(step=steps[-1], path=run.checkpoint(steps[-1])) if steps else None), []

    for module in (watch, supervise):
        monkeypatch.setattr(
            module, "disk_refusal", lambda run: f"{run.logs} cannot be written (No space left on device)"
        )
    monkeypatch.setattr(supervise, "latest_checkpoint", newest)


@pytest.mark.usefixtures("full_disk")
def test_run_that_finished_on_a_full_disk_is_exit_0(plan_of: PlanOf, run: RunDir) -> None:
    ends: list[list[object]] = [["beat", "training", 3], ["save", 3]]
    ended, events = drive(plan_of({"0": [*ends, ["exit", 0]], "1": [*ends, ["sleep", 1], ["exit", 0]]}))
    assert (ended.exit_code, ended.problem, ended.step) == (0, None, 3)
    why = f"rank 0 could leave no outcome: {run.logs} cannot be written (No space left on device)"
    assert f"{why} (1 more); it ended with exit code 0 (finished), and checkpoint-3 is complete" in messages(
        events
    )


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_run_that_saved_on_a_full_disk_after_a_signal_has_stopped(
    number: int, code: int, plan_of: PlanOf
) -> None:
    part: list[list[object]] = [
        ["beat", "training", 7],
        ["listen"],
        ["log", {"step": 7}],
        ["signalled"],
        ["sleep", 0.05],  # times of files are up to 10 ms older than the clock
        ["save", 9],
        ["exit", code],
    ]
    ended, _ = drive(plan_of({"0": part, "1": part}), signal_listeners(number))
    assert (ended.exit_code, ended.problem, ended.step) == (code, None, 9)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("saves", [[], [["save", 2]]])
def test_run_that_saved_nothing_on_a_full_disk_has_failed(saves: list[list[object]], plan_of: PlanOf) -> None:
    ended, problem = failure(plan_of({"0": [["beat", "training", 7], *saves, ["exit", 0]]}))
    assert ended.exit_code == ExitCode.FAILED
    assert "No space left on device" in problem.message


@pytest.mark.usefixtures("full_disk")
def test_rank_that_is_killed_on_a_full_disk_is_named(plan_of: PlanOf) -> None:
    ended, problem = failure(
        plan_of({"0": [["beat", "training", 3], ["save", 3], ["die", int(signal.SIGKILL)]]})
    )
    assert (ended.exit_code, problem.code) == (ExitCode.LOST_RANK, "rank-killed")


def test_rank_that_dies_early_shows_its_exception(plan_of: PlanOf, run: RunDir) -> None:
    """Also if an earlier launch left an outcome of that rank."""
    run.logs.mkdir()
    run.rank_outcome(1).write_text(
        '{"rank": 1, "exit_code": 0, "exit_reason": "finished", "step": 3, "time": 1.0, "problem": null}'
    )
    plan = plan_of({"0": [["ignore-signals"], ["sleep", 60]], "1": [["raise", "no such library"]]})
    ended, problem = failure(plan)
    assert ended.exit_code == ExitCode.FAILED
    assert (
        "rank 1 ended with exit code 1 before it could report: RuntimeError: no such library"
        in problem.message
    )
    assert "launcher.log" in (problem.hint or "")
    assert plan.launcher_log.stat().st_mode & 0o777 == 0o600


def test_rank_that_starts_and_ends_between_two_polls_is_missed(
    plan_of: PlanOf, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine so busy that the rank is gone before it is seen: without it the other one, deaf to
    signals, would be waited for."""
    see = watch.find_ranks

    def see_late(pid: int, wanted: range) -> dict[int, psutil.Process]:
        has_ended = run.launcher_log.exists() and "no such library" in run.launcher_log.read_text()
        return {rank: found for rank, found in see(pid, wanted).items() if rank == 0 and has_ended}

    monkeypatch.setattr(watch, "find_ranks", see_late)
    monkeypatch.setattr(watch, "UNSEEN_SECONDS", 0.2)
    ended, problem = failure(
        plan_of({"0": [["ignore-signals"], ["sleep", 300]], "1": [["raise", "no such library"]]})
    )
    assert ended.exit_code == ExitCode.FAILED
    assert (
        "rank 1 ended with exit code 1 before it could report: RuntimeError: no such library"
        in problem.message
    )


def test_rank_hanging_in_cleanup_does_not_block_the_run(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "LINGER_SECONDS", 0.3)
    start = time.monotonic()
    ended, _ = drive(
        plan_of({"0": [["outcome", FINISHED], ["beat", "finished", 1], ["ignore-signals"], ["sleep", 20]]})
    )
    assert (ended.exit_code, ended.problem) == (0, None)
    assert time.monotonic() - start < 6


def test_vanished_run_directory_is_reported_and_not_recreated(plan_of: PlanOf, run: RunDir) -> None:
    elsewhere = run.path.with_name("elsewhere")
    ended, problem = failure(
        plan_of({"0": [["beat", "training", 1], ["rename-run", str(elsewhere)], ["exit", 1]]})
    )
    assert (ended.exit_code, problem.code) == (1, "run-directory-gone")
    assert not run.path.exists()
    assert elsewhere.exists()


def test_failed_launcher_shows_its_error(plan_of: PlanOf) -> None:
    program = "import sys; sys.exit('accelerate: error: unrecognized arguments: --x')"
    ended, problem = failure(replace(plan_of({"0": []}), argv=(sys.executable, "-c", program)))
    assert ended.exit_code == 1
    assert "unrecognized arguments: --x" in problem.message


def launcher_of(supervisor: Supervisor) -> psutil.Process:
    """The process that runs the agent of this launch."""
    (found,) = (each for each in psutil.Process().children() if str(supervisor._run.path) in each.cmdline())
    return found


DEAF = [["beat", "training", 1], ["log", {"step": 1}], ["ignore-signals"], ["sleep", 60]]


def test_no_process_survives_killed_launcher(plan_of: PlanOf) -> None:
    ended, problem = failure(plan_of({"0": DEAF}), lambda supervisor: launcher_of(supervisor).kill())
    assert ended.exit_code == ExitCode.LOST_RANK
    assert problem.message == "the launcher was killed by SIGKILL"


def test_no_process_survives_killed_supervisor(plan_of: PlanOf, run: RunDir, repository: Path) -> None:
    plan_of({"0": DEAF})
    program = f"""
from pathlib import Path
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.run import launch_files
from fsdp_tune.run.directory import RunDir
from tests.launch.fake_ranks import fake_plan
for _ in Supervisor(fake_plan(RunDir(Path({str(run.path)!r})), 1), hang_timeout_seconds=60).events(): pass
"""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(repository)}
    )
    until(run.rank_heartbeat(0).exists)
    family = psutil.Process(supervisor.pid).children(recursive=True)
    assert len(family) == 2
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_closing_the_events_ends_the_ranks(plan_of: PlanOf) -> None:
    before = children()
    events = Supervisor(plan_of({"0": DEAF}), hang_timeout_seconds=60).events()
    next(events)
    events.close()
    assert left_over(before) == []


def test_hanging_rank_is_named_with_its_location(plan_of: PlanOf, run: RunDir) -> None:
    beats = [["stacks"], ["beat", "backward", 5]]
    ended, events = drive(
        plan_of({"0": [*beats, ["log", {"step": 5}], ["wait"]], "1": [*beats, ["sleep", 60]]}), limit_hangs
    )
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
    assert any("no progress" in text for text in messages(events))


def test_stopped_rank_is_late_and_its_location_is_reported(plan_of: PlanOf, run: RunDir) -> None:
    beats = [["stacks"], ["beat", "training", 2]]
    plan = plan_of(
        {"0": [*beats, ["log", {"step": 2}], ["sleep", 60]], "1": [*beats, ["die", int(signal.SIGSTOP)]]}
    )
    _, problem = failure(plan, limit_hangs)
    assert "rank 1 (step 2, `training`, stopped (SIGSTOP), at " in problem.message
    assert "rank 0" not in problem.message
    stacks = run.hang_report.read_text().split("── stacks of rank ")
    assert all("fake_worker.py" in text for text in stacks[1:])


def test_stopped_launcher_is_named_as_cause(plan_of: PlanOf) -> None:
    """torchrun's agent serves the store through which ranks find each other."""

    def stop_launcher(supervisor: Supervisor) -> None:
        launcher_of(supervisor).suspend()
        limit_hangs(supervisor)

    ended, problem = failure(
        plan_of({"0": [["stacks"], ["beat", "importing", 0], ["log", {"step": 0}], ["wait"]]}), stop_launcher
    )
    assert ended.exit_code == ExitCode.LOST_RANK
    assert "rank 0 (step 0, `importing`, its launcher is stopped (SIGSTOP)" in problem.message


def test_stack_request_does_not_kill_rank_without_handler(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR2 ends a process without a handler; a rank that is stuck before it has one is named all the
    same."""
    monkeypatch.setattr(hang_diagnosis, "ANSWER_SECONDS", 0.5)
    plan = plan_of({"0": [["log", {"event": "x"}], ["sleep", 60]]})
    _, problem = failure(plan, lambda supervisor: setattr(supervisor, "_hang_seconds", HANG_SECONDS))
    assert problem.code == "hang"
    assert "before its first heartbeat" in problem.message
    assert "exitcode" not in plan.launcher_log.read_text(), "the agent reports a rank that has ended"


def test_waiting_for_slow_rank_is_not_a_hang(plan_of: PlanOf) -> None:
    slow = [act for _ in range(14) for act in (["beat", "saving", 5], ["sleep", 0.1])]
    waits = [["beat", "saving", 5], ["log", {"step": 5}], ["sleep", 1.5], ["outcome", FINISHED]]
    ended, _ = drive(plan_of({"0": waits, "1": [*slow, ["outcome", FINISHED]]}), limit_hangs)
    assert (ended.exit_code, ended.problem) == (0, None)
