"""Resolve `--resume` and `--overwrite` for a directory: where the run starts and which changes of its recipe
it accepts."""

from __future__ import annotations

import itertools
import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_tune.core.atomic import DISK, needs_filling, occupants
from fsdp_tune.core.errors import FailedError, FsdpTuneError, Notice, Problem, Where, usage_error
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.core.ownership import is_rank_of
from fsdp_tune.launch.command.recipe_changes import Change, check, compare
from fsdp_tune.recipe.references import missing_start_inputs
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.claim import in_use, locked, refuse_when_held
from fsdp_tune.run.directory import (
    Checkpoint,
    Held,
    Rejected,
    RunDir,
    are_verified,
    checkpoint_step,
    complete_checkpoints,
    enclosing_checkpoint,
    inspect_checkpoint,
    lacks_weights,
    latest_checkpoint,
    missing_files,
    name_aside,
    refuse_lost_recipe,
)
from fsdp_tune.run.launch_files import ResumeRequest, read_recipe_json
from fsdp_tune.run.manifest import Progress
from fsdp_tune.run.rank_files import read_heartbeat, read_outcome
from fsdp_tune.run.records import read_object

AUTO = "auto"
# Keys that set the length of a run. If they are unchanged, a finished run stays finished.
LENGTH_KEYS = frozenset({"training.max_steps", "training.num_train_epochs"})


@dataclass(frozen=True, slots=True)
class RunRevision:
    """The part of a run directory that every use changes."""

    launched: bytes | None
    """launch.json, which each command rewrites; None if there is none."""
    checkpoints: frozenset[str]
    """Ranks that are started manually write only these."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts. `checkpoint` None: step 0."""

    checkpoint: Checkpoint | None = None
    is_new: bool = True
    """Whether the run directory does not exist yet."""
    is_finished: bool = False
    """Whether no step is left to train."""
    trajectory_changes: Sequence[Change] = ()
    notices: Sequence[Notice] = ()
    digests_checked: bool = False
    data_key: str | None = field(default=None)
    """Content key of the training data so far; None for a new run."""
    revision: RunRevision | None = None
    """The directory before anything else in it was read."""
    from_run: Sequence[str] = ()
    """Keys of the recipe whose files are gone, and taken from the checkpoint's run."""
    ends_here: bool = False
    """Whether the run has ended there, and ranks only bring its weights to the first machine."""

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.checkpoint.step if self.checkpoint else 0


def decide_start(
    run: RunDir,
    recipe: Recipe,
    resume: str | None,
    *,
    overwrite: bool,
    digests: bool = True,
    progress: Progress | None = None,
    elsewhere: Sequence[Held] | None = (),
) -> Start:
    """Decide where a run starts; reads only. `resume` None: a new run.

    `digests` False skips reading checkpoints, for an immediate answer. `progress` is called with the number
    of bytes read.
    `elsewhere`: what other machines have of their part of checkpoints; None: as much as they wrote.
    Raises: usage error (exit 2) with alternatives, if the directory must not be used like this.
    """
    if run.path.is_symlink() and not run.path.exists():
        raise usage_error(
            "bad-output-dir", f"{run.path} is a dangling link", hint="remove it, or name another `output_dir`"
        )
    if (checkpoint := enclosing_checkpoint(run.path)) is not None:
        message = f"{run.path} is inside the checkpoint {checkpoint}, and would be removed together with it"
        raise usage_error("output-in-checkpoint", message, hint="name another `output_dir`")
    _refuse_open_directory(run)
    revision = _revision(run)  # first: another command may use the directory while checkpoints are hashed
    refuse_when_held(run)
    _refuse_live_ranks(run)
    if overwrite and resume is not None:
        message = f"`--overwrite` starts over and `--resume {resume}` continues; pass only one of them"
        raise usage_error("contradiction", message)
    if resume is None:
        start = _fresh(run, overwrite=overwrite)
    elif resume == AUTO:
        start = _newest(
            run,
            recipe,
            digests=digests and recipe.checkpoint.verify == "digest",
            progress=progress,
            elsewhere=elsewhere,
        )
    else:
        start = _explicit(run, recipe, Path(resume), elsewhere)
    if not start.is_finished:
        _refuse_read_only(run)
    max_steps = training_value(recipe.training, "max_steps")
    refuse_beyond_end(start, max_steps if isinstance(max_steps, int) and max_steps > 0 else None)
    return replace(_without_missing_inputs(start, recipe), revision=revision)


