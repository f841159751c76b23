"""Requests to stop: signals and `launch.max_runtime`. The ranks agree on the step, save and exit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from types import FrameType

from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitReason
from fsdp_tune.core.signals import STOP_SIGNALS, without_ignored

# Ordered: if ranks differ, the largest code wins.
STOP_REASONS: dict[int, ExitReason] = {
    1: ExitReason.MAX_RUNTIME,
    2: ExitReason.PREEMPTED,
    3: ExitReason.INTERRUPTED,
    4: ExitReason.FAILED,
}


SAVE_AND_FAIL = 4
"""What only this rank can no longer do (write metrics.jsonl) ends the run, once all have saved."""


# SIGUSR2 is a request for stacks (`worker.__main__`).
_REQUEST_OF_SIGNAL = {
    number: 3 if number == signal.SIGINT else 2 for number in STOP_SIGNALS if number != signal.SIGUSR2
}


# One Ctrl-C reaches a rank several times: from the terminal, from the launcher, from its agent.
ECHO_SECONDS = 2.0


MARGIN_SECONDS = 5.0
"""Reserve for unmeasured work: writing the outcome, ending the processes."""


def ignore_stop_signals(_worker: int) -> None:
    """Ignore stop signals in loader processes: a launcher signals the process group of a rank, and the last
    steps still need batches."""
    for number in _REQUEST_OF_SIGNAL:
        signal.signal(number, signal.SIG_IGN)


def forget_loader_processes() -> None:
    """Let the end of a process of the data loader raise nothing any more. Torch's handler of SIGCHLD raises
    wherever this process is: also while it reports how it has ended."""
    while True:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return
        except RuntimeError:  # of that handler, which a signal in this moment has called
            continue


def end_loader_processes() -> None:
    """Kill the processes of the data loader at the end of a rank. Waiting for them, as the interpreter does,
    would take for ever: it sends SIGTERM, which they ignore."""
    forget_loader_processes()
    for child in multiprocessing.active_children():
        child.kill()


class StoppedEarly(BaseException):
    """A signal before there was anything to save: exit at once."""

    def __init__(self, reason: ExitReason) -> None:
        super().__init__(reason)
        self.reason = reason


def seconds_to_stop(step_seconds: float, evaluation_seconds: float, save_seconds: float) -> float:
    """Return how long before its deadline a rank must vote to stop, given the slowest step, evaluation and
    save so far.

    A vote is read one step after it is cast, and a rank that does not vote now votes one step later: two
    steps. An evaluation may be due in between. The last save may have to wait for one in flight.
    """
    return MARGIN_SECONDS + 2 * step_seconds + evaluation_seconds + 2 * save_seconds


class StopRequest:
    """The stop requested of this rank: 0 for none, else a key of STOP_REASONS.

    Until `training` is set, the first signal ends the process at once. `deadline` is on the monotonic clock.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._signal = 0
        self._first: float | None = None
        self._deadline = deadline
        self.training = False
        self.reserve_seconds = MARGIN_SECONDS
        """How long before the deadline to vote for the stop; see `seconds_to_stop`."""

    def install(self) -> None:
        for number in without_ignored(_REQUEST_OF_SIGNAL):
            signal.signal(number, self._handle)

    def end(self) -> None:
        """Ignore signals from now on: this rank is about to exit, and its outcome must still be written."""
        for number in _REQUEST_OF_SIGNAL:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGXCPU:  # the kernel repeats it each second; no one asks for a second time
            signal.signal(number, signal.SIG_IGN)
            with contextlib.suppress(OSError):
                os.write(2, b"SIGXCPU: the CPU time of `ulimit -t` is used up; saving and stopping\n")
        elif self._first is not None and now - self._first > ECHO_SECONDS:
            # A second signal: stop without saving. Older checkpoints are kept.
            os._exit(EXIT_CODE_OF_REASON[STOP_REASONS[_REQUEST_OF_SIGNAL[signal.Signals(number)]]])
        is_first = self._first is None
        if number != signal.SIGXCPU or not self.training:
            self._first = self._first or now
        self._signal = max(self._signal, _REQUEST_OF_SIGNAL[signal.Signals(number)])
        if is_first and not self.training:
            # Python prints and forgets what is raised in a finalizer, and a library may catch everything: the
            # request stays, and the training that then begins saves and stops.
            raise StoppedEarly(STOP_REASONS[self._signal])

    def code(self) -> int:
        late = self._deadline is not None and time.monotonic() > self._deadline - self.reserve_seconds
        return max(self._signal, 1 if late else 0)
