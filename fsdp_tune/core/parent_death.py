"""Bind a process to its parent, so that no launcher or rank outlives its command (Linux).

    python -m fsdp_tune.core.parent_death PARENT_PID COMMAND…

requests from the kernel to kill this process when its parent dies, then executes COMMAND; the request
survives exec. This is a separate program because `preexec_fn` is not safe in a process with threads. Ranks
call `die_with_launcher` first of all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER_PID = "FSDP_TUNE_LAUNCHER_PID"
"""Set for COMMAND to its own pid, so that the ranks that it starts know whom they belong to."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """Let the kernel send SIGKILL to this process when the THREAD that started it ends; that thread must stay
    alive.

    `parent_pid`, if known, covers the time between fork and this call: for a parent that has already ended,
    no signal is sent. On other systems than Linux this does nothing, and only the supervisor ends the ranks.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_launcher() -> None:
    """Let the kernel end this rank with its parent, and end it now if its launcher died between starting it
    and this call.

    No signal tells of a parent that died before the request. A launcher that a user starts by hand
    sets no `LAUNCHER_PID`, and its ranks are not checked.
    """
    die_with_parent()
    launcher = os.environ.get(LAUNCHER_PID, "")
    if sys.platform == "linux" and launcher.isdecimal() and int(launcher) not in _ancestors():
        os.kill(os.getpid(), signal.SIGKILL)


def _ancestors() -> list[int]:
    """Return the pids of the processes above this one."""
    found = [os.getppid()]
    while found[-1] > 1:
        try:
            with open(f"/proc/{found[-1]}/status", encoding="ascii", errors="replace") as status:
                found.append(next(int(line.split()[1]) for line in status if line.startswith("PPid:")))
        except OSError:  # it has just ended; who is above it now does not matter
            break
    return found


def ends_with_parent(command: list[str], python: str = sys.executable) -> list[str]:
    """Return `command`, bound to the calling process. `-I -S` and no import of the package: the overhead is
    15 ms."""
    return [python, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]  # noqa: PTH100  no pathlib: this program imports as little as possible


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # A scheduler may send these to every process of the job; the command, which gets them too, ends its
    # children. Ranks have handlers.
    for name in ("SIGUSR2", "SIGXCPU", "SIGPWR"):
        if hasattr(signal, name):
            signal.signal(signal.Signals[name], signal.SIG_IGN)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.execv(sys.argv[2], sys.argv[2:])
