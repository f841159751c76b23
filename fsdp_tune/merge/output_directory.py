"""The directory that a merge writes: checks that protect existing files, recovery after a killed merge, and
its config and tokenizer.
"""

from __future__ import annotations

import errno
import glob
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fsdp_tune.core.atomic import (
    DISK,
    STAGE_MARK,
    needs_filling,
    occupants,
    stage_lock,
    stages_inside,
    staging_path,
    undo_fill,
)
from fsdp_tune.core.errors import Notice, Where, failed_error, usage_error
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.ownership import announced, is_abandoned
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE
from fsdp_tune.core.tensors.quantised_formats import needs_settings
from fsdp_tune.core.units import format_bytes
from fsdp_tune.merge.config_and_tokenizer import CONFIG_NAME, Companions, output_config
from fsdp_tune.merge.copy.layout import Layout
from fsdp_tune.merge.lora.adapt import Adapter
from fsdp_tune.merge.source import Selection
from fsdp_tune.merge.weight_formats import Format, Weights
from fsdp_tune.run.directory import MERGE_RECORD, enclosing_checkpoint

_RECORD_BYTES, _RECORD_BYTES_OF_TENSOR = 256 << 10, 1 << 10
"""Upper bounds of what the files that are made for the output take: config, index, card, and merge.json with
a line for each tensor."""
_MADE_FILES = 8
_CANNOT_WRITE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
}


def check_output(output: Path, selection: Selection, base: Path | None = None) -> Path:
    """Return the absolute output path.

    Raises: usage error if it contains an input (`base` included) or the run, or is inside an input or a
    checkpoint.
    """
    target = output.parent.resolve() / output.name
    if output.name in ("", ".", ".."):
        target = output.resolve()
    inputs = [path for weights in selection.weights for path in _read_paths(weights)]
    if base is not None:
        inputs.append(base.resolve())
    if selection.run is not None:
        inputs.append(selection.run.model.resolve())
        protected = [selection.run.path.resolve()]
    else:
        protected = []
    where, hint = Where(str(output)), "give another `--output`"
    for folder in (*inputs, *protected):
        if folder.is_relative_to(target) or folder.is_relative_to(target.resolve()):
            raise usage_error(
                "merge-output-is-input",
                f"the output would replace `{folder}`, which is read",
                where=where,
                hint=hint,
            )
    for folder in inputs:
        if target.is_relative_to(folder) or target.resolve().is_relative_to(folder):
            raise usage_error(
                "merge-output-is-input",
                f"the output would lie inside `{folder}`, which is read",
                where=where,
                hint=hint,
            )
    if (checkpoint := enclosing_checkpoint(target)) is not None:
        message = (
            f"the output would be inside the checkpoint `{checkpoint}`, and would be removed together with it"
        )
        raise usage_error("output-in-checkpoint", message, where=where, hint=hint)
    return target


