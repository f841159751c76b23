"""What `--resume` and `--overwrite` mean for a given directory: where a run begins, or why it must not."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import DISK, must_be_filled, occupants
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, failed_error, usage_error
from fsdp_tune.core.ownership import is_abandoned, read_owner
from fsdp_tune.launch.command.resume_diff import Change, check, compare
from fsdp_tune.launch.machines.work import WorkWatch
from fsdp_tune.launch.supervise.process_tree import is_rank_of
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.effects import OnResume
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import (
    Checkpoint,
    RunDir,
    checkpoint_step,
    complete_checkpoints,
    enclosing_checkpoint,
    inspect_checkpoint,
    latest_checkpoint,
)
from fsdp_tune.run.lock import in_use, locked, refuse_when_held
from fsdp_tune.run.manifest import Progress
from fsdp_tune.run.rank_files import read_heartbeat, read_outcome

AUTO = "auto"
# Keys that say how long a run is; when they are unchanged, a finished run stays finished.
LENGTH_KEYS = frozenset({"training.max_steps", "training.num_train_epochs", "training.global_batch_size"})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What every use of a run directory changes."""

    launched: bytes | None
    """launch.json, which each command writes again; None where there is none."""
    checkpoints: frozenset[str]
    """Ranks that are started without a command write these alone."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins. `checkpoint` None: step 0."""

    checkpoint: Checkpoint | None = None
    is_new: bool = True
    """Whether the run directory has still to be made."""
    is_finished: bool = False
    """Nothing is left to do."""
    trajectory_changes: Sequence[Change] = ()
    notices: Sequence[Notice] = ()
    digests_checked: bool = False
    data_key: str | None = field(default=None)
    """Content key of the data that the steps so far were trained on; None for a new run."""
    snapshot: Snapshot | None = None
    """Of the directory, before anything else in it was read."""

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.checkpoint.step if self.checkpoint else 0


def decide(
    run: RunDir, recipe: Recipe, resume: str | None, *, overwrite: bool, digests: bool = True, progress: Progress | None = None
) -> Start:
    """Decide where a run starts; reads only. `resume` None: a new run.

    `digests` False leaves the bytes of checkpoints unread, for an answer at once. `progress` is called with the bytes as they are read.
    Raises: a usage error (exit 2) with the ways out, where the directory must not be used like this.
    """
    if run.path.is_symlink() and not run.path.exists():
        raise usage_error("bad-output-dir", f"{run.path} is a link that leads nowhere", hint="remove it, or name another `output_dir`")
    if (checkpoint := enclosing_checkpoint(run.path)) is not None:
        message = f"{run.path} is inside the checkpoint {checkpoint}, and would be removed together with it"
        raise usage_error("output-in-checkpoint", message, hint="name another `output_dir`")
    _refuse_open_directory(run)
    snapshot = _snapshot(run)  # first: another command may use the directory while checkpoints are hashed
    refuse_when_held(run)
    _refuse_live_ranks(run)
    if overwrite and resume is not None:
        message = f"`--overwrite` starts over and `--resume {resume}` continues; pass only one of them"
        raise usage_error("contradiction", message)
    if resume is None:
        start = _fresh(run, overwrite=overwrite)
    elif resume == AUTO:
        start = _newest(run, recipe, digests=digests and recipe.checkpoint.verify == "digest", progress=progress)
    else:
        start = _explicit(run, recipe, Path(resume))
    if not start.is_finished:
        _refuse_read_only(run)
    max_steps = training_value(recipe.training, "max_steps")
    refuse_beyond_end(start, max_steps if isinstance(max_steps, int) and max_steps > 0 else None)
    return replace(start, snapshot=snapshot)


def refuse_beyond_end(start: Start, total_steps: int | None) -> None:
    """Refuses (exit 2) to resume a checkpoint of more steps than the recipe trains: nothing would be trained, and a longer run's model
    would be reported as this one's. `total_steps` None: not known before the data are prepared.
    """
    if start.is_finished or start.checkpoint is None or total_steps is None or start.step <= total_steps:
        return
    earlier = next((one for one in complete_checkpoints(RunDir(start.checkpoint.path.parent))[0] if one.step <= total_steps), None)
    ways_out = [f"--set training.max_steps={start.step} or more (or more epochs) trains on from it"]
    if earlier is not None:
        ways_out.append(f"--resume {earlier.path} --set output_dir=… resumes an earlier checkpoint in a new directory")
    raise usage_error(
        "checkpoint-beyond-end",
        f"{start.checkpoint.path} is at step {start.step:,}, and the recipe ends at step {total_steps:,}",
        ways_out=(*ways_out, "--overwrite moves the run aside and starts over"),
    )