def _without_missing_inputs(start: Start, recipe: Recipe) -> Start:
    """Return the start with what it takes from the checkpoint's run, since the files that the recipe names
    are gone."""
    if start.checkpoint is None or start.is_finished:
        return start
    kept = start.checkpoint.path.parent / "model"
    gone = missing_start_inputs(recipe)
    notices = [
        Notice(
            "input-from-run",
            f"`{key}` is `{name}`, which is not there: {kept} has what the resume needs of it",
        )
        for key, name in gone.items()
    ]
    return replace(start, from_run=tuple(gone), notices=[*start.notices, *notices])


def refuse_beyond_end(start: Start, total_steps: int | None) -> None:
    """Refuse a checkpoint of more steps than the recipe trains: the model of a longer run would be reported
    as this one's.

    `total_steps` None: unknown until the data are prepared. Raises: usage error (exit 2).
    """
    if start.is_finished or start.checkpoint is None or total_steps is None or start.step <= total_steps:
        return
    earlier = next(
        (
            one
            for one in complete_checkpoints(RunDir(start.checkpoint.path.parent))[0]
            if one.step <= total_steps
        ),
        None,
    )
    ways_out = [f"--set training.max_steps={start.step} or more (or more epochs) trains on from it"]
    if earlier is not None:
        ways_out.append(
            f"--resume {earlier.path} --set output_dir=… resumes an earlier checkpoint in a new directory"
        )
    raise usage_error(
        "checkpoint-beyond-end",
        f"{start.checkpoint.path} is at step {start.step:,}, and the recipe ends at step {total_steps:,}",
        ways_out=(*ways_out, "--overwrite moves the run aside and starts over"),
    )


