"""The launcher and the ranks as processes: who is there, who is gone, and ending them for good."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

KILL_WAIT_SECONDS = 5.0


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie too: it holds nothing any more. psutil compares start times, so a reused pid is not taken for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_rank_of(run: Path, rank: int, pid: int) -> bool:
    """Whether a pid is that rank's still: pids are reused, RANK and the run directory, under whatever name, are not."""
    try:
        process = psutil.Process(pid)
        named = Path(process.cwd(), *process.cmdline()[-1:])
        return is_alive(process) and process.environ().get("RANK") == str(rank) and named.resolve() == run.resolve()
    except psutil.Error:
        return False


def find_ranks(launcher_pid: int, wanted: range) -> dict[int, psutil.Process]:
    """Global rank → process, among the launcher's children; torchrun's agent gives each its RANK."""
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
        if rank in wanted:
            found[rank] = child
    return found


def kill_for_good(processes: Iterable[psutil.Process]) -> list[int]:
    """SIGKILL to each process, its descendants and its process group; returns the pids that did not die.

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
        if process.is_running() and os.getpgid(process.pid) == process.pid:  # ranks lead a session of their own
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        pass
