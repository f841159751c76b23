"""The one place that writes artefacts: a reader sees the old whole file or directory, or the new one, never half.

Protocol: write under a stage name beside the target, fsync every file and directory, rename, fsync the parent.
Stage names start with `.` and end in `.stage-<pid>`, so that leftovers can be told from what users made.
`DISK` is the one door to the file system for writes; the fault suite puts in one that fails at the n-th operation.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

STAGE_MARK = ".stage-"


class Disk:
    """Writes through Python, one method per operation, so that each can be counted and made to fail."""

    def open(self, path: Path, mode: str = "wb") -> IO[bytes]:
        return open(path, mode)

    def open_direct(self, path: Path) -> IO[bytes]:
        """For reading and writing past the page cache, in whole pages at addresses of whole pages.

        OSError(EINVAL) where the system or the file system has no such thing.
        """
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return open(path, "r+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_DIRECT))

    def write(self, file: IO[bytes], data: bytes | memoryview) -> None:
        """All of `data`, also to a file without a buffer, of which the kernel may take less at once."""
        view = memoryview(data)
        left = view.cast("B") if view.nbytes else b""
        while left:
            left = left[file.write(left) :]

    def fsync(self, file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file.fileno())

    def mkdir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def rmtree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=False)

    def fsync_dir(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()


def stage_path(target: Path) -> Path:
    """The hidden sibling under which `target` is built."""
    return target.with_name(f".{target.name}{STAGE_MARK}{os.getpid()}")


def write_file(path: Path, data: bytes | str) -> None:
    """Replaces `path` by `data` at once."""
    raw = data.encode() if isinstance(data, str) else data
    stage = stage_path(path)
    try:
        with DISK.open(stage) as file:
            DISK.write(file, raw)
            DISK.fsync(file)
        DISK.replace(stage, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a write knows only a number
            error.filename = str(path)
        stage.unlink(missing_ok=True)
        raise
    DISK.fsync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def fsync_tree(root: Path) -> None:
    """Makes every file and directory under `root` survive a power cut."""
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if not path.is_symlink():
                with open(path, "rb") as file:
                    DISK.fsync(file)
        DISK.fsync_dir(Path(directory))


def publish(stage: Path, final: Path, *, replace: bool = False) -> None:
    """Renames a finished directory into place. With `replace`, the old one stays until the new one is there.

    Between the two renames of a replacement `final` is briefly absent; the old one is then beside it under
    a stage name, and the next one to write there brings it back (`merge.output.bring_back`, `worker.rotation`).
    """
    DISK.fsync_dir(stage)
    if replace and final.exists():
        aside = final.with_name(f".{final.name}.old{STAGE_MARK}{os.getpid()}")
        DISK.rename(final, aside)
        DISK.rename(stage, final)
        DISK.fsync_dir(final.parent)
        DISK.rmtree(aside)
    else:
        DISK.rename(stage, final)
        DISK.fsync_dir(final.parent)


@contextmanager
def staged_directory(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Gives an empty stage directory; publishes it when the block ends well, removes it when it does not."""
    stage = stage_path(final)
    if stage.exists():
        DISK.rmtree(stage)
    DISK.mkdir(stage)
    try:
        yield stage
        fsync_tree(stage)
        publish(stage, final, replace=replace)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
