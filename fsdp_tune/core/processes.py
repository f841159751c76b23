"""Child processes of a command, which end when the command ends, even if it is killed; and the directory that compilers use in them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem
from fsdp_tune.core.parent_death import ends_with_parent
from fsdp_tune.core.refused_variables import raise_if_refused
from fsdp_tune.core.user_cache import compiler_variables

if TYPE_CHECKING:
    import psutil

_STARTING = threading.Lock()


@dataclass(eq=False, slots=True)
class _Pool:
    """The children of the threads of one `threads` block. A script may run several jobs, each in a thread of its own."""

    running: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])
    is_ending: bool = False
    """Set after an exception: a child that a thread started now would outlive `end` for all others."""


class _OfThread(threading.local):
    pool: _Pool | None = None


_OF_THREAD = _OfThread()


_POOLS: list[_Pool] = []


QUIET_LIBRARIES = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of a child that loads models, whose output is a protocol."""


def start(command: Sequence[str], environment: Mapping[str, str], **pipes: Any) -> subprocess.Popen[str]:
    """Start a child in a separate session: Ctrl-C reaches only the command, which calls `end`. If the command is killed, the kernel
    kills the child. `pipes` are stdin, stdout and stderr of `Popen`."""
    with _STARTING:
        pool = _OF_THREAD.pool
        if pool is not None and pool.is_ending:
            raise InterruptedError("the command is ending, and starts no other process")
        variables = {**environment, **compiler_variables()}
        child = subprocess.Popen(ends_with_parent(list(command)), text=True, env=variables, start_new_session=True, **pipes)
        if pool is not None:
            pool.running.append(child)
    return child


END_SECONDS = 60.0
"""Limit of the wait for killed processes: the kernel cannot end one that is in a call of a driver."""


def end(child: subprocess.Popen[str], below: Iterable[psutil.Process] = ()) -> None:
    """Kill a child and everything below it, and return when they are gone, with what they held. A child that was waited for is only removed
    from the list.

    A child that has ended without that may have left children of its own, which are killed: its id is not free before it is waited for.
    `below`: `descendants` of earlier, since those in sessions of their own are not found any more when it has ended.
    """
    release(child)
    if child.returncode is None:
        left = [*below, *descendants(child)]
        with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, for a group of zombies
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
    """Kill processes and wait until they are gone, `END_SECONDS` at most. Their parents have ended, and may leave them as zombies."""
    import psutil

    def is_left(process: psutil.Process) -> bool:
        try:  # while its other threads end, a process that is a zombie still holds memory of devices
            return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
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
        return f"its process was killed by {signal.Signals(-exit_code).name}"
    raise_if_refused(errors)
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"its process ended with exit code {exit_code}"


class JsonChild:
    """A child that reads lines from its standard input and answers in lines of JSON objects. It ends with the block, or by `close`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the child
        try:
            self._child = start(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
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
        """Send a line. If the child has ended, nothing is sent: `receive` returns None, and `failure` the reason."""
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
    """Yield a pool of threads that wait for children. An exception in the block (Ctrl-C, a signal, an error in the recipe) first ends the
    children and lets the threads start no others, since leaving the block waits for the threads, and these wait for the children."""
    pool = _Pool()
    with _STARTING:
        _POOLS.append(pool)
    try:
        with ThreadPoolExecutor(max_workers=number, initializer=setattr, initargs=(_OF_THREAD, "pool", pool)) as executor:
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


# ---- What the caller of a command may have closed or ignored.


def open_standard_streams() -> None:
    """Open each of descriptors 0 to 2 that the caller closed on /dev/null, for this process and its children.

    Shells (`>&- 2>&-`) and some service managers start commands like that. Otherwise the next file or socket that
    is opened gets the number, and lines for the screen are written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:  # Python makes no stream of a closed descriptor
            stream = os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)


def continue_in_utf8() -> None:
    """Replace this process by itself in Python's UTF-8 mode if it encodes paths otherwise, as under `LC_ALL=C PYTHONUTF8=0`.

    Recipes, manifests and messages are UTF-8, so a path that is not ASCII could be neither read from a recipe nor printed.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for children too
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def reset_inherited() -> None:
    """Undo what a caller may have changed and every command relies on.

    Under an ignored SIGCHLD the kernel forgets how children ended; a stop signal that is blocked never arrives. Python of `PYTHONINSPECT`
    waits for someone to type when a program has ended, and that of `PYTHONOPTIMIZE=2` has no docstrings, from which transformers makes
    those of its models. The program is executed again without them. Children exchange UTF-8 with this process, whatever PYTHONIOENCODING
    is for its own streams. A umask that takes rights from the owner of a file makes directories in which nothing can be written.
    """
    if os.environ.pop("PYTHONINSPECT", None) or os.environ.pop("PYTHONOPTIMIZE", None):
        os.execv(sys.executable, sys.orig_argv)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.pop("PYTHONIOENCODING", None)
    os.umask(os.umask(0o077) & 0o077)


# ---- Stop signals, and those that the caller of a command made it ignore.

STOP_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGXCPU", "SIGPWR")
    if hasattr(signal, name)
)
"""Signals that ask a command to end: of people, schedulers (Grid Engine: SIGUSR2), limits of CPU time (SIGXCPU), power supplies."""

# `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT and SIGQUIT for a command in the background.
_IGNORED_BY_CALLERS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def without_ignored(numbers: Iterable[int]) -> list[signal.Signals]:
    """Return the signals that this process may handle: all except those that were ignored when it started."""
    return [
        signal.Signals(number) for number in numbers if number not in _IGNORED_BY_CALLERS or signal.getsignal(number) is not signal.SIG_IGN
    ]


class StoppedBySignal(FsdpTuneError):
    """A scheduler's signal while no rank was running (exit 143)."""

    def __init__(self, number: int) -> None:
        self.number = number
        name = signal.Signals(number).name
        super().__init__(Problem("stopped", f"stopped by {name} while no rank was running"), exit_code=ExitCode.PREEMPTED)


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Raise StoppedBySignal on a stop signal other than Ctrl-C. The supervisor of ranks has its own handlers.

    Does nothing outside the main thread, where Python runs no signal handlers.
    """

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  signature of a signal handler
        if number == signal.SIGXCPU:  # the kernel repeats it each second
            signal.signal(number, signal.SIG_IGN)
        raise StoppedBySignal(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in without_ignored(STOP_SIGNALS) if is_main and number != signal.SIGINT]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupts_call(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first SIGINT, which raises nothing, so that no line that is being read is lost; the next raises KeyboardInterrupt.

    Does nothing outside the main thread, and if SIGINT is ignored.
    """
    is_stopping = False

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  signature of a signal handler
        nonlocal is_stopping
        if is_stopping:
            raise KeyboardInterrupt
        is_stopping = True
        stop()

    if threading.current_thread() is not threading.main_thread() or not without_ignored([signal.SIGINT]):
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- Ports

LOOPBACK_SECONDS = 5.0


def loopback_refusal() -> OSError | None:
    """Return why processes of this machine cannot connect to each other on 127.0.0.1; None if they can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=LOOPBACK_SECONDS):
            return None
    except OSError as error:
        return error


def port_refusal(port: int) -> OSError | None:
    """Return why no process can listen on a port of this machine, in IPv4 or in IPv6, as torch's store does; None if one can."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # a machine without addresses of the family
                return error
    return None
