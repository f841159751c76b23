"""Child processes of a command, which end when the command ends, even if it is killed; and the directory that
compilers use in them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from fsdp_tune.core.parent_death import ends_with_parent
from fsdp_tune.core.refused_variables import raise_if_refused
from fsdp_tune.core.signals import signal_name
from fsdp_tune.core.user_cache import compiler_variables

if TYPE_CHECKING:
    import psutil

_STARTING = threading.Lock()


@dataclass(eq=False, slots=True)
class _Pool:
    """The children of the threads of one `threads` block. A script may run several jobs, each in a thread of
    its own."""

    running: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])
    is_ending: bool = False
    """Set after an exception: a child that a thread started now would outlive `end` for all others."""


class _OfThread(threading.local):
    pool: _Pool | None = None


_OF_THREAD = _OfThread()


_POOLS: list[_Pool] = []


QUIET_LIBRARIES = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of a child that loads models, whose output is a protocol."""


def start(command: Sequence[str], environment: Mapping[str, str], **pipes: Any) -> subprocess.Popen[str]:
    """Start a child in a separate session: Ctrl-C reaches only the command, which calls `end`. If the command
    is killed, the kernel kills the child. `pipes` are stdin, stdout and stderr of `Popen`."""
    with _STARTING:
        pool = _OF_THREAD.pool
        if pool is not None and pool.is_ending:
            raise InterruptedError("the command is ending, and starts no other process")
        variables = {**environment, **compiler_variables()}
        child = subprocess.Popen(
            ends_with_parent(list(command)), text=True, env=variables, start_new_session=True, **pipes
        )
        if pool is not None:
            pool.running.append(child)
    return child


END_SECONDS = 60.0
"""Limit of the wait for killed processes: the kernel cannot end one that is in a call of a driver."""


def end(child: subprocess.Popen[str], below: Iterable[psutil.Process] = ()) -> None:
    """Kill a child and everything below it, and return when they are gone, with what they held. A child that
    was waited for is only removed from the list.

    A child that has ended without that may have left children of its own, which are killed: its id is not
    free before it is waited for.
    `below`: `descendants` of earlier, since those in sessions of their own are not found any more when it has
    ended.
    """
    release(child)
    if child.returncode is None:
        left = [*below, *descendants(child)]
        # PermissionError: macOS, for a group of zombies
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        _kill(left)


def descendants(child: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes below a child, also those in sessions of their own; [] when it has ended."""
    import psutil

    try:
        return psutil.Process(child.pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes and wait until they are gone, `END_SECONDS` at most. Their parents have ended, and may
    leave them as zombies."""
    import psutil

    def is_left(process: psutil.Process) -> bool:
        try:  # while its other threads end, a process that is a zombie still holds memory of devices
            return process.is_running() and (
                process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
            )
        except psutil.Error:
            return False

    left, limit = list(processes), time.monotonic() + END_SECONDS
    for each in left:
        with contextlib.suppress(psutil.Error):
            each.kill()
    while (left := [each for each in left if is_left(each)]) and time.monotonic() < limit:
        time.sleep(0.01)


def has_ended(child: subprocess.Popen[str]) -> bool:
    """Return whether a child has ended, without waiting for it, so that `end` also kills what it has left."""
    if child.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # waited for elsewhere
        return child.poll() is not None


def release(child: subprocess.Popen[str]) -> None:
    """Leave the end of a child to another owner."""
    with _STARTING:
        for pool in _POOLS:
            if child in pool.running:
                pool.running.remove(child)


def describe_failure(exit_code: int, errors: str) -> str:
    """Describe how a child failed: the signal that killed it, or the last line of its error output.

    Raises: usage error if a library of the child refused an environment variable.
    """
    if exit_code < 0:
        return f"its process was killed by {signal_name(-exit_code)}"
    raise_if_refused(errors)
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"its process ended with exit code {exit_code}"


class JsonChild:
    """A child that reads lines from its standard input and answers in lines of JSON objects. It ends with the
    block, or by `close`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the child
        try:
            self._child = start(
                command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except BaseException:
            self._errors.close()
            raise
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input, self._output = self._child.stdin, self._child.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, line: str, *, is_last: bool = False) -> None:
        """Send a line. If the child has ended, nothing is sent: `receive` returns None, and `failure` the
        reason."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(line + "\n")
            self._input.flush()
            if is_last:
                self._input.close()

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next line; None if the child has ended."""
        line = self._output.readline()
        return json.loads(line) if line else None

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        return self._child.wait()

    def failure(self) -> str:
        """Wait for the end, and describe it by `describe_failure`."""
        code = self.wait()
        self._errors.seek(0)
        return describe_failure(code, self._errors.read())

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGINT)

    def close(self) -> None:
        """Kill the child and its own children, also during an answer."""
        end(self._child)
        for pipe in (self._input, self._output, self._errors):
            with contextlib.suppress(BrokenPipeError):  # what the child did not read
                pipe.close()


@contextlib.contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads that wait for children. An exception in the block (Ctrl-C, a signal, an error
    in the recipe) first ends the children and lets the threads start no others, since leaving the block waits
    for the threads, and these wait for the children."""
    pool = _Pool()
    with _STARTING:
        _POOLS.append(pool)
    try:
        with ThreadPoolExecutor(
            max_workers=number, initializer=setattr, initargs=(_OF_THREAD, "pool", pool)
        ) as executor:
            try:
                yield executor
            except BaseException:
                with _STARTING:
                    pool.is_ending = True
                    running = list(pool.running)
                for child in running:
                    end(child)
                raise
    finally:
        with _STARTING:
            _POOLS.remove(pool)
