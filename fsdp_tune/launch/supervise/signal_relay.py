"""Pass a stop signal on to the ranks: through the launcher, whose agent sends it to each, or past a launcher
that does not run.

A launcher that is stopped, traced or in the kernel leaves the signal pending, and its ranks would train on to
the end.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

from fsdp_tune.core.clocks import LIVED

PENDING_SECONDS = 3.0
"""A launcher that runs takes a signal at once, and one on a busy machine within this time."""


class SignalRelay:
    """The first signal to a launch. `send` is safe in a signal handler; call `help` at each poll after it."""

    def __init__(self, launcher: subprocess.Popen[str]) -> None:
        self.launcher = launcher
        self._number: int | None = None
        self._waits_since: float | None = None
        self._is_continued = self._is_past_launcher = False

    def send(self, number: int) -> None:
        if self._number is None:
            self._number = number
            self.launcher.send_signal(number)

    def help(self, ranks: Iterable[psutil.Process]) -> str | None:
        """Bring a signal that the launcher does not take to the ranks. Returns a message about it, or None.

        A stopped launcher is continued first. Of two deliveries, a rank would take the later one for a second
        signal and end without saving, so a launcher that was passed over is stopped for good.
        """
        number, now = self._number, LIVED.now()
        if number is None or self._is_past_launcher:
            return None
        is_left, is_stopped = is_pending(self.launcher.pid, number), _is_stopped(self.launcher.pid)
        if not is_left and not is_stopped:
            self._waits_since = None
            return None
        self._waits_since = now if self._waits_since is None else self._waits_since
        if now - self._waits_since < PENDING_SECONDS:
            return None
        name, was_continued = signal.Signals(number).name, self._is_continued
        # it may have taken the signal, and been stopped before it passed it on
        if is_stopped and not (was_continued and is_left):
            self._is_continued, self._waits_since = True, now
            self.launcher.send_signal(signal.SIGCONT)
            text = (
                f"the launcher (pid {self.launcher.pid}) was stopped; it is continued, to pass {name} on "
                "to the ranks"
            )
            return None if was_continued else text
        self._is_past_launcher = True
        self.launcher.send_signal(signal.SIGSTOP)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)
        return (
            f"the launcher (pid {self.launcher.pid}) does not take {name}, which is sent to the ranks instead"
        )


def is_pending(pid: int, number: int) -> bool:
    """Return whether a process has been sent a signal that it has not taken yet; False where the kernel does
    not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    masks = (line.split()[1] for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
