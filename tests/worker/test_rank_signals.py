"""Stops for `launch.max_runtime`, and the outcome that a rank always writes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, Problem
from fsdp_tune.core.parent_death import LAUNCHER_PID
from fsdp_tune.core.signals import STOP_SIGNALS
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import LaunchRecord
from fsdp_tune.run.rank_files import Heartbeat, Outcome, read_heartbeat, read_outcome
from fsdp_tune.worker import callbacks, rank, stop_request
from fsdp_tune.worker import main as worker_main
from fsdp_tune.worker.callbacks import RunCallback
from fsdp_tune.worker.rank import Rank
from fsdp_tune.worker.readback.witness import Witness
from fsdp_tune.worker.stop_request import StoppedEarly, StopRequest, forget_loader_processes


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Vote:
    """As `StopVote` of one rank: what is posted at one step is read at the next."""

    posted = 0

    def exchange(self, mine: int) -> int:
        answer, self.posted = self.posted, mine
        return answer


@pytest.mark.parametrize("max_runtime_seconds", [70, 100, 160])
@pytest.mark.parametrize(
    ("first_step", "step", "evaluation", "save", "is_probed"),
    [(20.0, 2.0, 0.0, 25.0, True), (6.0, 6.0, 20.0, 5.0, True), (1.0, 10.0, 0.0, 0.0, False)],
    ids=["a slow first save, probed", "slow steps and evaluations", "slow steps, no probe"],
)
def test_run_saves_before_max_runtime(
    max_runtime_seconds: float,
    first_step: float,
    step: float,
    evaluation: float,
    save: float,
    is_probed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    monkeypatch.setattr(stop_request, "time", clock)
    checkpointer = SimpleNamespace(poll=lambda: None, longest_seconds=0.0)
    metrics = SimpleNamespace(failure=None, event=lambda *_, **__: None)
    witness = Witness("off", lambda _: None)
    callback = RunCallback(
        RunDir(Path()), StopRequest(max_runtime_seconds), lambda _: None, witness, is_first=False, saves=True
    )
    monkeypatch.setattr(callback, "_vote", Vote())
    callback.trainer = SimpleNamespace(
        checkpointer=checkpointer, parts=SimpleNamespace(metrics=metrics, evals={})
    )  # type: ignore[assignment]
    control: Any = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
    arguments: Any = SimpleNamespace(eval_strategy="steps")

    def probe() -> None:
        if is_probed:
            clock.now += save
            checkpointer.longest_seconds = save

    monkeypatch.setattr(callback, "_after_first_step", probe)
    for number in range(1, 1000):
        clock.now += first_step if number == 1 else step
        state: Any = SimpleNamespace(global_step=number, max_steps=1000)
        callback.on_step_end(arguments, state, control)
        if control.should_training_stop:
            break
        if evaluation and number % 3 == 0:
            clock.now += evaluation
            callback.on_evaluate(arguments, state, control)
    used = clock.now + save
    assert callback.stopped is ExitReason.MAX_RUNTIME
    assert used <= max_runtime_seconds or number == 2, "two steps are the least that a vote takes"
    assert (
        number <= 3
        or used >= max_runtime_seconds - 2 * save - 3 * step - evaluation - stop_request.MARGIN_SECONDS
    ), "no more than it needs"


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1.5])
def test_outcome_is_written_with_nonfinite_loss(loss: float, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    Outcome(0, ExitReason.FINISHED, facts={"loss": loss, "nested": [{"loss": loss}]}, step=7).write(
        run.rank_outcome(0)
    )
    outcome = json.loads(run.rank_outcome(0).read_text())
    assert (outcome["exit_code"], outcome["step"]) == (0, 7)
    assert outcome["loss"] == outcome["nested"][0]["loss"] == (loss if loss == 1.5 else str(loss))


RECIPE: Any = SimpleNamespace(launch=SimpleNamespace(hang_timeout="30m", max_runtime=None, device="cpu"))


@pytest.fixture
def _restored_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_restored_handlers")
def test_rank_inherits_ignored_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    StopRequest().install()
    assert [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN] == [
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR2,  # a request for stacks, which `worker.__main__` answers
        signal.SIGQUIT,
    ]


@pytest.mark.usefixtures("_restored_handlers")
@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGQUIT, signal.SIGPWR])
def test_other_stop_signals_save_and_stop_too(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, request = Clock(), StopRequest()
    monkeypatch.setattr(stop_request, "time", clock)
    monkeypatch.setattr(stop_request.os, "_exit", lambda _: pytest.fail("ends without saving"))
    request.training = True
    request.install()
    os.kill(os.getpid(), number)
    assert stop_request.STOP_REASONS[request.code()] is ExitReason.PREEMPTED
    clock.now += 10.0
    os.kill(os.getpid(), signal.SIGXCPU)  # the kernel repeats it each second


@pytest.mark.usefixtures("_restored_handlers")
def test_used_up_cpu_time_before_training_ends_the_rank() -> None:
    StopRequest().install()
    with pytest.raises(StoppedEarly) as stopped:
        os.kill(os.getpid(), signal.SIGXCPU)
    assert stopped.value.reason is ExitReason.PREEMPTED


@pytest.mark.usefixtures("_restored_handlers")
def test_signal_whose_exception_is_swallowed_stops_the_training() -> None:
    """What is raised in a finalizer is printed and forgotten."""
    request = StopRequest()
    request.install()

    with pytest.raises(StoppedEarly):
        os.kill(os.getpid(), signal.SIGTERM)
    request.training = True
    assert stop_request.STOP_REASONS[request.code()] is ExitReason.PREEMPTED


@pytest.mark.parametrize(("is_supervised", "seconds"), [(True, 7 * 24 * 3600), (False, 30 * 60 + 300)])
def test_a_collective_of_supervised_ranks_outlives_a_suspension(
    is_supervised: bool, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER_PID, str(os.getpid()) if is_supervised else "")
    assert rank._collective_limit(RECIPE).total_seconds() == seconds


@pytest.mark.parametrize(
    ("boot", "gone_seconds"), [("this one", 600.0), ("an earlier one", 4200.0), ("", 4200.0)]
)
def test_max_runtime_does_not_follow_the_date(
    boot: str, gone_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The date was set forward by an hour. After another boot nothing else is known."""
    run, launch = RunDir(tmp_path), SimpleNamespace(max_runtime="2h")
    LaunchRecord(started_at=time.time() - 4200.0, boot=boot, boot_seconds=1000.0).write(run.launch_json)
    monkeypatch.setattr(worker_main, "seconds_since_boot", lambda: ("this one" if boot else "", 1600.0))
    deadline = worker_main._deadline(run, cast(Any, SimpleNamespace(launch=launch)), time.time())
    assert deadline is not None
    assert deadline - time.monotonic() == pytest.approx(7200 - gone_seconds, abs=5)


