"""Write the run directory: all or nothing for a new run; on resume file by file, keeping the old files in
history/."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from fsdp_tune.core.atomic import DISK, needs_filling, staged_directory, stages_inside, undo_fill, write_file
from fsdp_tune.core.clocks import seconds_since_boot
from fsdp_tune.core.command import ProfiledSteps
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.secrets import mask_text
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.recipe.fsdp_arguments import accelerate_config
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.claim import locked
from fsdp_tune.run.directory import RunDir, digest_of_recipe
from fsdp_tune.run.events import RecipeChanged
from fsdp_tune.run.launch_files import LaunchRecord, ResumeRequest
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.run.rank_files import clear
from fsdp_tune.run.records import Document, Environment
from fsdp_tune.run.written_files import model_files, record_model_files


@dataclass(frozen=True, slots=True)
class RunFiles:
    recipe_text: str
    """The text of the recipe file."""
    overrides: tuple[str, ...]
    recipe: Recipe
    """The resolved recipe, which the ranks read."""
    reasons: Mapping[str, str]
    plan: LaunchPlan
    environment: Environment
    data: Document
    """`data.preparation.Prepared`."""
    start: Start
    save_model: Callable[[Path], None]
    """Write config, generation config and tokenizer into a directory, so that a merge needs no network."""
    profile: ProfiledSteps | None = None
    command: Sequence[str] = ()
    """Arguments of `fsdp-tune` as they were typed."""
    first_machine: Mapping[str, str] | None = None
    """`host` and `directory` of the first machine, on another one with a run directory of its own."""
    saves: bool = True


def write_run(run: RunDir, files: RunFiles) -> None:
    """Create or update RUN. A reader sees the old files or the new ones; a crash leaves no partial
    directory."""
    if files.start.is_new:
        _write_new(run, files)
    else:
        _update(run, files)


def _write_new(run: RunDir, files: RunFiles) -> None:
    try:
        with ExitStack() as stack:
            if needs_filling(run.path):  # without a final rename, only the lock stops another command
                stack.enter_context(locked(run))
                for leftover in stages_inside(run.path):
                    undo_fill(run.path, leftover)
            stage = stack.enter_context(staged_directory(run.path, last=run.recipe_json.name))
            # also under umask 0, as in many containers
            stage.chmod(stat.S_IMODE(stage.stat().st_mode) & ~stat.S_IWOTH)
            inside = RunDir(stage)
            inside.model.mkdir()
            inside.logs.mkdir()
            files.save_model(inside.model)
            record_model_files(inside.model)
            _write_files(inside, files)
    except OSError as error:
        if run.is_used:  # another command filled the directory after the check
            raise usage_error(
                "run-in-use",
                f"{run.path} was just created by another command",
                ways_out=("--set output_dir=…",),
            ) from error
        raise


def write_resized(run: RunDir, recipe: Recipe, reasons: Mapping[str, str], plan: LaunchPlan) -> None:
    """Replace, between two launches of a command, the files of a run that depend on the number of its
    machines."""
    _keep_earlier(run)
    before = LaunchRecord.read(run.launch_json) or LaunchRecord()
    clear(run, range(before.facts.get("world_size", 0)), with_verdict=True)
    write_file(run.accelerate_yaml, yaml.safe_dump(accelerate_config(recipe), sort_keys=False))
    replace(before, reasons=dict(reasons), facts=plan.to_json(), recipes=_digests(run, recipe)).write(
        run.launch_json
    )
    _write_recipe(run, recipe)


def _keep_earlier(run: RunDir) -> None:
    """Copy the files that a start replaces to history/."""
    DISK.mkdir(run.history)
    number = 1 + max((int(path.name) for path in run.history.iterdir() if path.name.isdigit()), default=0)
    with staged_directory(run.history / f"{number:03d}") as earlier:
        of_start = (run.launch_json, run.environment_json, run.data_json, run.resume_json, run.readback_json)
        for path in (run.recipe_yaml, run.recipe_json, *of_start):
            if path.exists():
                shutil.copy2(path, earlier / path.name)


def _update(run: RunDir, files: RunFiles) -> None:
    if run.model.exists():
        model_files(run)  # the merge at the end needs them as they were written
    _keep_earlier(run)
    if not run.model.exists():
        with staged_directory(run.model) as stage:
            files.save_model(stage)
            record_model_files(stage)
    # before the recipe: the next command must not consider this run finished
    clear(run, range(files.recipe.world_size), with_verdict=True)
    _write_files(run, files)
    if changes := files.start.trajectory_changes:
        append_event(run, RecipeChanged(files.start.step, [change.answer() for change in changes]))


def _write_files(run: RunDir, files: RunFiles) -> None:
    """Write the files of a run, recipe.json last: it marks the directory as a run."""
    write_file(run.recipe_yaml, mask_text(_with_overrides(files.recipe_text, files.overrides)), private=True)
    write_file(run.accelerate_yaml, yaml.safe_dump(accelerate_config(files.recipe), sort_keys=False))
    files.environment.write(run.environment_json)
    files.data.write(run.data_json)
    command, cwd = [mask_text(word) for word in files.command], str(Path.cwd())
    facts = files.plan.to_json() | (
        {"first_machine": dict(files.first_machine)} if files.first_machine is not None else {}
    )
    recipes = _digests(run, files.recipe)
    boot, boot_seconds = seconds_since_boot()
    record = LaunchRecord(
        time.time(), files.profile, dict(files.reasons), command, cwd, facts, boot, boot_seconds, recipes
    )
    record.write(run.launch_json)
    checkpoint = files.start.checkpoint
    resume_from = str(checkpoint.path) if checkpoint else None
    start = files.start
    ends_at = start.step if start.ends_here else None
    ResumeRequest(resume_from, start.digests_checked, list(start.from_run), ends_at, files.saves).write(
        run.resume_json
    )
    _write_recipe(run, files.recipe)


def _write_recipe(run: RunDir, recipe: Recipe) -> None:
    write_file(run.recipe_json, _recipe_text(recipe), private=True)


def _recipe_text(recipe: Recipe) -> str:
    return recipe.model_dump_json(by_alias=True, indent=2) + "\n"


def _digests(run: RunDir, recipe: Recipe) -> list[str]:
    """Return the digests of the recipe.json that is written next, and of that which is there: the process may
    be killed in between."""
    before = run.recipe_digest()
    return [digest_of_recipe(_recipe_text(recipe).encode()), *([before] if before is not None else [])]


def _with_overrides(text: str, overrides: tuple[str, ...]) -> str:
    """Return the recipe text, with the overrides of `--set` appended as comments."""
    if not overrides:
        return text
    lines = "".join(f"#   --set {' '.join(override.split())}\n" for override in overrides)
    return f"{text.rstrip()}\n\n# Given on the command line:\n{lines}"
