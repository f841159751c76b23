"""Signals become a wish to stop; the ranks agree on the step, save, and leave."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from fsdp_tune.errors import EXIT_CODE_OF_REASON, ExitReason

# Ordered: the largest wish wins where ranks differ.
WISHES: dict[int, ExitReason] = {
    1: ExitReason.MAX_RUNTIME,
    2: ExitReason.PREEMPTED,
    3: ExitReason.INTERRUPTED,
    4: ExitReason.FAILED,
}
SAVE_AND_FAIL = 4
"""What only this rank can no longer do (write metrics.jsonl) ends the run, once all have saved."""
_WISH_OF_SIGNAL = {signal.SIGTERM: 2, signal.SIGUSR1: 2, signal.SIGHUP: 2, signal.SIGINT: 3}
# One Ctrl-C reaches a rank several times: from the terminal, from the launcher, from its agent.
ECHO_SECONDS = 2.0


def ignore_stop_signals(_worker: int) -> None:
    """For the loader's processes: a launcher signals a rank's whole process group, and the batches of a last save are still needed."""
    for number in _WISH_OF_SIGNAL:
        signal.signal(number, signal.SIG_IGN)


class StoppedEarly(BaseException):
    """A signal came before there was anything to save: leave at once."""

    def __init__(self, reason: ExitReason) -> None:
        super().__init__(reason)
        self.reason = reason


class StopWish:
    """What this rank was told: 0 to go on, else a key of WISHES. Until `training` is set, a signal ends the process at once.

    `deadline` is on the monotonic clock.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._signal = 0
        self._first: float | None = None
        self._deadline = deadline
        self.training = False
        self.reserve_seconds = 5.0
        """How long before the deadline to stop: grows to twice the longest save seen."""

    def install(self) -> None:
        for number in _WISH_OF_SIGNAL:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > ECHO_SECONDS:
            # Asked twice: the user no longer wants the save. Older checkpoints stay as they are.
            os._exit(EXIT_CODE_OF_REASON[WISHES[_WISH_OF_SIGNAL[signal.Signals(number)]]])
        if self._first is None and not self.training:
            self._first = now
            raise StoppedEarly(WISHES[_WISH_OF_SIGNAL[signal.Signals(number)]])
        self._first = self._first or now
        self._signal = max(self._signal, _WISH_OF_SIGNAL[signal.Signals(number)])

    def code(self) -> int:
        late = self._deadline is not None and time.monotonic() > self._deadline - self.reserve_seconds
        return max(self._signal, 1 if late else 0)