def _refuse_read_only(run: RunDir) -> None:
    """Refuse a read-only directory before the data are prepared, which may take an hour."""
    there = next(path for path in (run.path, *run.path.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        message = f"{there} is not writable: it is read-only or belongs to another user"
        raise usage_error(
            "bad-output-dir", message, hint="name another `output_dir`, or change the permission"
        )


def _refuse_open_directory(run: RunDir) -> None:
    """Refuse a world-writable directory: other users could replace files, or link them elsewhere."""
    stays_as_it_is = run.is_used or needs_filling(run.path)
    if stays_as_it_is and run.path.stat().st_mode & stat.S_IWOTH:
        raise usage_error(
            "run-directory-open",
            f"{run.path} is writable by every user of this machine",
            hint=f"`chmod o-w {shlex.quote(str(run.path))}`",
        )


def _refuse_live_ranks(run: RunDir) -> None:
    """Refuse a directory with live ranks that were started manually, without a command that locks it."""
    beats = itertools.takewhile(
        lambda beat: beat is not None, (read_heartbeat(run, rank) for rank in itertools.count())
    )
    live = [beat.pid for beat in beats if beat is not None and is_rank_of(run.path, beat.rank, beat.pid)]
    if live:
        raise in_use(run, f"ranks that still run (pid {', '.join(map(str, live))})")


def _fresh(run: RunDir, *, overwrite: bool) -> Start:
    if run.is_used and not overwrite:
        raise usage_error(
            "run-directory-used",
            f"{run.path} already holds a run",
            ways_out=(
                "--resume auto continues from its newest checkpoint",
                "--set output_dir=… or --name … uses another directory",
                "--overwrite moves it aside and starts over",
            ),
        )
    if run.is_used and needs_filling(run.path):
        raise usage_error(
            "bad-output-dir",
            f"{run.path} is a mount point, a link, or in a directory that cannot be written: the run "
            "in it cannot be moved aside",
            ways_out=("--set output_dir=… uses another directory, also one inside it", "remove its contents"),
        )
    _refuse_foreign(run)
    return Start()


def _refuse_foreign(run: RunDir) -> None:
    """Refuse a directory with other files: it is neither filled nor moved aside."""
    if run.is_used:
        return
    # a mount point is locked before it is filled
    if foreign := occupants(run.path, ignored=("lost+found", run.lock.name)):
        refuse_lost_recipe(run)
        shown = ", ".join(foreign[:3]) + (" …" if len(foreign) > 3 else "")
        what = f"{run.path} is not a run of this tool and not empty ({shown})"
        raise usage_error("directory-not-empty", what, hint="name another `output_dir`")


def _newest(
    run: RunDir, recipe: Recipe, *, digests: bool, progress: Progress | None, elsewhere: Sequence[Held] | None
) -> Start:
    if not run.is_used:
        _refuse_foreign(run)
        return Start()
    old = read_resolved(run)
    changes = compare(old, recipe)
    trajectory = check(changes)
    checkpoint, rejected = latest_checkpoint(run, digests=digests, progress=progress, elsewhere=elsewhere)
    if checkpoint is None and recipe.checkpoint.mirror is None:  # which may have the files
        refuse_without_files(rejected)
    notices = [
        Notice("checkpoint-rejected", f"{bad.path.name} is not used: {bad.reason}") for bad in rejected
    ]
    if checkpoint is None:
        notices.append(
            Notice("no-checkpoint", f"{run.path} has no complete checkpoint: training starts at step 0")
        )
    is_finished = ends_here = False
    if checkpoint is not None and not any(change.key in LENGTH_KEYS for change in changes):
        is_finished = checkpoint.step == _finished_step(run)
        brings = (
            is_finished and recipe.merge.at_end and lacks_weights(run, checkpoint, best=takes_best(recipe))
        )
        ends_here = brings or (
            not is_finished
            and checkpoint.step == (ResumeRequest.read(run.resume_json) or ResumeRequest()).ends_at
        )
    return Start(
        checkpoint,
        is_new=False,
        is_finished=is_finished and not ends_here,
        ends_here=ends_here,
        trajectory_changes=trajectory,
        notices=notices,
        digests_checked=digests and checkpoint is not None and are_verified(checkpoint, elsewhere or ()),
        data_key=read_data_key(run),
    )


def refuse_without_files(rejected: Sequence[Rejected]) -> None:
    """Refuse to start over since files of other machines are missing. Raises: FailedError with the newest
    checkpoint, and what it lacks."""
    lacking = [each for each in rejected if each.is_elsewhere]
    if lacking:
        raise FailedError(missing_files(max(lacking, key=lambda each: checkpoint_step(each.path) or 0)))


def _explicit(run: RunDir, recipe: Recipe, path: Path, elsewhere: Sequence[Held] | None) -> Start:
    path = path.resolve()
    if recipe.has_own_directories and not _same(run.path, path.parent):
        raise usage_error(
            "checkpoint-unusable",
            f"--resume {path}: it is not in {run.path}, and each machine has its part in its own run "
            "directory",
            ways_out=("--resume auto continues the run of `output_dir`", "copy it there on each machine"),
        )
    verdict = inspect_checkpoint(path, digests=False, elsewhere=elsewhere)
    if isinstance(verdict, Rejected):
        refuse_without_files([verdict])
    if not isinstance(verdict, Checkpoint):
        there = RunDir(path if RunDir(path).is_used else path.parent)
        newest, _ = latest_checkpoint(there)
        hint = (
            f"the newest complete checkpoint there is {newest.path}"
            if newest
            else "give a `checkpoint-N` directory, or `auto`"
        )
        raise usage_error("checkpoint-unusable", f"--resume {path}: {verdict.reason}", hint=hint)
    source = RunDir(path.parent)
    if run.is_used and not _same(run.path, source.path):
        raise usage_error(
            "run-directory-used",
            f"{run.path} already holds a run, and {path} belongs to another",
            ways_out=(
                f"--set output_dir={source.path} continues in its own run",
                "--set output_dir=… uses a new directory",
            ),
        )
    _refuse_foreign(run)
    trajectory = check(compare(read_resolved(source), recipe)) if source.is_used else []
    later = (
        [other for other in source.path.iterdir() if (checkpoint_step(other) or 0) > verdict.step]
        if run.is_used
        else []
    )
    if later:
        names = ", ".join(sorted(other.name for other in later))
        raise usage_error(
            "later-checkpoints",
            f"{run.path} has checkpoints after step {verdict.step} ({names}), which the run would overwrite",
            ways_out=(
                "--resume auto continues from the newest",
                "--set output_dir=… continues in a new directory",
                "remove them",
            ),
        )
    return Start(
        verdict, is_new=not run.is_used, trajectory_changes=trajectory, data_key=read_data_key(source)
    )


def _revision(run: RunDir) -> RunRevision:
    checkpoints = frozenset(path.name for path in run.path.glob("checkpoint-*"))
    return RunRevision(read_regular(run.launch_json) if run.launch_json.exists() else None, checkpoints)


def is_unused_since(run: RunDir, start: Start) -> bool:
    """Return whether no command has used the directory since the start was decided."""
    return _revision(run) == start.revision


def refuse_when_continued(run: RunDir, start: Start) -> None:
    """Refuse a directory that was used after `start` was decided. Call it while owning the directory. Raises:
    usage error."""
    if start.is_new:
        return
    _refuse_live_ranks(run)
    if not is_unused_since(run, start):
        message = f"another command continued {run.path} while this one checked its inputs, and has ended"
        raise usage_error(
            "run-in-use", message, hint="run this command again: it continues from what is there now"
        )


def _same(left: Path, right: Path) -> bool:
    return left.resolve() == right.resolve()


def takes_best(recipe: Recipe) -> bool:
    """Whether the model of a finished run is its best checkpoint, and not its last."""
    return bool(training_value(recipe.training, "load_best_model_at_end"))


def read_resolved(run: RunDir) -> Recipe:
    """Return the recipe that a run was last started with. Raises: FsdpTuneError if this version cannot read
    it."""
    try:
        recipe = parse_resolved(read_regular(run.recipe_json), str(run.recipe_json))
        read_recipe_json(run)
    except OSError as error:
        raise _unreadable(str(run.recipe_json), error) from error
    return recipe


def parse_resolved(raw: bytes, source: str) -> Recipe:
    """Return the recipe in a recipe.json. `source`: its path or URL. Raises: FsdpTuneError if this version
    cannot read it."""
    try:
        recipe = Recipe.model_validate_json(raw)
        if recipe.launch.num_processes == "auto":
            raise ValueError("it is not resolved")
    except ValueError as error:
        raise _unreadable(source, error) from error
    return recipe


def _unreadable(source: str, error: Exception) -> FsdpTuneError:
    message = f"cannot be read as a recipe of this version: {first_line(error)}"
    return FsdpTuneError(
        Problem(
            "run-unreadable", message, Where(source), "continue with the version that wrote it, or start over"
        )
    )


def read_data_key(run: RunDir) -> str | None:
    """Return the content key in RUN/data.json, or None."""
    try:
        raw = read_object(run.data_json)
        return str(raw["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_data(start: Start, key: str) -> None:
    """Refuse data other than those of the earlier steps. `key` is `Prepared.key`. Raises: usage error (exit
    2)."""
    if start.data_key is not None and key != start.data_key:
        raise usage_error(
            "data-changed",
            "the training data are not those that the run started with: the files, their order or "
            "the tokenizer changed",
            ways_out=(
                "restore the old data",
                "--overwrite or --set output_dir=… starts a new run on the new data",
            ),
        )


def _finished_step(run: RunDir) -> int | None:
    """Return the step at which the run finished, or None. Its last checkpoint may have been damaged or
    removed since."""
    outcome = read_outcome(run, 0)
    return outcome.step if outcome is not None and outcome.exit_code == 0 else None


def move_aside(run: RunDir) -> Path:
    """Rename a used directory for `--overwrite`, keeping its contents. Raises: usage error (exit 2) if it is
    in use."""
    aside = name_aside(run.path)
    with locked(run):
        DISK.rename(run.path, aside)
    DISK.fsync_dir(run.path.parent)
    return aside
