"""The process that sends, on the side of its command: how it is started, waited for, and reported."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.cluster.mirror.remote_run import RemoteRun, read_identity
from fsdp_tune.core.errors import Notice, failed_error
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.jobs import mirroring as jobs
from fsdp_tune.jobs.mirroring import Mirroring
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.mirror_state import MirrorState, state_path
from tests.cluster.mirrors import make_run, send_all, without_waits_for_the_disk
from tests.jobs.test_mirroring import start
from tests.launch.recipes import resolved


class Child:
    """A process that sends. It ends with this code when its input has ended, or never."""

    pid = 7

    def __init__(self, exit_code: int | None = 0) -> None:
        self.exit_code = exit_code
        self.returncode: int | None = None
        self.has_input, self.is_killed = True, False
        self.stdin = SimpleNamespace(close=self.close)

    def close(self) -> None:
        self.has_input = False
        self.returncode = self.exit_code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, seconds: float) -> None:
        if self.returncode is None:
            raise subprocess.TimeoutExpired("send", seconds)


class Seen(Observer):
    def __init__(self) -> None:
        self.found: list[Notice] = []
        self.advanced: list[int] = []
        self.total: int | None = None

    def notices(self, notices: Any) -> None:
        self.found += notices

    def progress(self, label: str, total: int | None, unit: str) -> Any:
        self.total = total
        return nullcontext(SimpleNamespace(advance=self.advanced.append))


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    without_waits_for_the_disk(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "mirror").mkdir()
    return make_run(tmp_path / "run")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the processes that are started. They are replaced by `Child`s."""
    commands = list[list[str]]()

    def begin(command: list[str], _: object, **pipes: Any) -> Child:
        commands.append(command)
        pipes["stdout"].write(b"said")
        return Child()

    monkeypatch.setattr(jobs.children, "start", begin)
    monkeypatch.setattr(jobs.children, "end", lambda child: setattr(child, "is_killed", True))
    return commands


def mirroring(run: RunDir, *overrides: str, machine: int = 0) -> Mirroring:
    url = f"file://{run.path.parent}/mirror"
    recipe = resolved(run.path.parent, f"checkpoint.mirror={url}", *overrides)
    return Mirroring(run, recipe, RemoteRun(url, run.name), Seen(), machine)


def notices(found: Mirroring) -> list[Notice]:
    assert isinstance(found.observer, Seen)
    return found.observer.found


TWO_MACHINES = ("launch.num_machines=2", "launch.main_process_ip=127.0.0.1")


@pytest.mark.parametrize(
    ("overrides", "machine", "words"),
    [
        (("training.save_total_limit=0",), 0, ["0", "1", "all"]),
        (("training.save_total_limit=3",), 0, ["0", "1", "3"]),
        (("training.save_total_limit=3", *TWO_MACHINES), 1, ["1", "2", "3"]),
    ],
)
def test_process_gets_the_recipes_limits_and_the_claim(
    run: RunDir, started: list[list[str]], overrides: tuple[str, ...], machine: int, words: list[str]
) -> None:
    send_all(run, RemoteRun(f"file://{run.path.parent}/mirror", "run"))
    found = mirroring(run, *overrides, machine=machine)
    with closing(found):
        assert not found.prepare(start(100), "auto")
        assert found._writer is not None
        key = found._writer.key
        with found.sending(100):
            pass
    (command,) = started
    module = [sys.executable, "-m", "fsdp_tune.cluster.mirror.send"]
    url = str(found.recipe.checkpoint.mirror)
    assert command == [*module, str(run.path), url, *words, "100", key, "shared"]
    log = run.logs / f"mirror-{machine:02d}.log"
    assert (log.read_bytes(), log.stat().st_mode & 0o077) == (b"said", 0)


def test_process_of_a_start_that_saw_no_mirror_takes_nothing_back(
    run: RunDir, started: list[list[str]]
) -> None:
    own = ("launch.shared_directory=false", *TWO_MACHINES)
    with mirroring(run, *own).sending(100):
        pass
    assert started[0][-3:] == ["unknown", "none", "own"]


@pytest.mark.parametrize(("machine", "has_identity"), [(0, True), (1, False)])
@pytest.mark.usefixtures("started")
def test_new_run_gets_its_identity_from_the_first_machine(
    run: RunDir, machine: int, *, has_identity: bool
) -> None:
    run.mirror_json.unlink()
    with mirroring(run, machine=machine).sending(0):
        assert (read_identity(run) is not None) == has_identity
    first = read_identity(run)
    with mirroring(run, machine=machine).sending(0):
        assert read_identity(run) == first


@pytest.mark.parametrize(
    ("error", "is_waited_for"),
    [
        (None, True),
        (failed_error("rank-failed", "a rank failed"), True),
        (StoppedBySignal(signal.SIGTERM), False),
        (KeyboardInterrupt(), False),
        (RuntimeError("a bug"), False),
    ],
    ids=["finished", "failed", "SIGTERM", "Ctrl-C", "bug"],
)
@pytest.mark.usefixtures("started")
def test_checkpoints_of_a_failed_run_are_sent_and_a_signal_waits_for_nothing(
    run: RunDir, error: BaseException | None, *, is_waited_for: bool
) -> None:
    found = mirroring(run)

    def work() -> None:
        with found.sending(0):
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(type(error)):
            work()
    child: Any = found._child
    assert (child.has_input, child.is_killed) == (not is_waited_for, True)
    assert notices(found) == []


