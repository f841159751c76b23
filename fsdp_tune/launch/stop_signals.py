"""Stop signals that the caller of a command has switched off."""

from __future__ import annotations

import signal
from collections.abc import Iterable

# `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT for a command in the background.
_SWITCHED_OFF_BY_CALLERS = (signal.SIGHUP, signal.SIGINT)


def heeded(numbers: Iterable[int]) -> list[signal.Signals]:
    """Return the signals that this process may handle: all but those that were ignored when it started."""
    return [
        signal.Signals(number)
        for number in numbers
        if number not in _SWITCHED_OFF_BY_CALLERS or signal.getsignal(number) is not signal.SIG_IGN
    ]
