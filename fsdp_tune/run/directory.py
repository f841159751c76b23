"""Every path that a run owns, and the one answer to "which checkpoint is the newest complete one"."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, Progress, damage, mark_damaged, read_manifest

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
CHECKPOINT_KIND = "fsdp-tune checkpoint"
SHARD_FOLDER = "pytorch_model_fsdp_0"
"""The sharded weights of a checkpoint: Accelerate's name, so that its tools find them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Rejected:
    """A directory that looks like a checkpoint and must not be used, with the reason."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe_yaml(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def recipe_json(self) -> Path:
        return self.path / "recipe.json"

    def recipe_digest(self) -> str | None:
        """Of the resolved recipe, as checkpoints and merged models cite it; None for a directory without one."""
        try:
            return f"blake2b:{hashlib.blake2b(self.recipe_json.read_bytes(), digest_size=32).hexdigest()}"
        except FileNotFoundError:
            return None

    @property
    def history(self) -> Path:
        return self.path / "history"

    @property
    def launch_json(self) -> Path:
        return self.path / "launch.json"

    @property
    def resume_json(self) -> Path:
        return self.path / "resume.json"

    @property
    def accelerate_yaml(self) -> Path:
        return self.path / "accelerate.yaml"

    @property
    def environment_json(self) -> Path:
        return self.path / "environment.json"

    @property
    def plan_json(self) -> Path:
        return self.path / "plan.json"

    @property
    def data_json(self) -> Path:
        """Where the prepared data lies (cache directories), its accounting and its content key."""
        return self.path / "data.json"

    @property
    def readback_json(self) -> Path:
        return self.path / "readback.json"

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        return self.logs / "launcher.log"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}.log"

    def rank_outcome(self, rank: int) -> Path:
        """Written by each rank as its last act: exit code, exit reason and, if any, the error."""
        return self.logs / f"rank-{rank:04d}.outcome.json"

    def rank_heartbeat(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:04d}.heartbeat.json"

    @property
    def flight_recorder(self) -> Path:
        """What torch remembers of each rank's collectives, written when a rank stands still; for `torchfrtrace`."""
        return self.logs / "flight-recorder"

    @property
    def hang_report(self) -> Path:
        """Where every rank stood when a run was ended because nothing moved."""
        return self.logs / "hang.txt"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trackers_json(self) -> Path:
        """The ids of the runs that trackers have of this run."""
        return self.path / "trackers.json"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def merged(self) -> Path:
        return self.path / "merged"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    def checkpoint(self, step: int) -> Path:
        return self.path / f"checkpoint-{step}"

    @property
    def is_used(self) -> bool:
        return self.recipe_json.exists()


def checkpoint_step(path: Path) -> int | None:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def enclosing_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint of ours that `path` is in, or None. What is in a checkpoint is removed together with it."""
    return next(
        (folder for folder in path.resolve().parents if checkpoint_step(folder) is not None and (folder / MANIFEST_NAME).is_file()), None
    )


def inspect_checkpoint(path: Path, *, digests: bool, progress: Progress | None = None) -> Checkpoint | Rejected:
    """Decide whether one directory is a complete checkpoint of ours.

    With `digests` every file is read, and contents that differ are recorded: such a checkpoint is rejected from then on without reading.
    """
    step = checkpoint_step(path)
    if not path.exists():
        return Rejected(path, "there is no such directory")
    if step is None or path.is_symlink() or not path.is_dir():
        return Rejected(path, "no checkpoint directory (checkpoint-N) of this tool")
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return Rejected(path, str(error))
    if manifest is None:
        return Rejected(path, "it has no manifest: the save did not finish, or another tool wrote it")
    if manifest.kind != CHECKPOINT_KIND or manifest.facts.get("step") != step:
        return Rejected(path, f"its manifest is of `{manifest.kind}`, step {manifest.facts.get('step')}")
    bad = damage(path, manifest, digests=digests, progress=progress)
    if digests:
        mark_damaged(path, [each.name for each in bad if each.is_of_contents])
    if bad:
        return Rejected(path, str(bad[0]) if len(bad) == 1 else f"{bad[0]} (and {len(bad) - 1} more)")
    return Checkpoint(path, step, manifest)


def complete_checkpoints(run: RunDir, *, digests: bool = False) -> tuple[list[Checkpoint], list[Rejected]]:
    """All complete checkpoints, newest step first, and what was rejected on the way, with reasons."""
    complete: list[Checkpoint] = []
    rejected: list[Rejected] = []
    if run.path.is_dir():
        for path in run.path.iterdir():
            if checkpoint_step(path) is not None:
                verdict = inspect_checkpoint(path, digests=digests)
                (complete if isinstance(verdict, Checkpoint) else rejected).append(verdict)  # type: ignore[arg-type]
    return sorted(complete, key=lambda c: -c.step), sorted(rejected, key=lambda r: r.path.name)


def latest_checkpoint(run: RunDir, *, digests: bool = False, progress: Progress | None = None) -> tuple[Checkpoint | None, list[Rejected]]:
    """Return the newest complete checkpoint, by step and not by time, and what was rejected on the way.

    Digests are checked newest first, only as far as needed; `progress` is called with the number of bytes, as they are hashed.
    """
    complete, rejected = complete_checkpoints(run)
    for candidate in complete:
        verdict = inspect_checkpoint(candidate.path, digests=digests, progress=progress) if digests else candidate
        if isinstance(verdict, Checkpoint):
            return verdict, rejected
        rejected.append(verdict)
    return None, rejected


def run_of(path: Path) -> RunDir | None:
    """The run that `path` names: a run directory itself, or one of its `checkpoint-N`; None for anything else."""
    for candidate in (path, path.parent if checkpoint_step(path) is not None else path):
        if RunDir(candidate).is_used and RunDir(candidate).model.is_dir():
            return RunDir(candidate)
    return None


def checkpoint_to_start_from(path: Path) -> Checkpoint | None:
    """The weights that `model.name_or_path: RUN` or `RUN/checkpoint-N` means: that checkpoint, or the run's newest."""
    run = run_of(path)
    if run is None:
        return None
    if path == run.path:
        return latest_checkpoint(run)[0]
    verdict = inspect_checkpoint(path, digests=False)
    return verdict if isinstance(verdict, Checkpoint) else None
