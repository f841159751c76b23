"""The commands to run next: to resume a stopped run; to use, publish or extend a finished one."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from fsdp_tune.core.files import working_directory
from fsdp_tune.launch.command.resume import AUTO, takes_best
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import (
    Checkpoint,
    RunDir,
    inspect_checkpoint,
)
from fsdp_tune.run.launch_files import train_command


def commands_to_resume(run: RunDir, checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """Return the next commands for a run that stopped before its end."""
    if not run.is_used:  # it was removed, or another directory is in its place
        return ()
    command = train_command(run, "--resume", AUTO)
    if checkpoint is None:
        return (f"`{command}` starts again at step 0 in {run.path}",)
    path = shlex.quote(str(run.path))
    merging = f"`fsdp-tune merge-checkpoint {path}{_replacing(run)}` makes a model of {checkpoint.path.name}"
    can_merge = isinstance(inspect_checkpoint(checkpoint.path, digests=False, weights_only=True), Checkpoint)
    return f"`{command}` continues from {checkpoint.path.name}", *([merging] if can_merge else [])


def commands_after(run: RunDir, recipe: Recipe, merged: Path | None) -> list[str]:
    """Return at most four next commands after a finished run; paths below the current directory are relative.

    `merged`: the model, or the adapter, that was made of it.
    """
    path = shlex.quote(_short(run.path))
    if merged is None:  # the adapter of a checkpoint answers without a merge
        return [
            merge_command(run, recipe, _short(run.path)),
            *([f"fsdp-tune chat {path}"] if recipe.lora is not None else []),
            _longer(run, recipe),
        ]
    is_adapter = merged == run.adapter
    return [
        f"fsdp-tune chat {path}",
        _serving(merged, recipe if is_adapter else None),
        f"fsdp-tune push {path}{' --adapter' * is_adapter}",
        _longer(run, recipe),
    ]


def commands_of_finished(run: RunDir, recipe: Recipe) -> list[str]:
    """Return at most four next commands for a run that has finished some time ago, with what each does."""
    path = shlex.quote(_short(run.path))
    report, longer = (
        f"`fsdp-tune report {path}` draws its curves",
        f"`{_longer(run, recipe)}` trains it for longer",
    )
    if not run.merged.is_dir() and not run.adapter.is_dir():
        return [f"`{merge_command(run, recipe, _short(run.path))}` makes a model of it", report, longer]
    evaluates = (
        [f"`fsdp-tune evaluate {path}` evaluates it, with a confidence interval"]
        if recipe.data.eval is not None
        else []
    )
    return [f"`fsdp-tune chat {path}` talks to it", *evaluates, report, longer]


def merge_command(run: RunDir, recipe: Recipe, path: str) -> str:
    """Return the command that merges the model of a finished run, in place of one of an earlier end. `path`:
    of the run, as it is shown."""
    best = " --best" if takes_best(recipe) else ""
    return f"fsdp-tune merge-checkpoint {shlex.quote(path)}{best}{_replacing(run)}"


def _replacing(run: RunDir) -> str:
    return " --overwrite" if run.merged.is_dir() else ""


def _serving(model: Path, recipe: Recipe | None) -> str:
    """Return the command that serves a model; `recipe` names the base, if it is an adapter."""
    served = shlex.quote(_short(model))
    if recipe is None:
        return f"vllm serve {served}"
    base = shlex.quote(
        _short(Path(name)) if Path(name := str(recipe.model.name_or_path)).is_absolute() else name
    )
    return f"vllm serve {base} --enable-lora --lora-modules tuned={served}"


def _short(path: Path) -> str:
    here = working_directory()
    return str(path.relative_to(here)) if here is not None and path.is_relative_to(here) else str(path)


def _longer(run: RunDir, recipe: Recipe) -> str:
    """Return the command that extends a finished run."""
    steps = int(training_value(recipe.training, "max_steps"))
    epochs = math.ceil(2 * float(training_value(recipe.training, "num_train_epochs")))
    setting = f"training.max_steps={2 * steps}" if steps > 0 else f"training.num_train_epochs={epochs}"
    return train_command(run, "--resume", AUTO, "--set", setting)
