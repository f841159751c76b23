"""Signals that ask a command to stop, and those that its caller made it ignore."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from fsdp_tune.core.errors import ExitCode, Problem

STOP_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGXCPU", "SIGPWR")
    if hasattr(signal, name)
)
"""Signals that ask a command to end: of people, schedulers (Grid Engine: SIGUSR2), limits of CPU time
(SIGXCPU), power supplies."""

# `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT and SIGQUIT for a command in the
# background.
_IGNORED_BY_CALLERS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def without_ignored(numbers: Iterable[int]) -> list[signal.Signals]:
    """Return the signals that this process may handle: all except those that were ignored when it started."""
    return [
        signal.Signals(number)
        for number in numbers
        if number not in _IGNORED_BY_CALLERS or signal.getsignal(number) is not signal.SIG_IGN
    ]


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number: most of those of real time have no name in Python."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


class StoppedBySignal(BaseException):
    """A scheduler's signal while no rank was running. As KeyboardInterrupt it is not an Exception, so that
    nothing that handles errors takes it for one of its own."""

    exit_code = ExitCode.PREEMPTED

    def __init__(self, number: int) -> None:
        self.number = number
        message = f"stopped by {signal_name(number)} while no rank was running"
        self.problems = (Problem("stopped", message),)
        super().__init__(message)


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  signature of a signal handler
    if number == signal.SIGXCPU:  # the kernel repeats it each second
        signal.signal(number, signal.SIG_IGN)
    raise StoppedBySignal(number)


@contextlib.contextmanager
def stop_signals_raise() -> Iterator[bool]:
    """Raise StoppedBySignal on a stop signal other than Ctrl-C. The supervisor of ranks has its own handlers.

    Yields whether this is the outermost of such contexts. Does nothing outside the main thread, where Python
    runs no signal handlers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in without_ignored(STOP_SIGNALS) if is_main and number != signal.SIGINT]
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield _stop not in before.values()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupts_call(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first SIGINT, which raises nothing, so that no line that is being read is lost; the
    next raises KeyboardInterrupt.

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
