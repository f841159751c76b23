"""A signal to ranks whose launcher does not run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from fsdp_tune.launch.supervise import signal_relay
from fsdp_tune.launch.supervise.signal_relay import SignalRelay, is_pending
from tests.launch.links import until

BLOCKS_SIGTERM = (
    "import signal, sys, time; signal.pthread_sigmask(0, [15]); print(flush=True); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_relay, "PENDING_SECONDS", 0.0)


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    """Keeps SIGTERM pending, as a launcher in the kernel does."""
    with subprocess.Popen(
        [sys.executable, "-ISc", BLOCKS_SIGTERM], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_launcher_that_does_not_take_the_signal_is_passed_over_once(
    launcher: subprocess.Popen[str], rank: subprocess.Popen[bytes]
) -> None:
    relay, ranks = SignalRelay(launcher), [psutil.Process(rank.pid)]
    assert relay.help(ranks) is None, "no signal was sent"
    relay.send(signal.SIGTERM)
    relay.send(signal.SIGINT)
    assert (
        relay.help(ranks)
        == f"the launcher (pid {launcher.pid}) does not take SIGTERM, which is sent to the ranks instead"
    )
    assert rank.wait(10) == -signal.SIGTERM
    assert relay.help(ranks) is None
    # it must not pass the signal on later
    until(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED)


def test_stopped_launcher_is_continued(launcher: subprocess.Popen[str]) -> None:
    relay = SignalRelay(launcher)
    launcher.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED)
    relay.send(signal.SIGUSR1)
    assert is_pending(launcher.pid, signal.SIGUSR1)
    assert (
        relay.help([])
        == f"the launcher (pid {launcher.pid}) was stopped; it is continued, to pass SIGUSR1 on to the ranks"
    )
    assert launcher.wait(10) == -signal.SIGUSR1
    assert relay.help([]) is None


def test_signal_that_was_taken_is_not_pending(launcher: subprocess.Popen[str]) -> None:
    launcher.send_signal(signal.SIGTERM)
    assert [is_pending(launcher.pid, number) for number in (signal.SIGTERM, signal.SIGINT)] == [True, False]
    assert not is_pending(2**22, signal.SIGTERM), "no such process"
