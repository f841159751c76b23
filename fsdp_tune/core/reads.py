"""Record what a process reads, so that its answer can be reused while none of that has changed.

An audit hook sees each file that Python opens and each directory that it lists, a wrapper of `os.stat` also
the files that it looks for and does not find. Libraries in C open files unseen: `include` adds a file or a
directory with everything in it. A process that connects to another machine or starts a process has read what
cannot be compared later, so its answer is not reusable.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, cast

_NOT_COMPARABLE = {
    *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"),
    *("subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"),
}
_WITHOUT_EFFECT = {os.devnull, "/proc/stat", "/proc/self/maps"}
"""Read when libraries are imported, different each time, and not used."""
_KERNEL = ("/proc/", "/sys/")
"""Files without size and times of their own: their contents are compared."""
_REPLACED = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_MARGIN_NS = 2_000_000_000
"""More than the coarsest times of file systems: a file that changed this recently can change again and keep
its time."""

_stat = os.stat


class Reads:
    """What is read in the block. One at a time in a process.

    `states`: path → its state when it was read first. The path of a directory whose entries were read ends in
    `/`. `started_ns`: when the process was started, in ns since the epoch, if it read files before the block
    that are included later.
    """

    def __init__(self, started_ns: int | None = None) -> None:
        self.states: dict[str, str] = {}
        self._is_comparable = True
        self._is_recording = False
        self._started_ns = time.time_ns() if started_ns is None else started_ns
        self._changed_ns = 0
        """When the last of these files changed."""

    def __enter__(self) -> Self:
        self._is_recording = True
        sys.addaudithook(self._hook)  # cannot be removed
        os.stat = self._recorded_stat
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.stat = _stat
        self._is_recording = False
        # Imports open compiled files, and look for sources and for other modules of the name without
        # `os.stat`.
        for module in list(sys.modules.values()):
            names: dict[str, Any] = getattr(module, "__dict__", {})
            self._add(names.get("__file__"))
            for folder in names.get("__path__") or ():
                self._add(folder, is_listed=True)
        for folder in sys.path:
            self._add(folder, is_listed=True)

    @property
    def is_reusable(self) -> bool:
        """Whether another process would read the same while `digest_of` these paths is the digest of
        `states`."""
        return self._is_comparable and self._changed_ns < self._started_ns - _MARGIN_NS

    def include(self, path: str) -> None:
        """Record a file, a directory with everything in it, or that nothing has this name."""
        self._add(path)
        for folder, _, names in os.walk(path):
            self._add(folder, is_listed=True)
            for name in names:
                self._add(f"{folder}/{name}")

    def digest(self) -> str:
        return _digest(self.states.items())

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_recording:
            return
        if event in _NOT_COMPARABLE:
            self._is_comparable = False
        elif event in ("os.listdir", "os.scandir"):
            self._add(arguments[0] or ".", is_listed=True)
        elif event == "open" and not arguments[2] & _REPLACED:
            self._add(arguments[0])

    def _recorded_stat(self, path: Any, *arguments: object, **options: object) -> os.stat_result:
        # psutil asks which files of a process the kernel has
        is_own = isinstance(path, str) and path.startswith(f"/proc/{os.getpid()}/")
        if options.get("dir_fd") is None and not is_own:
            self._add(path)
        return _stat(path, *arguments, **options)

    def _add(self, path: object, *, is_listed: bool = False) -> None:
        if not isinstance(path, str | bytes | os.PathLike):  # a descriptor, of a file that was opened by name
            return
        text = os.fsdecode(cast("str | bytes", os.fspath(path)))
        name = os.path.abspath(text) + "/" * is_listed  # noqa: PTH100  the state is that of the file that a link leads to
        # Compiled code is ignored: its source is recorded, and Python compiles that again when it changes.
        if name in self.states or name in _WITHOUT_EFFECT or "/__pycache__/" in name:
            return
        self.states[name] = ""  # what follows opens files too
        self.states[name], changed_ns = _state(name)
        self._changed_ns = max(self._changed_ns, changed_ns)


def digest_of(paths: Iterable[str]) -> str:
    """Return the digest of paths with their present states."""
    return _digest((path, _state(path)[0]) for path in paths)


def _digest(states: Iterable[tuple[str, str]]) -> str:
    found = hashlib.sha256()
    for path, state in sorted(states):
        found.update(f"{path}\0{state}\0".encode(errors="surrogateescape"))
    return found.hexdigest()


def _state(path: str) -> tuple[str, int]:
    """Return what changes with a file's content or a directory's entries, and when a file last changed, in ns
    since the epoch.

    The time of the last write can be set back; that of the last change of the inode, which is part of the
    state, cannot.
    """
    try:
        found = _stat(path)
        if path.endswith("/"):
            with os.scandir(path) as entries:
                return _digest((entry.name, str(entry.is_dir())) for entry in entries), 0
        if stat.S_ISDIR(found.st_mode):
            return "directory", 0
        if path.startswith(_KERNEL) and stat.S_ISREG(found.st_mode):
            with open(path, "rb") as file:
                return hashlib.sha256(file.read()).hexdigest(), 0
    except (OSError, ValueError) as error:  # a text that cannot be a path
        return f"{type(error).__name__} {getattr(error, 'errno', '')}", 0
    state = (
        f"{found.st_dev} {found.st_ino} {found.st_mode} {found.st_size} {found.st_mtime_ns} "
        f"{found.st_ctime_ns}"
    )
    return state, max(found.st_mtime_ns, found.st_ctime_ns)