def test_outcome_is_written_once_a_full_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original, refused = RunDir(tmp_path), Outcome.write, list[int]()
    run.logs.mkdir()

    def write(outcome: Outcome, path: Path) -> None:
        if len(refused) < 2:
            refused.append(errno.ENOSPC)
            raise OSError(errno.ENOSPC, "No space left on device")
        original(outcome, path)

    monkeypatch.setattr(Outcome, "write", write)
    worker_main._write_outcome(run, Outcome(ExitCode.FAILED, ExitReason.FAILED, rank=1))
    assert (len(refused), run.rank_outcome(1).is_file()) == (2, True)


@pytest.mark.usefixtures("_restored_handlers")
def test_signal_does_not_prevent_writing_the_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent ends the ranks that are left as soon as one has failed, and another may be writing its own
    failure then."""
    run = RunDir(tmp_path)
    run.logs.mkdir()
    original = Outcome.write

    def interrupted(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        original(*arguments)

    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Outcome, "write", interrupted)
    monkeypatch.setattr(worker_main, "_train", fail)
    worker_main.run_rank(run, RECIPE, Rank(0, 0, 1), lambda _: None, 0.0)
    outcome = json.loads(run.rank_outcome(0).read_text())
    assert Problem.from_dict(outcome["problem"]).message == "ValueError: a bug"


def reported(folder: Path) -> Outcome:
    """The outcome that a rank of a new run has written."""
    run = RunDir(folder)
    run.logs.mkdir()
    worker_main.run_rank(run, RECIPE, Rank(0, 0, 1), lambda _: None, 0.0)
    found = read_outcome(run, 0)
    assert found is not None
    return found


def raising(*_: Any) -> None:
    """Stands for torch's handler of SIGCHLD once a process of its loader was killed."""
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")


