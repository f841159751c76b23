"""Remove checkpoints: those beyond `training.save_total_limit`, and what an interrupted save has left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fsdp_tune.core.atomic import DISK, STAGE_MARK
from fsdp_tune.run.directory import RunDir, complete_checkpoints


def rotate(run: RunDir, keep: int | None, *, protected: set[int], counted: set[int] | None = None) -> list[Path]:
    """Delete the oldest complete checkpoints of this run beyond `keep`, but no protected step and no directory without a manifest.

    `counted`: steps of the checkpoints that all machines have; None: those of this directory.

    A checkpoint that a resume or a merge marked as damaged is neither counted nor deleted; files are not read to check it.

    Each is first renamed to a hidden name, so that a partly deleted directory is never visible. Directories that an earlier
    rotation could not delete are deleted again.
    """
    if keep is None:
        return []
    for hidden in run.path.glob(f".checkpoint-*.old{STAGE_MARK}*"):
        DISK.rmtree(hidden)
    complete = [each for each in complete_checkpoints(run, elsewhere=None)[0] if counted is None or each.step in counted]
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
    """Delete stage directories of earlier processes of this run. The caller holds the run's lock, so none of them lives."""
    gone: list[Path] = []
    for path in run.path.glob(f".checkpoint-*{STAGE_MARK}*"):
        shutil.rmtree(path, ignore_errors=True)
        gone.append(path)
    return gone
