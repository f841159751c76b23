"""Resume: all ranks agree on a checkpoint, and restore the state of model, optimizer, generators and
schedule."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.values import as_mapping
from fsdp_tune.run.directory import Checkpoint, inspect_checkpoint
from fsdp_tune.run.manifest import MANIFEST_NAME, damage, mark_damaged, read_manifest
from fsdp_tune.worker.agreement import from_rank0, gather
from fsdp_tune.worker.checkpoint.exchange import RANK_FILES, WAYS_OUT, rank_file
from fsdp_tune.worker.checkpoint.state import (
    Live,
    OwnState,
    RankFile,
    load_model,
    load_optimizer,
    seed_for_rank,
    set_rng_state,
)

if TYPE_CHECKING:
    from transformers import Trainer


# NFS caches directories for up to a minute (`acdirmax`), including the absence of a name.
VISIBLE_SECONDS = 90.0


_POLL_SECONDS = 0.2


def agreed_checkpoint(path: str | None, *, digests: bool, wait_seconds: float = 0.0) -> Checkpoint | None:
    """Return the checkpoint that rank 0 chooses, verified by all ranks together (each hashes a share of the
    files).

    `wait_seconds` is the time until files of another machine are visible.
    """
    if path is None:
        return None

    def choose() -> Checkpoint:
        _wait_until_visible(Path(path), [MANIFEST_NAME], wait_seconds)
        verdict = inspect_checkpoint(Path(path), digests=False)
        if not isinstance(verdict, Checkpoint):
            raise failed_error("checkpoint-unusable", f"{path}: {verdict.reason}", ways_out=WAYS_OUT)
        return verdict

    chosen = from_rank0(choose, "choosing the checkpoint")
    mine = dict(list(chosen.manifest.files.items())[dist.get_rank() :: dist.get_world_size()])
    # What one rank of a machine sees, all of them see; the next collective waits for those of this machine.
    _wait_until_visible(
        chosen.path, [MANIFEST_NAME, *mine, *_share_of_machine(list(chosen.manifest.files))], wait_seconds
    )
    part = dataclasses.replace(chosen.manifest, files=mine)
    bad = [each for found in gather(damage(chosen.path, part, digests=digests)) for each in found]
    if bad:
        if dist.get_rank() == 0:
            mark_damaged(chosen.path, [each.name for each in bad if each.is_of_contents])
        raise failed_error("checkpoint-damaged", f"{chosen.path}: {bad[0]}", ways_out=WAYS_OUT)
    return chosen


def _wait_until_visible(folder: Path, names: list[str], limit_seconds: float) -> None:
    """Wait until every name exists, up to a limit. Names are not from a listing; missing files are reported
    as damage later."""
    deadline, missing = time.monotonic() + limit_seconds, names
    while time.monotonic() < deadline and (
        missing := [name for name in missing if not (folder / name).exists()]
    ):
        time.sleep(_POLL_SECONDS)


def _share_of_machine(names: Sequence[str]) -> Sequence[str]:
    """Return this rank's part of what the ranks of its machine divide; everything for a rank that is
    alone."""
    return names[int(os.environ.get("LOCAL_RANK", "0")) :: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]


def _rank_files(checkpoint: str) -> list[str]:
    """Return the per-rank files from the manifest: a directory listing may be late, and may contain other
    files."""
    manifest = read_manifest(Path(checkpoint))
    return sorted(fnmatch.filter(manifest.files if manifest else (), RANK_FILES))


def restore_model(live: Live, checkpoint: str) -> None:
    load_model(live, Path(checkpoint))


def restore_optimizer(live: Live, checkpoint: str) -> None:
    load_optimizer(live, Path(checkpoint))


def _read_rank(checkpoint: str, name: str) -> RankFile:
    """Return what a rank's own file holds, which cannot run code."""
    return torch.load(Path(checkpoint) / name, weights_only=True)


def restore_own(checkpoint: str) -> OwnState:
    """Return this rank's own state: sums since the last line, loss scale. At another world size, rank 0 gets
    all sums."""
    files = _rank_files(checkpoint)
    if len(files) == dist.get_world_size():
        return _read_rank(checkpoint, rank_file(dist.get_rank()))["own"]
    # Other ranks need only the values that are equal in all files, so they read one; reading all on every
    # rank would be slow.
    read = files if dist.get_rank() == 0 else files[:1]
    all_own = [_read_rank(checkpoint, file)["own"] for file in read]
    sums = [sum(values, start=0.0) for values in zip(*(own["sums"] for own in all_own), strict=True)]
    return {**all_own[0], "sums": sums if dist.get_rank() == 0 else [0.0] * len(sums)}


def restore_rng(checkpoint: str, seed: int, step: int, device_type: str) -> None:
    """Restore this rank's generators; at another world size each rank starts its own stream from seed, step
    and rank."""
    if len(_rank_files(checkpoint)) == dist.get_world_size():
        set_rng_state(_read_rank(checkpoint, rank_file(dist.get_rank()))["rng"], device_type)
    else:
        torch.manual_seed(seed_for_rank(seed, step))


def restore_schedule(scheduler: object, step: int) -> None:
    """Set a schedule to `step` of the current recipe. The Trainer would load the values of the old schedule
    (transformers#9099)."""
    if not isinstance(scheduler, LambdaLR):
        raise failed_error(
            "schedule-not-a-function",
            f"{type(scheduler).__name__} is not a function of the step, so it cannot be resumed",
            hint="choose a lr_scheduler_type such as cosine or linear",
        )
    rates = [base * scale(step) for base, scale in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.load_state_dict(
        {**scheduler.state_dict(), "last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
    )


def trainer_state_json(trainer: Trainer) -> str:
    """Return transformers' TrainerState as JSON, with the state of callbacks that have one (early
    stopping)."""
    callbacks = dict(as_mapping(trainer.state.stateful_callbacks))
    # Requests of the control (stop, save, log) must not be restored: an extended run would stop immediately.
    callbacks.pop("TrainerControl", None)
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ in callbacks:
            callbacks[type(callback).__name__] = callback.state()
    fields = {**dataclasses.asdict(trainer.state), "stateful_callbacks": callbacks, "log_history": []}
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"