@pytest.mark.usefixtures("_restored_handlers")
@pytest.mark.parametrize(
    "error", [EOFError("gone"), None], ids=["a rank that failed", "a rank that finished"]
)
def test_killed_loader_process_does_not_prevent_writing_the_outcome(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is noticed by the pipe first, so the signal comes while the outcome is composed."""

    def train(*_: Any) -> Outcome:
        signal.signal(signal.SIGCHLD, raising)
        if error is not None:
            raise error
        return Outcome(ExitCode.OK, ExitReason.FINISHED)

    def signalled(called: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGCHLD)
            return called(*arguments, **options)

        return call

    for name in ("_outcome_of", "replace", "_write_outcome"):
        monkeypatch.setattr(worker_main, name, signalled(getattr(worker_main, name)))
    monkeypatch.setattr(worker_main, "_train", train)
    found = reported(tmp_path)
    wanted = None if error is None else "EOFError: gone"
    assert (None if found.problem is None else found.problem.message) == wanted


@pytest.mark.usefixtures("_restored_handlers")
def test_rank_that_has_trained_to_its_end_has_not_failed_by_what_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_main, "_train", lambda *_: Outcome(ExitCode.OK, ExitReason.FINISHED))
    monkeypatch.setattr(worker_main, "forget_loader_processes", raising)
    found = reported(tmp_path)
    assert (found.exit_code, found.problem) == (0, None)


def test_handler_that_raises_while_it_is_removed_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def set_handler(_: int, handler: object) -> None:
        calls.append(handler)
        if len(calls) == 1:
            raising()

    monkeypatch.setattr(signal, "signal", set_handler)
    forget_loader_processes()
    assert calls == [signal.SIG_DFL, signal.SIG_DFL]


@pytest.mark.usefixtures("_restored_handlers")
def test_rank_of_an_earlier_launch_leaves_the_outcome_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine was counted as lost, and is back."""
    run = RunDir(tmp_path)
    run.logs.mkdir()

    def train(*_: Any) -> None:
        Heartbeat(0, 1, 7, "finished", 1.0, 2.0, 0.0, launch="life-2", began_at=time.time() + 60).write(
            run.rank_heartbeat(0)
        )
        Outcome(ExitCode.OK, ExitReason.FINISHED, launch="life-2").write(run.rank_outcome(0))
        raise ValueError("the group is gone")

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "life-1")
    monkeypatch.setattr(worker_main, "_train", train)
    worker_main.run_rank(run, RECIPE, Rank(0, 0, 1), lambda _: None, 0.0)
    found = read_outcome(run, 0)
    assert found is not None
    assert (found.launch, found.reason) == ("life-2", ExitReason.FINISHED)
    assert read_heartbeat(run, 0, "life-2") is not None


def forked(program: Callable[..., object], path: Path, log: Path) -> int | None:
    """Call `program(path)` in a process whose output goes to `log`; returns its exit code. It ends as an
    interpreter does."""

    def run() -> None:
        with open(log, "w") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        program(path)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    return code


def fail_while_a_loader_reads(path: Path) -> None:
    def read(ready: Any) -> None:
        stop_request.ignore_stop_signals(0)
        ready.set()
        time.sleep(3600)

    def fail(*_: Any) -> None:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        context.Process(target=read, args=(ready,), daemon=True).start()
        ready.wait()
        raise ValueError("a bug")

    worker_main._train = fail
    sys.exit(worker_main.run_rank(RunDir(path), RECIPE, Rank(0, 0, 1), print, 0.0).exit_code)


def test_failed_rank_with_full_log_writes_outcome_and_exits(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    assert forked(fail_while_a_loader_reads, run.path, Path("/dev/full")) == 1
    outcome = json.loads(run.rank_outcome(0).read_text())
    assert Problem.from_dict(outcome["problem"]).message == "ValueError: a bug"


def end_without_an_outcome(path: Path) -> None:
    from fsdp_tune.worker import __main__ as entry

    worker_main.read_recipe = lambda run: SimpleNamespace()
    outcome = Outcome(1, ExitReason.FAILED, Problem("write-failed", "metrics.jsonl: Read-only file system"))
    worker_main.run_rank = lambda *_: outcome
    rank.read_rank = lambda *_: Rank(1, 0, 2)
    rank.set_environment = lambda *_: None
    sys.exit(entry.main([str(path)]))


def test_unwritable_outcome_is_reported_in_launcher_log(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.recipe_json.write_text("{}")
    log = tmp_path / "launcher.log"
    assert forked(end_without_an_outcome, run.path, log) == 1, log.read_text()
    assert log.read_text() == "error: rank 1: metrics.jsonl: Read-only file system\n"
