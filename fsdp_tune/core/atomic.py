"""Write files and directories atomically: a reader sees the complete old one or the complete new one.

Protocol: write under a stage name next to the target, fsync every file and directory, rename, fsync the
parent. Stage names start with `.` and end in `.stage-<pid and random digits>`, so that leftovers are
distinguishable from users' files, and processes of several machines with equal pids do not share one.
All writes go through `DISK`; the fault suite replaces it by one that fails at the n-th operation.
"""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import secrets
import shlex
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from fsdp_tune.core.cgroups import unescaped
from fsdp_tune.core.errors import usage_error

STAGE_MARK = ".stage-"
_SUFFIX = f"{secrets.randbelow(10**9):09d}"
PRIVATE_MODE = 0o600
"""Mode of recipes, environments and logs, which may contain secrets that no pattern recognises."""


class Disk:
    """Writes through Python, with one method per operation, so that tests can count operations and make them
    fail."""

    def open(self, path: Path, mode: str = "wb") -> IO[bytes]:
        return open(path, mode)

    def open_private(self, path: Path, mode: str = "wb") -> IO[bytes]:
        """Open a file like `open`; a new file is created readable only by its owner."""
        return open(path, mode, opener=lambda name, flags: os.open(name, flags, PRIVATE_MODE))

    def open_direct(self, path: Path) -> IO[bytes]:
        """Open a file for direct I/O, which bypasses the page cache and needs page-aligned sizes, offsets and
        buffers.

        Raises: OSError(EINVAL) if the operating system or the file system does not support it.
        """
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return open(path, "r+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_DIRECT))

    def write(self, file: IO[bytes], data: bytes | memoryview) -> None:
        """Write all of `data`, also to an unbuffered file, for which a single write may be partial."""
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

    def link(self, source: Path, target: Path) -> None:
        """Make `target` a second name of a file, which stays when the first is removed."""
        os.link(source, target, follow_symlinks=False)

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
    """Return the hidden sibling under which this process builds `target`."""
    return target.with_name(f".{target.name}{STAGE_MARK}{os.getpid()}{_SUFFIX}")


def check_output_file(path: Path, *, replaces: bool = False, otherwise: str = "remove it") -> None:
    """Check, before the work for it, that `write_file` can write a file that the user named.

    An existing file is refused unless the command `replaces` it; `otherwise` is the way out next to another
    name.
    Raises: usage error (exit 2).
    """
    parent = path.absolute().parent
    unwritable = f"`{path}` cannot be written"
    if path.is_dir():
        raise usage_error("output-exists", f"`{path}` is a directory", hint="give the name of a file")
    if _is_stream(path):
        return
    if not replaces and (path.exists() or path.is_symlink()):
        raise usage_error(
            "output-exists", f"`{path}` already exists", hint=f"give another file name, or {otherwise}"
        )
    if not parent.is_dir():
        raise usage_error(
            "no-directory",
            f"{unwritable}: the directory `{parent}` does not exist",
            hint=f"mkdir -p {shlex.quote(str(parent))}",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise usage_error(
            "no-directory",
            f"{unwritable}: no permission to write in `{parent}`",
            hint="give another directory",
        )


def write_file(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Replace the content of `path` atomically. A `private` file is readable only by its owner, any other by
    the umask.

    A device, a pipe and a descriptor of this process (/dev/null, /dev/stdout) are written to: root could
    replace them.
    """
    raw = data.encode() if isinstance(data, str) else data
    if _is_stream(path):
        with DISK.open(path) as file:
            DISK.write(file, raw)
        return
    stage = stage_path(path)
    try:
        stage.unlink(missing_ok=True)  # a leftover would keep its mode
        with DISK.open_private(stage) if private else DISK.open(stage) as file:
            DISK.write(file, raw)
            DISK.fsync(file)
        DISK.replace(stage, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # the error of a write has no file name
            error.filename = str(path)
        stage.unlink(missing_ok=True)
        raise
    DISK.fsync_dir(path.parent)


def separate(path: Path) -> None:
    """Give a file that has other names, as after `cp -al`, contents of its own, before it is appended to.
    Raises: OSError."""
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
        stage = stage_path(path)
        try:
            shutil.copy2(path, stage)
            DISK.replace(stage, path)
        finally:
            stage.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    if not stat.S_ISREG(mode):
        return not stat.S_ISDIR(mode)
    # of standard output that is sent to a file
    names = [
        path.absolute(),
        *([path.readlink()] if path.is_symlink() else []),
    ]
    return any(str(name).startswith(("/proc/", "/dev/fd/")) for name in names)


def json_safe(value: object) -> Any:
    """Return `value` with NaN and infinities as text ("nan", "inf"), which JSON cannot represent as
    numbers."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {key: json_safe(inner) for key, inner in cast(dict[str, object], value).items()}
        case list() | tuple():
            return [json_safe(inner) for inner in cast(Sequence[object], value)]
        case _:
            return value


def write_json(path: Path, value: object, *, private: bool = False) -> None:
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", private=private)


def fsync_tree(root: Path) -> None:
    """Call fsync on every file and directory under `root`, so that they survive a power failure."""
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if not path.is_symlink():
                with open(path, "rb") as file:
                    DISK.fsync(file)
        DISK.fsync_dir(Path(directory))


def publish(stage: Path, final: Path, *, replace: bool = False) -> None:
    """Rename a finished directory to its final name. With `replace`, an existing one is kept until then.

    Between the two renames of a replacement `final` is briefly absent. The old directory is then next to it
    under a stage name, and the next writer restores it (`merge.output_directory.bring_back`,
    `worker.checkpoint.save`).
    """
    DISK.fsync_dir(stage)
    if replace and final.exists():
        aside = final.with_name(f".{final.name}.old{STAGE_MARK}{os.getpid()}{_SUFFIX}")
        DISK.rename(final, aside)
        DISK.rename(stage, final)
        DISK.fsync_dir(final.parent)
        DISK.rmtree(aside)
    else:
        DISK.rename(stage, final)
        DISK.fsync_dir(final.parent)


def staging_path(final: Path, *, last: str | None) -> Path:
    """Return the stage that `staged_directory` uses in this process."""
    fills = last is not None and needs_filling(final)
    return final / stage_path(final).name if fills else stage_path(final)


@contextmanager
def staged_directory(final: Path, *, replace: bool = False, last: str | None = None) -> Iterator[Path]:
    """Yield an empty stage directory; publish it if the block succeeds, remove it otherwise.

    `last` is the name of the file without which `final` counts as absent. If given, a directory that cannot
    be replaced by a rename (see `needs_filling`) is filled instead: staged inside, then moved entry by entry,
    `last` at the end.
    """
    stage = staging_path(final, last=last)
    fills = stage.parent == final
    if stage.exists():
        DISK.rmtree(stage)
    DISK.mkdir(stage)
    try:
        yield stage
        fsync_tree(stage)
        if fills and last is not None:
            _fill(stage, final, last, replace=replace)
        else:
            publish(stage, final, replace=replace)
    except BaseException:
        if fills:
            undo_fill(final, stage)
        shutil.rmtree(stage, ignore_errors=True)
        raise


def needs_filling(path: Path) -> bool:
    """Return whether a directory exists that a rename cannot replace: a mount point, a link, or one in a
    read-only parent."""
    return path.is_dir() and (
        path.is_symlink() or is_mount_point(path) or not os.access(path.parent, os.W_OK | os.X_OK)
    )


def is_mount_point(path: Path) -> bool:
    """Return `os.path.ismount`, or whether it is a bind mount within one file system, which is only in the
    kernel's list."""
    if os.path.ismount(path):
        return True
    try:
        lines = (
            Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        )
    except OSError:  # not Linux
        return False
    mounted = (line.split(" ")[4] for line in lines)
    return str(path.resolve()) in map(unescaped, mounted)


def occupants(directory: Path, *, ignored: Collection[str] = ("lost+found",)) -> list[str]:
    """Return the names in a directory, without `ignored` and without leftovers of a killed fill; [] if it
    does not exist."""
    if not directory.is_dir():
        return []
    ours = {path.name for path in _staged_inside(directory)} | {
        name for stage in stages_inside(directory) for name in _filled_names(stage)
    }
    return sorted(
        path.name for path in directory.iterdir() if path.name not in ignored and path.name not in ours
    )


def stage_lock(stage: Path) -> Path:
    """Return the lock file of a stage, for `ownership.announced`: it outlives the rename of the stage."""
    return stage.with_name(f"{stage.name}.lock")


def stages_inside(directory: Path) -> list[Path]:
    """Return the stages of fills of a directory that have not finished."""
    return sorted(path for path in _staged_inside(directory) if path.is_dir())


def _staged_inside(directory: Path) -> Iterator[Path]:
    """Yield stages and their lock files."""
    return directory.glob(f".{glob.escape(directory.name)}{STAGE_MARK}*")


_FILLING_NAME = ".filling.json"
"""File in the stage with all names that the fill removes from the directory or moves into it, `last` at the
end."""


def _fill(stage: Path, final: Path, last: str, *, replace: bool) -> None:
    if (final / last).exists() and not replace:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final / last))
    names = sorted(path.name for path in stage.iterdir() if path.name != last)
    old = [name for name in occupants(final) if name != last] if replace else []
    write_json(stage / _FILLING_NAME, [*old, *names, last])
    DISK.unlink(final / last)
    DISK.fsync_dir(final)
    _remove(final, old)
    for name in (*names, last):
        if name == last:
            DISK.fsync_dir(final)
        DISK.rename(stage / name, final / name)
    DISK.fsync_dir(final)
    DISK.rmtree(stage)


def undo_fill(final: Path, stage: Path) -> None:
    """Remove the files that an incomplete fill has moved, and its stage."""
    names = _filled_names(stage)
    if names and not (final / names[-1]).exists():
        _remove(final, names)
    DISK.rmtree(stage)


def _filled_names(stage: Path) -> list[str]:
    try:
        raw: Any = json.loads((stage / _FILLING_NAME).read_bytes())
    except (OSError, ValueError):
        return []
    return [str(name) for name in raw if "/" not in str(name) and str(name) not in ("", ".", "..")]


def _remove(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            DISK.rmtree(path)
        else:
            DISK.unlink(path)