def _read_paths(weights: Weights) -> list[Path]:
    """Return the directories that weights are read from, or the file where they are one file of another
    tool."""
    if weights.format is Format.PICKLE and weights.manifest is None:
        return [weights.root / weights.file]
    return [weights.checkpoint.resolve(), weights.root]


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raises: usage error if the output exists and may not be replaced; FailedError if it cannot be
    written."""
    _check_existing(target, overwrite=overwrite)
    _check_writable(target)


def _check_existing(target: Path, *, overwrite: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise usage_error(
            "merge-output-exists",
            "the output exists and is not a directory",
            where=Where(str(target)),
            hint="give another `--output`",
        )
    if not occupants(target):
        return
    if not overwrite:
        raise usage_error(
            "merge-output-exists",
            "the output exists",
            where=Where(str(target)),
            ways_out=("--output ANOTHER", "--overwrite"),
        )
    if not (target / MERGE_RECORD).is_file():
        raise usage_error(
            "merge-output-not-ours",
            "`--overwrite` replaces only what an earlier merge wrote, and this directory has no "
            f"{MERGE_RECORD}",
            where=Where(str(target)),
            hint="give another `--output`, or remove the directory yourself",
        )


def _check_writable(target: Path) -> None:
    folder = _nearest(target)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise failed_error(
            "merge-cannot-write",
            "the output cannot be written: the directory is read-only, or belongs to another user",
            where=Where(str(folder)),
            hint="pass an `--output` that you can write to",
        )


def _nearest(target: Path) -> Path:
    """Return the existing directory under which the output is written."""
    folder = target if needs_filling(target) else target.parent
    while not folder.exists():
        folder = folder.parent
    return folder


def check_space(target: Path, layout: Layout, companions: Companions) -> None:
    """Raises: FailedError if the disk has no room for the output, in bytes or in files."""
    folder = _nearest(target)
    disk = os.statvfs(folder)
    free_bytes, free_files = disk.f_bavail * disk.f_frsize, disk.f_favail
    copied = [path.stat().st_size for path in companions.files.values() if path.exists()]
    beside_bytes = sum(copied) + _RECORD_BYTES + _RECORD_BYTES_OF_TENSOR * len(layout.tensors)
    files = len(layout.files) + len(copied) + _MADE_FILES
    message = None
    if free_bytes < layout.size_bytes + beside_bytes:
        parts = (
            f"{format_bytes(layout.size_bytes)}, and {format_bytes(beside_bytes)} for the files next to it"
        )
        message = f"the merged model needs {parts}; {format_bytes(free_bytes)} are free"
    elif disk.f_files > 0 and free_files < files:  # some file systems count none
        message = (
            f"the merged model has {files} files, and the disk has room for {free_files} more files (`df -i`)"
        )
    if message is not None:
        hint = "free space, or merge to another disk: `fsdp-tune merge-checkpoint SRC --output DIR`"
        raise failed_error("merge-disk-full", message, where=Where(str(folder)), hint=hint)


def bring_back(target: Path) -> list[Notice]:
    """Undo a replacement that was killed between its two renames by restoring the old output."""
    asides = [path for path in _siblings(target, f".old{STAGE_MARK}") if is_abandoned(_lock_of(path, target))]
    if not asides or target.exists():
        return []
    DISK.rename(asides[-1], target)
    return [
        Notice(
            "merge-recovered",
            "the old output was restored; a merge was killed while it replaced it",
            Where(str(target)),
        )
    ]


def clear_leftovers(target: Path) -> list[Notice]:
    """Remove the stages of merges that were killed, and old outputs that were replaced.

    Each merge holds a lock file next to its stage (see `stage_owned`). One on another machine counts as
    killed 300 s after its last update.
    """
    notices: list[Notice] = []
    for path in _siblings(target, f".old{STAGE_MARK}"):
        if is_abandoned(_lock_of(path, target)):
            DISK.rmtree(path)
    for stage in stages_inside(target):
        if is_abandoned(stage_lock(stage)):
            undo_fill(target, stage)
            notices.append(
                Notice(
                    "merge-leftover",
                    "the unfinished output of a merge that was killed was removed",
                    Where(str(target)),
                )
            )
    for path in _siblings(target, STAGE_MARK):
        if path.is_dir() and is_abandoned(stage_lock(path)):
            DISK.rmtree(path)
            notices.append(
                Notice(
                    "merge-leftover",
                    "the unfinished output of a merge that was killed was removed",
                    Where(str(path)),
                )
            )
    for folder in (target.parent, target):
        for lock in folder.glob(f".{glob.escape(target.name)}{STAGE_MARK}*.lock"):
            if is_abandoned(lock):
                DISK.unlink(lock)
    return notices


def _siblings(target: Path, mark: str) -> list[Path]:
    """Return the stage directories next to `target` that are named after it, sorted."""
    if not target.parent.is_dir():
        return []
    prefix = f".{target.name}{mark}"
    return sorted(
        path
        for path in target.parent.iterdir()
        if path.name.startswith(prefix) and path.name[len(prefix) :].isdecimal()
    )


def _lock_of(aside: Path, target: Path) -> Path:
    """Return the lock file of the merge that moved an old output aside; both names have the same suffix."""
    suffix = aside.name.rpartition(STAGE_MARK)[2]
    return stage_lock(target.with_name(f".{target.name}{STAGE_MARK}{suffix}"))


@contextmanager
def stage_owned(target: Path) -> Iterator[None]:
    """Show other merges that the stage of this one is in use, until its output is in place."""
    lock = stage_lock(staging_path(target, last=MERGE_RECORD))
    DISK.mkdir(lock.parent)
    with announced(lock):
        yield


@contextmanager
def writing_to(target: Path) -> Iterator[None]:
    """Turn errors of the file system into one problem that names the path and a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise usage_error(
                "merge-output-exists",
                "the output appeared while it was being merged",
                where=Where(str(target)),
            ) from error
        if error.errno not in _CANNOT_WRITE:
            raise
        raise failed_error(
            "merge-cannot-write",
            f"the output cannot be written: {error.strerror}; nothing was left behind",
            where=Where(str(target)),
            hint="free space, raise the limit (`ulimit -f`), or pass an `--output` that you can write to",
        ) from error


def put(path: Path, data: bytes) -> None:
    """Write one small file of the stage, which is synced when it is published."""
    DISK.mkdir(path.parent)
    with DISK.open(path) as file:
        DISK.write(file, data)


def write_companions(
    stage: Path,
    companions: Companions,
    layout: Layout,
    config_changes: Mapping[str, object],
    adapter: Adapter | None = None,
) -> None:
    """Write the config with the dtype of the weights, and copy the tokenizer's files. An exported `adapter`
    gets PEFT's config."""
    if adapter is not None and adapter.is_exported:
        put(
            stage / CONFIG_FILE,
            (json.dumps(adapter.config_json(), indent=2, ensure_ascii=False) + "\n").encode(),
        )
    if companions.config is not None:
        dtype = layout.main_dtype
        is_quantised = needs_settings(
            {name: placed.dtype.safetensors for name, placed in layout.tensors.items()}
        )
        config = output_config(
            companions.config, dtype if dtype.converts else None, config_changes, is_quantised=is_quantised
        )
        put(stage / CONFIG_NAME, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
    for name, path in companions.files.items():
        put(stage / name, read_regular(path))
