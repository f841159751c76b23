"""Every path that a run owns, and its complete checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from fsdp_tune.core.errors import Problem, usage_error
from fsdp_tune.core.files import read_regular
from fsdp_tune.run.held_directory import HeldDirectory
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, Progress, damage, mark_damaged, read_manifest
from fsdp_tune.run.records import Document

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
CHECKPOINT_KIND = "fsdp-tune checkpoint"
TRAINER_STATE = "trainer_state.json"
"""The Trainer's state in a checkpoint: its step, its history, its best step."""
MERGE_RECORD = "merge.json"
"""File of a merged model or an exported adapter with the origin of every tensor, which only a finished merge
leaves."""
SHARD_FOLDER = "pytorch_model_fsdp_0"
"""The sharded weights of a checkpoint: Accelerate's name, so that its tools find them."""


FULL_MODEL_FILE = "model.safetensors"
"""The weights of a checkpoint that are not sharded (FULL_STATE_DICT)."""


def is_of_weights(name: str) -> bool:
    """Return whether a merge reads a file of a checkpoint."""
    return name == FULL_MODEL_FILE or name.startswith(f"{SHARD_FOLDER}/")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Rejected:
    """A directory that is named like a checkpoint and must not be used, with the reason."""

    path: Path
    reason: str
    is_elsewhere: bool = False
    """Whether it only lacks files of other machines."""


@dataclass(frozen=True, slots=True)
class Held(Document):
    """The files of a checkpoint that are on one machine (`launch.shared_directory: false`)."""

    step: int
    manifest: str
    """`Manifest.identity`."""
    files: list[str]
    """Of the size that the manifest lists, and not known to be damaged."""
    is_verified: bool = False
    """Whether their digests have just been compared."""


class _Inside:
    """A path inside the run directory, as an attribute of `RunDir`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, kind: type[RunDir] | None = None) -> Path:
        return run.path / self._name


class RunDir:
    """The paths of a run directory."""

    __slots__ = ("_path", "_place")

    def __init__(self, path: Path, place: HeldDirectory | None = None) -> None:
        """`place`: the directory at `path`, whose moves the paths then follow; None: they stay as they
        are."""
        self._path, self._place = path, place

    @property
    def path(self) -> Path:
        return self._path if self._place is None else self._place.path

    @property
    def given(self) -> Path:
        """The path by which the run was opened."""
        return self._path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDir) and self._path == other._path

    def __hash__(self) -> int:
        return hash(self._path)

    def __repr__(self) -> str:
        return f"RunDir({str(self._path)!r})"

    mirror_json = _Inside("mirror.json")
    """Under which id the mirror has this run."""
    recipe_yaml = _Inside("recipe.yaml")
    recipe_json = _Inside("recipe.json")
    history = _Inside("history")
    launch_json = _Inside("launch.json")
    base_json = _Inside("model/base.json")
    """The base of an adapter."""
    base_layout_json = _Inside("model/base_layout.json")
    """Names and shapes of the weights in files of the base."""
    tensors_json = _Inside("model/tensors.json")
    """What becomes of each tensor in the files of the base."""
    resume_json = _Inside("resume.json")
    accelerate_yaml = _Inside("accelerate.yaml")
    environment_json = _Inside("environment.json")
    plan_json = _Inside("plan.json")
    data_json = _Inside("data.json")
    """Cache directories of the prepared data, its token counts and its content key."""
    readback_json = _Inside("readback.json")
    metrics_jsonl = _Inside("metrics.jsonl")
    trackers_json = _Inside("trackers.json")
    """Ids of this run in the experiment trackers."""
    lock = _Inside("run.lock")
    logs = _Inside("logs")
    outcome_json = _Inside("logs/outcome.json")
    """How the last launch ended; absent while it runs, and if its supervisor was killed too."""
    evaluation_json = _Inside("evaluation.json")
    """What scores of checkpoints are computed from."""
    tracked_scores_json = _Inside("logs/tracked-scores.json")
    """Whose scores the experiment trackers have."""
    launcher_log = _Inside("logs/launcher.log")
    machines_json = _Inside("logs/machines.json")
    """Host name of each machine of the last launch over several."""
    flight_recorder = _Inside("logs/flight-recorder")
    """torch's record of each rank's collectives, written when a rank hangs; for `torchfrtrace`."""
    hang_report = _Inside("logs/hang.txt")
    """Stack of every rank when a run was ended because it made no progress."""
    tensorboard = _Inside("tensorboard")
    model = _Inside("model")
    merged = _Inside("merged")
    merged_quantised = _Inside("merged-quantised")
    adapter = _Inside("adapter")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_used(self) -> bool:
        return self.recipe_json.exists()

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}.log"

    def rank_outcome(self, rank: int) -> Path:
        """Written by each rank as its last act: exit code, exit reason and, if any, the error."""
        return self.logs / f"rank-{rank:04d}.outcome.json"

    def rank_heartbeat(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}.heartbeat.json"

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    def recipe_digest(self) -> str | None:
        """Return the digest of the resolved recipe, which checkpoints and merged models cite; None without a
        recipe."""
        try:
            return digest_of_recipe(read_regular(self.recipe_json))
        except FileNotFoundError:
            return None


def digest_of_recipe(content: bytes) -> str:
    """Return the digest of a recipe.json with this content."""
    return f"blake2b:{hashlib.blake2b(content, digest_size=32).hexdigest()}"


def checkpoint_step(path: Path) -> int | None:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def name_aside(path: Path) -> Path:
    """Return the free path next to a directory under which it is kept when another takes its place."""
    aside = path.with_name(f"{path.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-{os.getpid()}")
    return aside


def enclosing_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint of a run that contains `path`, or None. Files in a checkpoint are deleted
    together with it."""
    return next(
        (
            folder
            for folder in path.resolve().parents
            if checkpoint_step(folder) is not None and (folder / MANIFEST_NAME).is_file()
        ),
        None,
    )


