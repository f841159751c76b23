"""Open and read files that others may have replaced: regular files only, without blocking, and up to a limit
of size.

A FIFO in the place of a file blocks `open` until a writer appears, a device may never end, and a file of many
gigabytes exhausts memory. Whatever reads the files of a run or of a checkpoint opens them here.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where
from fsdp_tune.core.units import format_bytes

DOCUMENT_BYTES = 256 << 20
"""Limit of a file that is read at once."""
PIECE_BYTES = 4 << 20
LINE_BYTES = 16 << 20
"""Limit of a line of a file that is read in pieces; longer ones are left out."""
LOG_BYTES = 1 << 20
"""Of a log, from its end, that is searched for why a process ended."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


class UnsuitableFileError(FsdpTuneError, OSError):
    """A path that is not a regular file, or a file above its limit.

    As an OSError it is handled by callers that can do without the file; to all others it is a usage error
    with the path and a remedy. `errno` is EFBIG of a file above its limit, EINVAL of any other.
    """

    def __init__(self, path: Path, what: str, hint: str, number: int = errno.EINVAL) -> None:
        super().__init__(Problem("run-unreadable", what, Where(str(path)), hint))
        self.errno, self.strerror, self.filename = number, what, str(path)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def working_directory() -> Path | None:
    """Return the working directory; None if it has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def expanded(path: str | Path) -> Path:
    """Return a path whose `~` or `~USER` at the start is replaced by the home directory. Without one that is
    the name of a directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user; or no HOME, and no entry in /etc/passwd
        return Path(path)


def pattern_below(folder: Path, name: str) -> str:
    """Return the path or glob `name`, which starts in a folder whose own name is not a glob.

    A file that exists under this name is meant, also where the name has the signs of a glob.
    """
    path = Path(folder, expanded(name))
    if not glob.has_magic(name) or os.path.lexists(path):
        return str(path)
    return str(Path(glob.escape(str(folder)), expanded(name)))


def open_descriptor(path: Path) -> int:
    """Return a descriptor of a regular file for reading. Raises: UnsuitableFileError, OSError."""
    _require_regular(path, path.stat().st_mode)  # some devices act when they are opened
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def folders_in(folder: Path) -> list[Path]:
    """Return the directories in a directory, sorted; [] for one that may not be read. `Path.is_dir` raises
    for links that may not."""
    found: list[Path] = []
    with contextlib.suppress(PermissionError, FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(PermissionError, FileNotFoundError):
                if entry.is_dir():
                    found.append(folder / entry.name)
    return sorted(found)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises: UnsuitableFileError, OSError."""
    return os.fdopen(open_descriptor(path), "rb")


def read_regular(path: Path, *, most_bytes: int = DOCUMENT_BYTES) -> bytes:
    """Return the contents of a regular file of at most `most_bytes`. Raises: UnsuitableFileError, OSError."""
    with open_regular(path) as file:
        refuse_larger(path, os.fstat(file.fileno()).st_size, most_bytes)
        raw = file.read(most_bytes + 1)  # the file may grow meanwhile
    refuse_larger(path, len(raw), most_bytes)
    return raw


def read_end_of_log(path: Path, start: int) -> str:
    """Return what a log has from `start` on, but at most its last `LOG_BYTES`. Raises: UnsuitableFileError,
    OSError."""
    with open_regular(path) as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - LOG_BYTES))
        return file.read(LOG_BYTES).decode("utf-8", "replace")


def refuse_larger(path: Path, size_bytes: int, most_bytes: int) -> None:
    """Raise UnsuitableFileError if a file of this size is above its limit."""
    if size_bytes > most_bytes:
        what = f"has {format_bytes(size_bytes)}, and at most {format_bytes(most_bytes)} are read"
        if path.suffix == ".jsonl":
            kept = shlex.quote(f"{path}.newest")
            hint = (
                f"keep its newest lines: `tail -n 100000 {shlex.quote(str(path))} > {kept}`, then move "
                f"{kept} into its place"
            )
        else:
            hint = "move it away, or put back the file that the run wrote"
        raise UnsuitableFileError(path, what, hint, errno.EFBIG)


def lines_of(path: Path, *, last_bytes: int | None = None, marker: bytes = b"") -> Iterator[bytes]:
    """Yield the lines of a regular file that contain `marker`, read in pieces; of a large file those in its
    `last_bytes`.

    Raises: UnsuitableFileError, OSError.
    """
    with open_regular(path) as file:
        skipped = max(0, os.fstat(file.fileno()).st_size - last_bytes - 1) if last_bytes is not None else 0
        file.seek(skipped)
        rest, is_cut = b"", skipped > 0  # the first line begins earlier, unless the byte before it ends one
        while piece := file.read(PIECE_BYTES):
            if is_cut:
                _, newline, piece = piece.partition(b"\n")
                is_cut = not newline
            head, newline, tail = piece.rpartition(b"\n")
            if newline:
                yield from _lines_with(rest + head, marker)
                rest = tail
            else:
                rest += tail
            if len(rest) > LINE_BYTES:
                rest, is_cut = b"", True
        if rest:
            yield from _lines_with(rest, marker)


def _lines_with(block: bytes, marker: bytes) -> Iterator[bytes]:
    if marker in block:
        yield from (line for line in block.split(b"\n") if marker in line)


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
        raise UnsuitableFileError(
            path, f"is {kind}, not a regular file", "move it away, or put back the file that the run wrote"
        )


def is_inside(name: str) -> bool:
    """Return whether a relative path that was read from a file stays inside the directory that the file
    describes."""
    return (
        bool(name)
        and "\0" not in name
        and "\\" not in name
        and not name.startswith("/")
        and ".." not in name.split("/")
    )
