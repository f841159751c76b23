"""Read a JSON Lines file as it grows, even if it is truncated or replaced meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_tune.run.metrics_file import json_objects


class Follower:
    """Return the new complete lines of `path` at each call of `read`, without those that existed when this was created.

    A resumed run truncates metrics.jsonl to its checkpoint, in place or by a new file of the same name; reading then continues
    after the lines that were known before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._content()
        self._identity = self._stat()
        self._offset = len(self._known)

    def read(self) -> list[dict[str, Any]]:
        identity = self._stat()
        if identity is None:
            self._identity, self._offset = None, 0
            return []
        if self._identity is not None and (identity[0] != self._identity[0] or identity[1] < self._offset):
            self._offset = _known_lines_bytes(self._known, self._content())
            self._known = b""  # rank 0 truncates once, at its start; the lines of a restarted group are returned again
        self._identity = identity
        if identity[1] == self._offset:
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        end = fresh.rfind(b"\n") + 1
        self._offset += end
        return json_objects(fresh[:end])

    def _stat(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


def _known_lines_bytes(old: bytes, new: bytes) -> int:
    """Return the length of the longest prefix of `new` whose lines are all in `old`."""
    known = set(old.splitlines(keepends=True))
    length = 0
    for line in new.splitlines(keepends=True):
        if line not in known or not line.endswith(b"\n"):
            break
        length += len(line)
    return length