def _refuse_read_only(run: RunDir) -> None:
    """Before data are prepared for an hour."""
    there = next(path for path in (run.path, *run.path.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        message = f"nothing can be written into {there}: it is read-only, or belongs to somebody else"
        raise usage_error("bad-output-dir", message, hint="name another `output_dir`, or change the permission")


def _refuse_open_directory(run: RunDir) -> None:
    """Whoever may write into a run directory may put files in the place of ours, or links to other people's."""
    stays_as_it_is = run.is_used or must_be_filled(run.path)
    if stays_as_it_is and run.path.stat().st_mode & stat.S_IWOTH:
        raise usage_error(
            "run-directory-open",
            f"{run.path} can be written by everybody on this machine",
            hint=f"`chmod o-w {shlex.quote(str(run.path))}`",
        )


def _refuse_live_ranks(run: RunDir) -> None:
    """Ranks that were started by hand have no command that holds the directory for them."""
    beats = itertools.takewhile(lambda beat: beat is not None, (read_heartbeat(run, rank) for rank in itertools.count()))
    live = [beat.pid for beat in beats if beat is not None and is_rank_of(run.path, beat.rank, beat.pid)]
    if live:
        raise in_use(run, f"ranks that still run (pid {', '.join(map(str, live))})")


def _fresh(run: RunDir, *, overwrite: bool) -> Start:
    if run.is_used and not overwrite:
        raise usage_error(
            "run-directory-used",
            f"{run.path} holds a run already",
            ways_out=(
                "--resume auto goes on from its newest checkpoint",
                "--set output_dir=… or --name … uses another directory",
                "--overwrite moves it aside and begins anew",
            ),
        )
    if run.is_used and must_be_filled(run.path):
        raise usage_error(
            "bad-output-dir",
            f"{run.path} is a mount point, a link, or in a directory that cannot be written: the run in it cannot be moved aside",
            ways_out=("--set output_dir=… uses another directory, also one inside it", "remove what is in it"),
        )
    _refuse_foreign(run)
    return Start()


def _refuse_foreign(run: RunDir) -> None:
    """A directory with somebody else's files is not ours to fill, nor to move aside."""
    if run.is_used:
        return
    if foreign := occupants(run.path, ignored=("lost+found", run.lock.name)):  # a mount point is locked before it is filled
        shown = ", ".join(foreign[:3]) + (" …" if len(foreign) > 3 else "")
        raise usage_error(
            "directory-not-empty", f"{run.path} is no run of this tool and is not empty ({shown})", hint="name another `output_dir`"
        )


def _newest(run: RunDir, recipe: Recipe, *, digests: bool, progress: Progress | None) -> Start:
    if not run.is_used:
        _refuse_foreign(run)
        return Start()
    old = read_resolved(run)
    changes = compare(old, recipe)
    trajectory = check(changes)
    checkpoint, rejected = latest_checkpoint(run, digests=digests, progress=progress)
    notices = [Notice("checkpoint-rejected", f"{bad.path.name} is not used: {bad.reason}") for bad in rejected]
    if checkpoint is None:
        notices.append(Notice("no-checkpoint", f"{run.path} has no complete checkpoint: training begins at step 0"))
    return Start(
        checkpoint,
        is_new=False,
        is_finished=checkpoint is not None
        and checkpoint.step == _finished_step(run)
        and not any(change.key in LENGTH_KEYS for change in changes),
        trajectory_changes=trajectory,
        notices=notices,
        digests_checked=digests,
        data_key=read_data_key(run),
    )


def _explicit(run: RunDir, recipe: Recipe, path: Path) -> Start:
    path = path.resolve()
    verdict = inspect_checkpoint(path, digests=False)
    if not isinstance(verdict, Checkpoint):
        there = RunDir(path if RunDir(path).is_used else path.parent)
        newest, _ = latest_checkpoint(there)
        hint = f"the newest complete checkpoint there is {newest.path}" if newest else "give a `checkpoint-N` directory, or `auto`"
        raise usage_error("checkpoint-unusable", f"--resume {path}: {verdict.reason}", hint=hint)
    source = RunDir(path.parent)
    if run.is_used and not _same(run.path, source.path):
        raise usage_error(
            "run-directory-used",
            f"{run.path} holds a run already, and {path} is of another",
            ways_out=(f"--set output_dir={source.path} goes on in its own run", "--set output_dir=… uses a new directory"),
        )
    _refuse_foreign(run)
    trajectory = check(compare(read_resolved(source), recipe)) if source.is_used else []
    later = [other for other in source.path.iterdir() if (checkpoint_step(other) or 0) > verdict.step] if run.is_used else []
    if later:
        names = ", ".join(sorted(other.name for other in later))
        raise usage_error(
            "later-checkpoints",
            f"{run.path} has checkpoints after step {verdict.step} ({names}), which the run would write again",
            ways_out=("--resume auto goes on from the newest", "--set output_dir=… goes on in a new directory", "remove them"),
        )
    return Start(verdict, is_new=not run.is_used, trajectory_changes=trajectory, data_key=read_data_key(source))


def _snapshot(run: RunDir) -> Snapshot:
    checkpoints = frozenset(path.name for path in run.path.glob("checkpoint-*"))
    return Snapshot(run.launch_json.read_bytes() if run.launch_json.exists() else None, checkpoints)


def refuse_when_continued(run: RunDir, start: Start) -> None:
    """Raise a usage error where the directory has been used since `start` was decided. Call it while owning the directory."""
    if start.is_new:
        return
    _refuse_live_ranks(run)
    if _snapshot(run) != start.snapshot:
        message = f"another command continued {run.path} while this one checked its inputs, and has ended"
        raise usage_error("run-in-use", message, hint="run this command again: it continues from what is there now")


def _same(left: Path, right: Path) -> bool:
    return left.resolve() == right.resolve()


def ways_on(run: RunDir, checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """The next commands for a run that has stopped before its end."""
    if not run.path.is_dir():
        return ()
    if checkpoint is None:
        return (f"`fsdp-tune train … --resume auto` begins again at step 0 in {run.path}",)
    replacing = " --overwrite" if run.merged.is_dir() else ""  # of an earlier end
    return (
        f"`fsdp-tune train … --resume auto` goes on from {checkpoint.path.name}",
        f"`fsdp-tune merge-checkpoint {run.path}{replacing}` makes a model of {checkpoint.path.name}",
    )


def read_resolved(run: RunDir) -> Recipe:
    """The recipe that a run was last started with."""
    try:
        recipe = Recipe.model_validate_json(run.recipe_json.read_bytes())
        if recipe.launch.num_processes == "auto":
            raise ValueError("it is not resolved")
    except (OSError, ValueError) as error:
        where = Where(str(run.recipe_json))
        message = f"cannot be read as a recipe of this version: {str(error).splitlines()[0]}"
        raise FsdpTuneError(Problem("run-unreadable", message, where, "continue with the version that wrote it, or begin anew")) from error
    return recipe


def read_data_key(run: RunDir) -> str | None:
    """The content key in RUN/data.json; None where there is none."""
    try:
        raw: Any = json.loads(run.data_json.read_bytes())
        return str(raw["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_data(start: Start, key: str) -> None:
    """Refuses training data that a resumed run was not trained on (exit 2). `key` is `Prepared.key`."""
    if start.data_key is not None and key != start.data_key:
        raise usage_error(
            "data-changed",
            "the training data are no longer those that the run began with: the files, their order or the tokenizer have changed",
            ways_out=("bring the old data back", "--overwrite or --set output_dir=… begins a new run on the new data"),
        )


def wait_for_run(
    run: RunDir, recipe: Recipe, resume: str | None = None, *, patience_seconds: float = 3600.0, poll_seconds: float = 2.0
) -> bool:
    """Wait until the first machine has written the run directory for this recipe and owns it, then return True.

    Returns False where `resume` finds a finished run: the first machine starts no ranks.
    Machines may differ in what only they use (cores); what is trained and the number of ranks must agree.
    Raises: FailedError when it has not within `patience_seconds`, nor has its count of work changed for so long.
    """
    work, is_checked = WorkWatch(run), resume != AUTO
    while True:
        if run.is_used and is_for(run, recipe):
            if read_owner(run.lock) is not None and not is_abandoned(run.lock):
                return True
            if not is_checked and _newest(run, recipe, digests=False, progress=None).is_finished:
                is_checked = True  # checkpoints are hashed once
                if _newest(run, recipe, digests=recipe.checkpoint.verify == "digest", progress=None).is_finished:
                    return False
        if work.silent_seconds() > patience_seconds:
            raise failed_error(
                "first-machine-missing",
                f"the first machine has not started this recipe in {run.path}, nor counted work for it, within {patience_seconds:.0f} s",
                hint="all machines must see the same directory, and be given the same recipe and `--set`",
            )
        time.sleep(poll_seconds)


def is_for(run: RunDir, recipe: Recipe) -> bool:
    """Return whether the run directory is for what this machine was given, apart from keys that may differ by machine."""
    theirs = read_resolved(run)
    same_launch = (theirs.world_size, theirs.launch.num_machines) == (recipe.world_size, recipe.launch.num_machines)
    return same_launch and all(change.kind is OnResume.FREE for change in compare(theirs, recipe))


def _finished_step(run: RunDir) -> int | None:
    """Where the run came to its end; None for one that has not. Its last checkpoint may have been damaged or removed since."""
    outcome = read_outcome(run, 0)
    return outcome.step if outcome is not None and outcome.exit_code == 0 else None


def move_aside(run: RunDir) -> Path:
    """Renames a used directory out of the way, for `--overwrite`; nothing of it is lost. Exit 2 where it is in use by now."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = run.path.with_name(f"{run.path.name}.old-{stamp}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}-{os.getpid()}")
    with locked(run):
        DISK.rename(run.path, aside)
    DISK.fsync_dir(run.path.parent)
    return aside
