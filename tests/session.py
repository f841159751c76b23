"""What the processes of one test session share: a folder, and values that are made once for all of them.

`scripts/test` runs tests in two processes. The process that started them exports `TESTS_FOLDER`, the folder
of the session; whoever needs something there first makes it, and the others wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = "TESTS_FOLDER"
OWNER = "TESTS_OWNER_PID"
"""The process that made the folder and removes it; what serves the session ends when this process has
ended."""


def begin() -> None:
    """Make the folder of the session, unless this process belongs to one already."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="fsdp-tune-tests-")
        os.environ[OWNER] = str(os.getpid())
        atexit.register(end)


def end() -> None:
    """Remove the folder, in the process that made it."""
    if os.environ.get(OWNER) == str(os.getpid()):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)
        del os.environ[OWNER]


def folder() -> Path:
    begin()  # outside pytest, for a suite with its own command
    return Path(os.environ[FOLDER])


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Hold the lock `name`: other processes of the session wait here."""
    path = folder() / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the path `name` of the session, which `make` creates the first time.

    Raises: what `make` raises; the next caller tries again.
    """
    path = folder() / name
    mark = path.with_name(f"{path.name}.made")
    with alone(name):
        if not mark.exists():
            shutil.rmtree(path, ignore_errors=True)
            make(path)
            mark.touch()
    return path
