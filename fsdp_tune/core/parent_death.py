"""Tie a process to its parent, so that no launcher and no rank outlives the command that it belongs to (Linux).

    python -m fsdp_tune.core.parent_death PARENT_PID COMMAND…

asks the kernel to kill this process when its parent dies, then becomes COMMAND; the request survives exec. A module of
its own because `preexec_fn` is not safe in a process with threads. Ranks call `die_with_parent` as their first act.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int | None = None) -> None:
    """The kernel sends SIGKILL to this process when the THREAD that started it ends; the starter must live on.

    `parent_pid`, where the caller knows it, closes the gap between fork and this call: a parent that is gone already
    sends nothing. On other systems than Linux this does nothing, and the supervisor alone ends the ranks.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def ends_with_parent(command: list[str], python: str = sys.executable) -> list[str]:
    """Return `command` as one that ends with the calling process. `-I -S` and no import of the package: it adds 15 ms."""
    return [python, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]  # noqa: PTH100  no pathlib here: this imports as little as it can


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
