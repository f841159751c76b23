"""Find, check and kill the processes of a launch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

KILL_WAIT_SECONDS = 5.0


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs and is not a zombie. psutil compares start times, so a reused pid does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_rank_of(run: Path, rank: int, pid: int) -> bool:
    """Return whether a pid still belongs to a rank of the run: pids are reused, but not with the same RANK and run directory."""
    try:
        process = psutil.Process(pid)
        named = Path(process.cwd(), *process.cmdline()[-1:])
        return is_alive(process) and process.environ().get("RANK") == str(rank) and named.resolve() == run.resolve()
    except psutil.Error:
        return False


def find_ranks(launcher_pid: int, ranks: range) -> dict[int, psutil.Process]:
    """Return global rank → process for the launcher's children, which have RANK from torchrun's agent."""
    found: dict[int, psutil.Process] = {}
    try:
        children = psutil.Process(launcher_pid).children()
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            rank = int(child.environ().get("RANK", "-1"))
        except (psutil.Error, ValueError):  # just gone, or not yet past exec
            continue
        if rank in ranks:
            found[rank] = child
    return found


def kill_for_good(processes: Iterable[psutil.Process]) -> list[int]:
    """Send SIGKILL to each process, its descendants and its process group. Returns the pids that did not die.

    A process in uninterruptible sleep (D state: a dead file server, a wedged driver) outlives SIGKILL.
    """
    everyone: set[psutil.Process] = set()
    for process in processes:
        everyone.add(process)
        try:
            everyone.update(process.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    for process in everyone:
        _kill(process)
    deadline = time.monotonic() + KILL_WAIT_SECONDS
    while (alive := [process for process in everyone if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(process.pid for process in alive)


def _kill(process: psutil.Process) -> None:
    try:
        if process.is_running() and os.getpgid(process.pid) == process.pid:  # each rank leads its own session
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        pass
