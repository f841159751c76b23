"""Seconds that a process lived through, and seconds since boot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fsdp_tune.core import clocks
from fsdp_tune.core.clocks import LEAST_GAP_SECONDS, Gap, LivedClock, seconds_since_boot


class Hands:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _seconds: float) -> None:
        time.sleep(3600)  # the clock's own thread, which this test stands in for


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    made = Hands()
    monkeypatch.setattr(clocks, "time", made)
    return made


def test_time_in_which_nothing_looked_at_the_clock_does_not_count(hands: Hands) -> None:
    clock = LivedClock()
    began = clock.now()
    for seconds in (1.0, LEAST_GAP_SECONDS, 600.0, 2.0):
        hands.now += seconds
        clock.now()
    assert clock.now() - began == 1.0 + LEAST_GAP_SECONDS + 2.0
    assert [gap.seconds for gap in clock.gaps] == [600.0]


def test_a_moment_before_within_and_after_a_gap() -> None:
    clock = LivedClock(gaps=[Gap(200.0, 260.0), Gap(300.0, 400.0)])
    moments = {
        150.0: 150.0,
        200.0: 200.0,
        230.0: 200.0,
        260.0: 200.0,
        280.0: 220.0,
        350.0: 240.0,
        410.0: 250.0,
    }
    assert {moment: clock.at(moment) for moment in moments} == moments


STOPPED = """
import sys, time
from fsdp_tune.core import clocks
clocks.PERIOD_SECONDS, clocks.LEAST_GAP_SECONDS = 0.05, 0.4
began, plain = clocks.LIVED.now(), time.monotonic()
print("ready", flush=True)
sys.stdin.readline()
print(clocks.LIVED.now() - began, time.monotonic() - plain)
"""


def test_stopped_process_did_not_live() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(child.pid, signal.SIGCONT)
    lived, passed = map(float, child.communicate("\n", timeout=30)[0].split())
    assert passed > 1.0
    assert passed - lived > 0.9


def test_a_fork_looks_at_its_own_clock() -> None:
    clock = LivedClock()
    clock.now()
    clock._seen = time.monotonic() - 100  # what the parent's thread saw last, long before the fork
    clock._pid = -1
    clock.now()
    assert clock.gaps == []


def test_boot_is_known_by_its_id() -> None:
    boot, seconds = seconds_since_boot()
    assert boot == seconds_since_boot()[0] != ""
    assert 0.0 < seconds <= seconds_since_boot()[1]