def inspect_checkpoint(
    path: Path,
    *,
    digests: bool,
    progress: Progress | None = None,
    elsewhere: Sequence[Held] | None = (),
    weights_only: bool = False,
) -> Checkpoint | Rejected:
    """Decide whether a directory is a complete checkpoint of a run.

    With `digests` every file is read, and files whose contents differ are recorded, so that later inspections
    reject them unread.
    `elsewhere`: what other machines have of their part, which then need not be here; None: as much as they
    wrote.
    `weights_only`: what a merge does not read of their part need not be here.
    """
    step = checkpoint_step(path)
    if not path.exists():
        return Rejected(path, "there is no such directory")
    if step is None or path.is_symlink() or not path.is_dir():
        return Rejected(path, "not a checkpoint directory (checkpoint-N) of fsdp-tune")
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return Rejected(path, str(error))
    except OSError as error:  # a bad sector, another user's file
        return Rejected(path, f"its {MANIFEST_NAME} cannot be read ({error.strerror})")
    if manifest is None:
        return Rejected(path, "it has no manifest: the save did not finish, or another tool wrote it")
    if manifest.kind != CHECKPOINT_KIND or manifest.facts.get("step") != step:
        return Rejected(path, f"its manifest is of `{manifest.kind}`, step {manifest.facts.get('step')}")
    bad = damage(path, manifest, digests=digests, progress=progress)
    if digests:
        mark_damaged(path, [each.name for each in bad if each.is_of_contents])
    there = _files_elsewhere(step, manifest, elsewhere)
    if weights_only and manifest.machines:
        there = there | {name for name in manifest.files if not is_of_weights(name)}
    bad = [each for each in bad if not (each.is_absent and each.name in there)]
    if bad and manifest.machines and all(each.is_absent for each in bad):
        return Rejected(path, manifest.absence([each.name for each in bad]), is_elsewhere=True)
    if bad:
        return Rejected(path, str(bad[0]) if len(bad) == 1 else f"{bad[0]} (and {len(bad) - 1} more)")
    return Checkpoint(path, step, manifest)


def _files_elsewhere(step: int, manifest: Manifest, elsewhere: Sequence[Held] | None) -> set[str]:
    if elsewhere is None:
        return {name for machine in manifest.machines for name in machine.files}
    if not elsewhere:
        return set()
    identity = manifest.identity
    return {
        name for held in elsewhere if (held.step, held.manifest) == (step, identity) for name in held.files
    }


def held_checkpoints(run: RunDir, *, digests: bool = False, progress: Progress | None = None) -> list[Held]:
    """Return what this machine's directory has of each checkpoint, newest step first.

    Digests are compared from the newest on until the files of one are as they were written.
    """
    found: list[Held] = []
    for step in sorted(
        (step for path in run.path.glob("checkpoint-*") if (step := checkpoint_step(path)) is not None),
        reverse=True,
    ):
        path, compares = run.checkpoint(step), digests and not any(each.is_verified for each in found)
        manifest = _readable_manifest(path)
        if manifest is None or manifest.kind != CHECKPOINT_KIND or manifest.facts.get("step") != step:
            continue
        bad = damage(path, manifest, digests=compares, progress=progress)
        contents = [each.name for each in bad if each.is_of_contents]
        if compares:
            mark_damaged(path, contents)
        files = sorted(manifest.files.keys() - {each.name for each in bad})
        found.append(Held(step, manifest.identity, files, is_verified=compares and not contents))
    return found


def are_verified(checkpoint: Checkpoint, elsewhere: Sequence[Held]) -> bool:
    """Return whether the other machines have just compared the digests of their parts of a checkpoint."""
    identity = checkpoint.manifest.identity if elsewhere else ""
    return all(each.is_verified for each in elsewhere if each.manifest == identity)


