"""What to merge from SRC: the checkpoint, with its reason."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, failed_error, usage_error
from fsdp_tune.core.files import folders_in
from fsdp_tune.core.tensors.dcp_metadata import METADATA_NAME
from fsdp_tune.core.values import as_list
from fsdp_tune.merge.best_checkpoint import BY_TRAINER, BY_VALUE, best_checkpoint, best_of_trainer
from fsdp_tune.merge.weight_formats import (
    PICKLE_ENDINGS,
    SINGLE_NAME,
    Weights,
    find_weights,
    is_of_one_rank,
    is_of_verl,
)
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import better_by_score
from fsdp_tune.run.directory import (
    Checkpoint,
    Rejected,
    RunDir,
    checkpoint_step,
    complete_checkpoints,
    inspect_checkpoint,
)
from fsdp_tune.run.launch_files import read_recipe_json
from fsdp_tune.run.manifest import MANIFEST_NAME
from fsdp_tune.run.written_files import merge_record

NAMED = "it is what was named"
NEWEST = "the newest of"


@dataclass(frozen=True, slots=True)
class Selection:
    """The weights to merge and why. Several `weights` are averaged. `run` is the run directory that they
    belong to."""

    weights: tuple[Weights, ...]
    reason: str
    run: RunDir | None
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """The user's choice among the checkpoints of a run; at most one is set."""

    step: int | None = None
    best: bool = False
    average: str | None = None
    allow_incomplete: bool = False

    @property
    def is_made(self) -> bool:
        return self.step is not None or self.best or self.average is not None


def select_checkpoint(source: Path, choice: CheckpointChoice) -> Selection:
    """Find the weights under `source`: a run directory, a checkpoint of any tool, or the folder of its
    shards."""
    if (choice.step is not None) + choice.best + (choice.average is not None) > 1:
        raise usage_error(
            "merge-two-choices",
            "`--step`, `--best` and `--average` exclude each other",
            hint="pass only one of them",
        )
    if not source.exists():
        raise usage_error(
            "merge-source-not-found",
            "there is no such file or directory",
            where=Where(str(source)),
            hint="give a run directory, a `checkpoint-N`, or a folder of `.distcp` shards",
        )
    if not source.is_dir() and not source.is_file():
        raise usage_error(
            "merge-source-not-found", "this is neither a file nor a directory", where=Where(str(source))
        )
    found = find_weights(source)
    if found is None and _is_run(source):
        return _select_in_run(RunDir(source.resolve()), choice)
    if choice.is_made:
        raise usage_error(
            "merge-no-run",
            "`--step`, `--best` and `--average` choose among the checkpoints of a run directory, and "
            "this is not one",
            where=Where(str(source)),
        )
    if found is None:
        raise _nothing_to_merge(source)
    owner = _own_checkpoint(found.root)
    if owner is None:
        step = checkpoint_step(found.root) or checkpoint_step(found.root.parent)
        return Selection((replace(found, step=step),), NAMED, None)
    weights, notices = _accept(owner, found, allow_incomplete=choice.allow_incomplete)
    run = RunDir(owner.parent)
    return Selection((weights,), NAMED, run if run.is_used else None, notices)


def _is_run(source: Path) -> bool:
    return source.is_dir() and RunDir(source).is_used


def _own_checkpoint(root: Path) -> Path | None:
    """Return the `checkpoint-N` of fsdp-tune that contains `root`, in its run or copied elsewhere; None for
    other tools."""
    for folder in (root, root.parent):
        if checkpoint_step(folder) is not None and (
            RunDir(folder.parent).is_used or (folder / MANIFEST_NAME).exists()
        ):
            return folder
    return None


def _accept(path: Path, found: Weights, *, allow_incomplete: bool) -> tuple[Weights, tuple[Notice, ...]]:
    """Return the weights of a checkpoint of fsdp-tune; without a manifest it needs `--allow-incomplete` and
    gives a notice."""
    verdict = inspect_checkpoint(path, digests=False, weights_only=True)
    if isinstance(verdict, Checkpoint):
        return replace(found, checkpoint=path, step=verdict.step, manifest=verdict.manifest), ()
    if not allow_incomplete:
        raise incomplete(path, verdict.reason)
    notice = Notice(
        "merge-incomplete",
        f"{path.name} is not complete: {verdict.reason}",
        Where(str(path)),
        "its tensors are checked only as far as torch's own checksums go",
    )
    return replace(found, checkpoint=path, step=checkpoint_step(path)), (notice,)


def incomplete(path: Path, reason: str) -> FsdpTuneError:
    return failed_error(
        "merge-incomplete-checkpoint",
        f"the checkpoint is not complete: {reason}",
        where=Where(str(path)),
        ways_out=(
            "merge another checkpoint: `--step N`",
            "take what is there, with the missing parts named: `--allow-incomplete`",
        ),
    )


