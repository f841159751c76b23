"""Fail a test that leaves a process or a listening port behind.

A process belongs to a test if it has the test's mark in its environment, also when its parent has ended.
Ranks are forks of a server (`tests/ranks.py`) and have no mark; they end with their world. Looking through
/proc takes milliseconds, so it is done only after a test that started a process or bound a socket.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.warm import left_processes

MARK = "TESTS_MARK"
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
GRACE_SECONDS = 3.0
"""How long a process that was asked to end may take."""
SHARED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
"""Helpers that Python and torch start once for a process."""
_happened: set[str] = set()
_numbers = itertools.count()
_known_processes: set[int] = set()
_known_ports: set[int] = set()


def _note(event: str, _arguments: tuple[object, ...]) -> None:
    if event in STARTS:
        _happened.add("process")
    elif event == "socket.bind" and "port" not in _happened:
        _happened.add("port")
        _known_ports.update(_ports())  # those that C++ code opened before, of which there is no event


sys.addaudithook(_note)


@pytest.fixture(autouse=True)
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torn down last of a test's own fixtures. What fixtures of a module or session have started is there
    before."""
    mark = f"{os.getpid()}-{next(_numbers)}"
    monkeypatch.setenv(MARK, mark)
    with nothing_left(mark):
        yield


@contextlib.contextmanager
def nothing_left(mark: str) -> Iterator[None]:
    """Raise AssertionError for what was started meanwhile and is there afterwards; its processes are
    killed."""
    _remember()
    yield
    warm_ones = left_processes()
    processes = _left(lambda: _processes(mark)) if "process" in _happened else {}
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ports = _left(_ports) if "port" in _happened else {}
    _remember()
    left = [f"process {line}" for line in warm_ones]
    left += [f"process {pid} ({command})" for pid, command in processes.items()]
    left += [f"port {port} of {name}" for port, name in ports.items()]
    assert not left, f"the test left behind: {'; '.join(left)}"


def is_shared(pid: int) -> None:
    """Let a child outlive the test that happened to need it first. It ends with its parent."""
    _known_processes.add(pid)


def _remember() -> None:
    """Count what exists as known."""
    if "process" in _happened:
        _known_processes.update(_children())
    if "port" in _happened:
        _known_ports.update(_ports())
    _happened.clear()


def _left(find: Callable[[], dict[int, str]]) -> dict[int, str]:
    deadline = time.monotonic() + GRACE_SECONDS
    while (found := find()) and time.monotonic() < deadline:
        # an error that the test caught may have kept the iterator that ends its processes when it is
        # collected
        gc.collect()
        time.sleep(0.05)
    return found


def _processes(mark: str) -> dict[int, str]:
    """Return pid → command of new children, at any depth, and of what runs with the mark. What has ended is
    not left."""
    wanted = f"{MARK}={mark}".encode()
    marked = {
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if wanted in _read(path).split(b"\0")
    }
    commands = {pid: _read(Path(f"/proc/{pid}/cmdline")) for pid in (marked | _children()) - _known_processes}
    texts = {
        pid: command.replace(b"\0", b" ").decode(errors="replace")[:200]
        for pid, command in commands.items()
        if command
    }
    return {pid: text for pid, text in texts.items() if not any(name in text for name in SHARED)}


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


def _ports() -> dict[int, str]:
    """Return the ports on which this process listens and that are not known."""
    connections = psutil.Process().net_connections("tcp")
    ports = {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    return dict.fromkeys(ports - _known_ports, "this process")