GIB = 1 << 30


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "has no checkpoint"),
        (MirrorState("-", newest_step=10), "has checkpoint-10 at the newest"),
        (
            MirrorState("-", newest_step=10, waiting=["checkpoint-20", "merged"], left_bytes=3 * GIB),
            "has checkpoint-10 at the newest; checkpoint-20, merged (3.00 GiB) on this disk alone",
        ),
        (MirrorState("-", error="timed out"), "has no checkpoint: timed out"),
        (
            MirrorState("-", refused={"merged": "it is damaged"}, error="it is damaged"),
            "has no checkpoint: it is damaged",
        ),
        (
            MirrorState("-", refused={"merged": "it is damaged"}, error="timed out"),
            "has no checkpoint: it is damaged; timed out",
        ),
    ],
)
def test_what_the_mirror_lacks_at_the_end_is_a_notice(
    run: RunDir, state: MirrorState | None, message: str
) -> None:
    found, child = mirroring(run), Child(1)
    found._child = child  # type: ignore[assignment]
    if state is not None:
        state.write(state_path(run, 0))
    found._started = jobs.RESTARTS + 1
    found._finish()
    (notice,) = notices(found)
    assert (notice.code, notice.message) == ("mirror-behind", f"the mirror {found.remote.url} {message}")
    assert f"`fsdp-tune status {run.path}`" in str(notice.hint)


@pytest.mark.parametrize(("exit_code", "is_reported"), [(0, False), (None, False), (1, True), (-9, True)])
def test_other_machine_reports_a_process_that_failed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, exit_code: int | None, *, is_reported: bool
) -> None:
    found = mirroring(run, *TWO_MACHINES, machine=1)
    found._child = Child(exit_code)  # type: ignore[assignment]
    monkeypatch.setattr(Mirroring, "_wait", lambda *_: None)
    found._finish()
    assert [notice.code for notice in notices(found)] == ["mirror-behind"] * is_reported
    for notice in notices(found):
        assert f"ended with {exit_code}" in notice.message
        assert str(run.logs / "mirror-01.log") in str(notice.hint)


@pytest.mark.parametrize("stop", [StoppedBySignal(signal.SIGTERM), KeyboardInterrupt()])
def test_signal_ends_the_wait_for_the_mirror_of_a_finished_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    def interrupted(*_: object) -> None:
        raise stop

    found = mirroring(run)
    found._child = Child(None)  # type: ignore[assignment]
    monkeypatch.setattr(Mirroring, "_wait", interrupted)
    found._finish()
    assert [notice.code for notice in notices(found)] == ["mirror-behind"]


def waited(
    found: Mirroring, monkeypatch: pytest.MonkeyPatch, states: Callable[[float], MirrorState | None]
) -> float:
    """Wait for the process that sends, whose state at each second this returns; None: it has ended. Returns
    the seconds of the wait."""
    now, child = [0.0], Child(None)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        assert now[0] < 2 * jobs.WAIT_SECONDS
        if states(now[0]) is None:
            child.returncode = 0

    monkeypatch.setattr(jobs, "LIVED", SimpleNamespace(now=lambda: now[0]))
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(Mirroring, "_state", lambda _: states(now[0]) or MirrorState("-", sent_bytes=100))
    found._wait(child)  # type: ignore[arg-type]
    return now[0]


def test_wait_ends_with_the_process_and_counts_what_is_sent(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process takes the bytes of an attempt that failed back."""
    found, sent = mirroring(run), [0, 30, 10, 60, 100]

    def state(seconds: float) -> MirrorState | None:
        at = int(seconds / jobs.POLL_SECONDS)
        return MirrorState("-", sent_bytes=sent[at], left_bytes=100) if at < 5 else None

    assert waited(found, monkeypatch, state) == 5 * jobs.POLL_SECONDS
    assert isinstance(found.observer, Seen)
    assert (found.observer.total, found.observer.advanced) == (100, [30, -20, 50, 40])


@pytest.mark.parametrize(
    ("state", "limit"),
    [
        (lambda _: MirrorState("-"), jobs.STALL_SECONDS),
        (lambda now: MirrorState("-", sent_bytes=int(min(now, 100))), 100 + jobs.STALL_SECONDS),
        (lambda now: MirrorState("-", hashed_bytes=int(min(now, 100))), 100 + jobs.STALL_SECONDS),
        (lambda now: MirrorState("-", waiting=["a"] * (now < 50)), 50 + jobs.STALL_SECONDS),
        (lambda now: MirrorState("-", sent_bytes=int(now)), jobs.WAIT_SECONDS),
    ],
    ids=["nothing", "sent", "hashed", "folders", "for ever"],
)
def test_wait_is_limited_without_progress_and_at_all(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, state: Any, limit: float
) -> None:
    assert waited(mirroring(run), monkeypatch, state) == pytest.approx(limit, abs=1.0)


def test_process_is_started_again_a_few_times_and_then_takes_nothing_back(
    run: RunDir, started: list[list[str]]
) -> None:
    found = mirroring(run)
    found._was_read = True
    found.tend()
    assert started == [], "before it was started"
    with found.sending(100):
        for _ in range(2 * jobs.RESTARTS):
            child: Any = found._child
            child.returncode = -9
            found.tend()
    assert [command[-3] for command in started] == ["100", *["unknown"] * jobs.RESTARTS]


def test_error_of_an_earlier_process_is_not_reported(run: RunDir) -> None:
    found = mirroring(run)
    found._child = Child()  # type: ignore[assignment]
    state = MirrorState("-", error="no rights", is_refused=True)
    for pid, count in ((1, 0), (Child.pid, 1)):
        MirrorState(**{**state.as_dict(), "pid": pid}).write(state_path(run, 0))
        found.tend()
        assert len(notices(found)) == count
