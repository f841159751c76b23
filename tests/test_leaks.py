"""A test that leaves a process or a listening port behind fails."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess

import pytest

from tests import leaks


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.1)


def test_process_that_runs_on_is_reported_and_killed() -> None:
    with pytest.raises(AssertionError, match="sleep 60"), leaks.nothing_left("of this block"):
        child = subprocess.Popen(["sleep", "60"])
    assert child.wait(5) == -9


def test_orphan_is_known_by_its_mark() -> None:
    with pytest.raises(AssertionError, match="sleep 61"), leaks.nothing_left("of an orphan"):
        subprocess.run(["sh", "-c", "sleep 61 &"], env=os.environ | {leaks.MARK: "of an orphan"}, check=True)


def test_listening_port_is_reported() -> None:
    def listen() -> None:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

    with (
        socket.socket() as listening,
        pytest.raises(AssertionError, match="port"),
        leaks.nothing_left("of a port"),
    ):
        listen()


def test_port_that_was_open_before_without_a_notice_is_not_blamed_on_the_next_that_binds() -> None:
    with socket.socket() as quiet, socket.socket() as closed:
        address = (ctypes.c_ubyte * 16)(*socket.AF_INET.to_bytes(2, "little"), 0, 0, 127, 0, 0, 1)
        # as C++ does: Python has no event of it
        assert ctypes.CDLL(None).bind(quiet.fileno(), address, 16) == 0
        quiet.listen()
        with leaks.nothing_left("of another"):
            closed.bind(("127.0.0.1", 0))
            closed.listen()
            closed.close()


def test_what_has_ended_is_not_left() -> None:
    with leaks.nothing_left("of nothing"):
        subprocess.run(["true"], check=True)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