def _nothing_to_merge(source: Path) -> FsdpTuneError:
    if (of_verl := _of_verl(source)) is not None:
        return usage_error(
            "merge-local-state",
            f"`{of_verl.name}` is one rank's part of a model, as verl and its relatives save it; "
            "their own program merges the parts",
            where=Where(str(source)),
            hint="`python -m verl.model_merger merge --backend fsdp --local_dir "
            f"{shlex.quote(str(of_verl.parent))} --target_dir DIR`",
        )
    local = sorted(
        path.name for path in (source.iterdir() if source.is_dir() else [source]) if is_of_one_rank(path)
    )
    if local:
        return usage_error(
            "merge-local-state",
            f"`{local[0]}` is one rank's own state (LOCAL_STATE_DICT, or `use_dcp=False`); only the "
            "program that wrote it can merge it",
            where=Where(str(source)),
            hint="load it there and save it with SHARDED_STATE_DICT",
        )
    if source.is_file():
        return usage_error(
            "merge-nothing-found",
            "this kind of file is not supported",
            where=Where(str(source)),
            hint=f"files that can be merged: those of `torch.save` ({', '.join(PICKLE_ENDINGS)}) and "
            f"`{SINGLE_NAME}`; "
            "for all others, pass their directory",
        )
    inside = sorted(source.iterdir())
    below = sorted(
        (path for path in folders_in(source) if find_weights(path)),
        key=lambda path: checkpoint_step(path) or 0,
    )
    wanted = (
        f"give a run directory, a `checkpoint-N`, or the folder that holds `{METADATA_NAME}` and the "
        "`.distcp` files"
    )
    return usage_error(
        "merge-nothing-found",
        f"there is nothing to merge here (found: {', '.join(path.name for path in inside[:8]) or 'nothing'})",
        where=Where(str(source)),
        hint=f"did you mean `{below[-1]}`?" if below else wanted,
    )


def _of_verl(source: Path) -> Path | None:
    if source.is_file():
        return source if is_of_verl(source) else None
    folders = [
        source,
        *(inner := folders_in(source)),
        *(each for folder in inner for each in folders_in(folder)),
    ]
    found = sorted(path for folder in folders for path in folder.glob("*_rank_*.pt"))
    return next((path for path in found if is_of_verl(path)), None)


def newer_checkpoint(run: RunDir, output: Path) -> tuple[Notice, ...]:
    """Return a notice if `run` has a newer checkpoint than `output`, which was made of its newest at that
    time, or a better one than `output`, which was made of the best at that time, or has trained its step
    again."""
    try:
        record = merge_record(output)
        steps, reason = list(record["steps"]), str(record["reason"])
    except (KeyError, TypeError):
        return ()
    complete, _ = complete_checkpoints(run, weights_only=True)
    if not complete or not steps:
        return ()
    where, step = Where(str(output)), max(steps)
    command = "merge-checkpoint --adapter" if output == run.adapter else "merge-checkpoint"
    again = f"--overwrite {shlex.quote(str(run.path))}` writes it again"
    if reason.startswith(NEWEST) and complete[0].step > step:
        message = f"it is of step {step:,}, and the run has {complete[0].path.name} since"
        return (Notice("merge-out-of-date", message, where, f"`fsdp-tune {command} {again}"),)
    found = None
    if reason.startswith(BY_VALUE) and (better := _better_checkpoint(run, complete, steps)) is not None:
        found = f"it is of step {step:,}, and {better.path.name} has a better score now"
    elif reason.startswith(BY_TRAINER) and (best := best_of_trainer(complete)) and best.step not in steps:
        found = f"it is of step {step:,}, and the trainer's best is {best.path.name} now"
    elif reason.startswith((NEWEST, *BY_VALUE, BY_TRAINER)) and _is_trained_again(complete, record, steps):
        found = f"it is of step {step:,}, which the run has trained again since"
    if found is not None:
        best_option = "" if reason.startswith(NEWEST) else "--best "
        return (Notice("merge-out-of-date", found, where, f"`fsdp-tune {command} {best_option}{again}"),)
    return ()


def _is_trained_again(complete: list[Checkpoint], record: Mapping[str, object], steps: list[int]) -> bool:
    """Return whether a checkpoint of a merge has been replaced by another of the same step. Earlier versions
    recorded no identities."""
    now = {each.step: each.manifest.identity for each in complete}
    merged = as_list(record.get("checkpoints"))
    return any(now.get(step, identity) != identity for step, identity in zip(steps, merged, strict=False))


def _better_checkpoint(run: RunDir, complete: list[Checkpoint], steps: list[int]) -> Checkpoint | None:
    recipe = recipe_of(run)
    return better_by_score(run, recipe, complete, steps) if recipe is not None else None


ELSEWHERE = (
    "copy the files of that machine into the checkpoint here; of a finished run, `train --resume auto` "
    "on each machine brings them"
)