def _readable_manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except (OSError, ValueError):
        return None


def complete_checkpoints(
    run: RunDir, *, digests: bool = False, elsewhere: Sequence[Held] | None = (), weights_only: bool = False
) -> tuple[list[Checkpoint], list[Rejected]]:
    """Return all complete checkpoints, newest step first, and the rejected directories with reasons.

    `elsewhere` and `weights_only`: as for `inspect_checkpoint`.
    """
    complete: list[Checkpoint] = []
    rejected: list[Rejected] = []
    if run.path.is_dir():
        for path in run.path.iterdir():
            if checkpoint_step(path) is not None:
                verdict = inspect_checkpoint(
                    path, digests=digests, elsewhere=elsewhere, weights_only=weights_only
                )
                (complete if isinstance(verdict, Checkpoint) else rejected).append(verdict)  # type: ignore[arg-type]
    return sorted(complete, key=lambda c: -c.step), sorted(rejected, key=lambda r: r.path.name)


def latest_checkpoint(
    run: RunDir,
    *,
    digests: bool = False,
    progress: Progress | None = None,
    elsewhere: Sequence[Held] | None = (),
) -> tuple[Checkpoint | None, list[Rejected]]:
    """Return the newest complete checkpoint, by step and not by time, and the rejected directories.

    Digests are checked from the newest on until one is complete; `progress` is called with the number of
    bytes as they are hashed.
    `elsewhere`: as for `inspect_checkpoint`.
    """
    complete, rejected = complete_checkpoints(run, elsewhere=elsewhere)
    for candidate in complete:
        verdict = (
            inspect_checkpoint(candidate.path, digests=digests, progress=progress, elsewhere=elsewhere)
            if digests
            else candidate
        )
        if isinstance(verdict, Checkpoint):
            return verdict, rejected
        rejected.append(verdict)
    return None, rejected


def refuse_lost_recipe(run: RunDir) -> None:
    """Refuse a directory that has checkpoints of a run and no recipe.json. Raises: usage error."""
    newest = None if run.is_used else latest_checkpoint(run, elsewhere=None)[0]
    if newest is not None:
        raise usage_error(
            "recipe-missing",
            f"{run.path} has checkpoints of a run, and its recipe.json is missing",
            ways_out=(
                "put recipe.json back from a copy of the run",
                f"--resume {shlex.quote(str(newest.path))} --set output_dir=… trains on from the "
                "newest in another directory",
            ),
        )


def lacks_weights(run: RunDir, checkpoint: Checkpoint, *, best: bool) -> bool:
    """Return whether other machines have weights that the merge of a run which ended at this checkpoint
    reads, and it is not merged."""
    found = best_so_far(checkpoint.path) if best else None
    paths = {checkpoint.path, run.checkpoint(found.step) if found is not None else checkpoint.path}
    verdicts = [inspect_checkpoint(path, digests=False, weights_only=True) for path in paths]
    return not run.merged.is_dir() and any(
        isinstance(each, Rejected) and each.is_elsewhere for each in verdicts
    )


def missing_files(rejected: Rejected) -> Problem:
    """Return the problem of a checkpoint that lacks files of other machines."""
    name, run = rejected.path.name, rejected.path.parent
    return Problem(
        "checkpoint-incomplete",
        f"{name} cannot be used: {rejected.reason}",
        hint=f"start that machine's command, or copy its files of {name} into {run / name}; in a new run, "
        "`checkpoint.mirror` keeps copies",
    )


class BestStep(NamedTuple):
    step: int
    metric: float | None


def best_so_far(checkpoint: Path) -> BestStep | None:
    """Return the best step by the trainer's metric when `checkpoint` was saved; None if there was none, or
    its state is unreadable."""
    try:
        state: object = json.loads(read_regular(checkpoint / TRAINER_STATE))
    except (OSError, ValueError, RecursionError):
        return None
    found = cast("dict[str, Any]", state) if isinstance(state, dict) else {}
    step = found.get("best_global_step")
    return BestStep(step, found.get("best_metric")) if isinstance(step, int) else None


def run_of(path: Path) -> RunDir | None:
    """Return the run whose directory, or one of whose checkpoints, `path` is; None for anything else."""
    for candidate in (path, path.parent if checkpoint_step(path) is not None else path):
        if RunDir(candidate).is_used and RunDir(candidate).model.is_dir():
            return RunDir(candidate)
    return None


def checkpoint_to_start_from(path: Path) -> Checkpoint | None:
    """Resolve `model.name_or_path: RUN` or `RUN/checkpoint-N` to that checkpoint, or to the run's newest."""
    run = run_of(path)
    if run is None:
        return None
    if path == run.path:
        return latest_checkpoint(run)[0]
    verdict = inspect_checkpoint(path, digests=False)
    return verdict if isinstance(verdict, Checkpoint) else None
