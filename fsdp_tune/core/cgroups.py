"""Limits of the control groups of this process: memory, processes and CPU time, by cgroup v1, v2, and both at
once (hybrid).

A limit holds for a group and all groups below it, so the least on the way from this process's group to the
root of its mount counts. `/proc/self/cgroup` has the group in each hierarchy, `/proc/self/mountinfo` where
each is mounted and which group is the root there: in a container that is often its own. A cpuset is not read:
the kernel applies it to `os.sched_getaffinity`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

OWN_GROUPS, MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page below 2^63."""


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A limit of a control group, and the file that has it (`memory.max`)."""

    value: int
    file: str


def memory_limit() -> GroupLimit | None:
    """Return the limit of memory, in bytes; None if there is none."""
    found = _least("memory", {"memory.max": _number, "memory.limit_in_bytes": _number})
    return found if found is not None and found.value < _UNLIMITED_BYTES else None


def process_limit() -> GroupLimit | None:
    """Return the largest number of processes and threads; None if it is not limited."""
    return _least("pids", {"pids.max": _number})


def core_limit() -> GroupLimit | None:
    """Return the limit of CPU time, in cores, rounded up; None if it is not limited.

    `docker run --cpus` and Kubernetes limit the time and leave all cores visible: threads for each of them
    would wait for it in turns.
    """
    return _least("cpu", {"cpu.max": _cores_of_max, "cpu.cfs_quota_us": _cores_of_quota})


def _least(controller: str, readers: dict[str, Callable[[Path], int | None]]) -> GroupLimit | None:
    found = [
        GroupLimit(value, name)
        for folder in _folders(controller)
        for name, read in readers.items()
        if (value := read(folder / name)) is not None
    ]
    return min(found, key=lambda limit: limit.value, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's group and of each visible group around it, in each hierarchy that
    may have the controller."""
    mounts = list(_mounts(controller))
    for is_v2, path in _own_groups(controller):
        group = PurePosixPath(path)
        visible = [
            (mount.point, group.relative_to(mount.root))
            for mount in mounts
            if mount.is_v2 is is_v2 and _contains(mount.root, group)
        ]
        # If none shows the group, the mounts are those of a container that sees its own group as their root.
        for point, inside in visible or [
            (mount.point, PurePosixPath()) for mount in mounts if mount.is_v2 is is_v2
        ]:
            yield from (point / part for part in (inside, *inside.parents))


def _contains(root: PurePosixPath, group: PurePosixPath) -> bool:
    """Return whether a group is below another one. A path with `..` is outside the namespace of this
    process."""
    return group.is_relative_to(root) and ".." not in group.parts


def _own_groups(controller: str) -> Iterator[tuple[bool, str]]:
    """Yield (whether it is of version 2, path) of this process's group; the hierarchy of version 2 has no
    number and no controllers."""
    for line in _lines(OWN_GROUPS):
        match line.split(":", 2):
            case ["0", "", path]:
                yield True, path
            case [_, names, path] if controller in names.split(","):
                yield False, path
            case _:
                pass


class _Mount(NamedTuple):
    """A mounted hierarchy of control groups."""

    is_v2: bool
    root: PurePosixPath
    """The group that the mount point shows."""
    point: Path


def _mounts(controller: str) -> Iterator[_Mount]:
    """Yield the mounted hierarchies that may have the controller."""
    for line in _lines(MOUNTS):
        mount, _, source = line.partition(" - ")
        match mount.split(), source.split():
            case [_, _, _, root, point, *_], ["cgroup2", *_]:
                yield _Mount(True, PurePosixPath(unescaped(root)), Path(unescaped(point)))
            case [_, _, _, root, point, *_], ["cgroup", *_, options] if controller in options.split(","):
                yield _Mount(False, PurePosixPath(unescaped(root)), Path(unescaped(point)))
            case _:
                pass


def unescaped(path: str) -> str:
    """Return a path of mountinfo, where space, tab, newline and backslash are octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []


def _number(path: Path) -> int | None:
    match _words(path):
        case [word] if word.isdigit():
            return int(word)
        case _:
            return None


def _cores_of_max(path: Path) -> int | None:
    match _words(path):
        case [quota, period] if quota.isdigit() and period.isdigit():
            return _cores(int(quota), int(period))
        case _:
            return None


def _cores_of_quota(path: Path) -> int | None:
    quota, period = _number(path), _number(path.with_name("cpu.cfs_period_us"))
    return _cores(quota, period) if quota is not None and period is not None else None


def _cores(quota: int, period: int) -> int | None:
    return max(1, -(-quota // period)) if quota > 0 and period > 0 else None