def _select_in_run(run: RunDir, choice: CheckpointChoice) -> Selection:
    complete, rejected = complete_checkpoints(run, weights_only=True)
    if choice.step is not None:
        return _one_step(run, choice, complete, rejected)
    if not complete:
        reasons = (
            "; ".join(f"{item.path.name}: {item.reason}" for item in rejected) or "no checkpoint-N at all"
        )
        raise failed_error(
            "merge-no-checkpoint",
            f"the run has no complete checkpoint ({reasons})",
            where=Where(str(run.path)),
            hint=_hint_about(rejected),
        )
    notices = tuple(
        Notice(
            "merge-skipped-checkpoint", f"{item.path.name} is not used: {item.reason}", Where(str(item.path))
        )
        for item in rejected
        if (checkpoint_step(item.path) or 0) > complete[0].step
    )
    if choice.average is not None:
        chosen = _averaged(run, choice.average, complete)
        steps = ", ".join(str(checkpoint.step) for checkpoint in chosen)
        return Selection(
            tuple(_weights(checkpoint) for checkpoint in chosen),
            f"the mean of the checkpoints of steps {steps}",
            run,
            notices,
        )
    if choice.best:
        checkpoint, reason = best_checkpoint(run, recipe_of(run), complete)
    else:
        checkpoint, reason = (
            complete[0],
            f"{NEWEST} {len(complete)} complete checkpoint{'s' if len(complete) > 1 else ''}",
        )
    return Selection((_weights(checkpoint),), reason, run, notices)


def _hint_about(rejected: list[Rejected]) -> str | None:
    """Return what to do about checkpoints of which none is complete; None without any."""
    if any(item.is_elsewhere for item in rejected):
        return ELSEWHERE
    return "`--step N --allow-incomplete` takes one that is not complete" if rejected else None


def _weights(checkpoint: Checkpoint) -> Weights:
    found = find_weights(checkpoint.path)
    if found is None:
        raise failed_error(
            "merge-nothing-found",
            "the checkpoint holds no weights of a model",
            where=Where(str(checkpoint.path)),
        )
    return replace(found, checkpoint=checkpoint.path, step=checkpoint.step, manifest=checkpoint.manifest)


def _one_step(
    run: RunDir, choice: CheckpointChoice, complete: list[Checkpoint], rejected: list[Rejected]
) -> Selection:
    assert choice.step is not None
    path = run.checkpoint(choice.step)
    for checkpoint in complete:
        if checkpoint.step == choice.step:
            return Selection((_weights(checkpoint),), "its step was requested", run)
    for item in rejected:
        if item.path == path and not choice.allow_incomplete:
            raise incomplete(path, item.reason)
    found = find_weights(path) if path.is_dir() else None
    if found is None:
        steps = ", ".join(str(checkpoint.step) for checkpoint in complete) or "none"
        raise usage_error(
            "merge-no-such-step",
            f"the run has no checkpoint of step {choice.step} (complete: {steps})",
            where=Where(str(run.path)),
        )
    weights, notices = _accept(path, found, allow_incomplete=choice.allow_incomplete)
    return Selection((weights,), "its step was requested", run, notices)


def _averaged(run: RunDir, text: str, complete: list[Checkpoint]) -> list[Checkpoint]:
    """`last:3`, or steps such as `100,200,300`."""
    by_step = {checkpoint.step: checkpoint for checkpoint in complete}
    word, _, number = text.partition(":")
    if word == "last" and number.isdecimal() and int(number) >= 2:
        if len(complete) < int(number):
            raise usage_error(
                "merge-average",
                f"`--average {text}` needs {number} complete checkpoints, and the run has {len(complete)}",
                where=Where(str(run.path)),
            )
        return complete[: int(number)]
    steps = text.split(",")
    if len(steps) < 2 or not all(step.strip().isdecimal() for step in steps):
        raise usage_error(
            "merge-average",
            f"`--average {text}` is not valid",
            hint="write `last:3`, or steps such as `100,200,300`",
        )
    unknown = [step.strip() for step in steps if int(step) not in by_step]
    if unknown or len({int(step) for step in steps}) < len(steps):
        what = f"no complete checkpoint of step {unknown[0]}" if unknown else "one step is named twice"
        raise usage_error(
            "merge-average",
            f"`--average {text}`: {what}",
            where=Where(str(run.path)),
            hint=f"complete: {', '.join(map(str, sorted(by_step)))}",
        )
    return [by_step[int(step)] for step in steps]


def recipe_of(run: RunDir) -> Recipe | None:
    """Return the resolved recipe of a run; None if another tool wrote the `checkpoint-N` directories."""
    try:
        return Recipe.model_validate_json(read_recipe_json(run))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        why = f"{error.error_count()} problems" if isinstance(error, ValidationError) else error.strerror
        raise failed_error(
            "merge-recipe",
            f"the run's resolved recipe cannot be read ({why})",
            where=Where(str(run.recipe_json)),
            hint="name the `checkpoint-N/pytorch_model_fsdp_0` and an `--output` outside of the run",
        ) from error
