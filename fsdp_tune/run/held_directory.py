"""A directory that is found again where it was moved to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Self

REFUSALS = (OSError, MemoryError)
"""What looking at a path raises that says nothing about it."""


class HeldDirectory:
    """A directory that is held open: its inode is its own until it is closed, and where it is moved to can be
    seen."""

    def __init__(self, given: Path) -> None:
        """`given`: an absolute path without links. Raises: OSError."""
        self.given = given
        self._descriptor = os.open(given, os.O_RDONLY | os.O_DIRECTORY)

    def is_left(self) -> bool:
        """Return whether the given path now leads to another directory, or to none. Raises: OSError if that
        cannot be seen."""
        try:
            return not self._is_at(self.given)
        except (FileNotFoundError, NotADirectoryError):
            return True

    def moved_to(self) -> Path | None:
        """Return the path of the directory after it has left the given one; None if it was removed, or if
        this system does not tell."""
        try:
            path = self._link.readlink()
            return path if self._is_at(path) else None
        except REFUSALS:
            return None

    @property
    def path(self) -> Path:
        """The path of the directory. It never leads to another one that has taken its place."""
        try:
            if not self.is_left():
                return self.given
        except REFUSALS:  # it cannot be looked at for a while
            return self.given
        moved = self.moved_to()
        if moved is not None:
            return moved
        with contextlib.suppress(MemoryError):
            if not os.path.lexists(self.given):
                return self.given
        return self._link

    @property
    def _link(self) -> Path:
        return Path(f"/proc/self/fd/{self._descriptor}")

    def _is_at(self, path: Path) -> bool:
        return os.path.samestat(path.stat(), os.fstat(self._descriptor))

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1  # the number may soon be that of another file
        os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
