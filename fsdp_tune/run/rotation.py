"""Remove checkpoints: those beyond `training.save_total_limit`, and what an interrupted save has left. Files
of others stay."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

from fsdp_tune.core.atomic import DISK, STAGE_MARK
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir, complete_checkpoints
from fsdp_tune.run.manifest import read_manifest


def rotate(
    run: RunDir, keep: int | None, *, protected: set[int], counted: set[int] | None = None
) -> list[Path]:
    """Delete the oldest complete checkpoints of this run beyond `keep`, but no protected step and no
    directory without a manifest.

    `counted`: steps of the checkpoints that all machines have; None: those of this directory.

    A checkpoint that a resume or a merge marked as damaged is neither counted nor deleted; files are not read
    to check it.

    Each is first renamed to a hidden name, so that a partly deleted directory is never visible. Directories
    that an earlier rotation could not delete are deleted again.
    """
    if keep is None:
        return []
    for hidden in run.path.glob(f".checkpoint-*.old{STAGE_MARK}*"):
        DISK.rmtree(hidden)
    complete = [
        each
        for each in complete_checkpoints(run, elsewhere=None)[0]
        if counted is None or each.step in counted
    ]
    gone: list[Path] = []
    for old in complete[max(keep, 1) :]:
        if old.step in protected:
            continue
        hidden = old.path.with_name(f".{old.path.name}.old{STAGE_MARK}{os.getpid()}")
        DISK.rename(old.path, hidden)
        DISK.fsync_dir(run.path)
        DISK.rmtree(hidden)
        gone.append(old.path)
    return gone


def remove_leftovers(run: RunDir) -> list[Path]:
    """Delete stage directories of earlier processes of this run. The caller holds the run's lock, so none of
    them lives."""
    gone: list[Path] = []
    for path in run.path.glob(f".checkpoint-*{STAGE_MARK}*"):
        shutil.rmtree(path, ignore_errors=True)
        gone.append(path)
    return gone


def make_way(final: Path) -> str | None:
    """Rename something else that has the name of a checkpoint that is about to be published. Return a
    sentence about it, or None.

    A file, a link, or a directory with files and without a manifest of a checkpoint is of someone else. A
    damaged manifest is ours.
    """
    if not os.path.lexists(final) or _is_ours(final):
        return None
    names = (
        f"other-{final.name}{suffix}"
        for suffix in itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    )
    free = next(path for name in names if not os.path.lexists(path := final.with_name(name)))
    DISK.rename(final, free)
    DISK.fsync_dir(final.parent)
    return f"{final.name} was there and is no checkpoint of this run; it is now {free.name}"


def _is_ours(path: Path) -> bool:
    """Return whether a directory is a checkpoint, also a damaged one, or has no file that anyone could
    miss."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError):
        return True
    return manifest.kind == CHECKPOINT_KIND if manifest is not None else next(path.iterdir(), None) is None
