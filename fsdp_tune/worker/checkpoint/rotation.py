"""Which old checkpoints go, and what a crashed save left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fsdp_tune.core.atomic import DISK, STAGE_MARK
from fsdp_tune.run.directory import RunDir, complete_checkpoints


def rotate(run: RunDir, keep: int | None, *, protected: set[int]) -> list[Path]:
    """Delete the oldest complete checkpoints of this run beyond `keep`; never a protected step, never what has no manifest of ours.

    A checkpoint that a resume or a merge found damaged is neither counted nor deleted; no file is read to find that out.

    Each is first renamed to a hidden name, so that a half-deleted directory is never visible. What a rotation before could
    not delete is tried again.
    """
    if keep is None:
        return []
    for hidden in run.path.glob(f".checkpoint-*.old{STAGE_MARK}*"):
        DISK.rmtree(hidden)
    complete, _ = complete_checkpoints(run)
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
    """Deletes stage directories that an earlier process of this run left; the run's lock says that none is alive."""
    gone: list[Path] = []
    for path in run.path.glob(f".checkpoint-*{STAGE_MARK}*"):
        shutil.rmtree(path, ignore_errors=True)
        gone.append(path)
    return gone
