"""Which model answers prompts: of a run, of one of its checkpoints, or another, with or without its base."""

from __future__ import annotations

import shlex
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from fsdp_tune.answer.examples import ModelToEvaluate, find_model, run_of_model
from fsdp_tune.core.errors import usage_error
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import GenerateOptions
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.merge import merging
from fsdp_tune.merge.merge_options import MergeOptions, hints_with_command
from fsdp_tune.merge.quantised import rounding_notices
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.run.directory import RunDir, checkpoint_step, latest_checkpoint, run_of


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """What answers: the models to load, and the run that gives the format of prompts."""

    models: tuple[ModelToEvaluate, ...]
    names: tuple[str, ...]
    """Of the answers: the model, and the base if it answers too."""
    run: RunDir | None

    @property
    def adapter_off(self) -> bool:
        return len(self.names) > len(self.models)


def choose_model(name: str, options: GenerateOptions, observer: Observer, stack: ExitStack) -> ChosenModel:
    path = Path(name).expanduser()
    run = run_of(path) if path.is_dir() else None
    if run is not None:
        return _of_run(run, name, _step(path, options), options, observer, stack)
    if options.checkpoint is not None:
        raise usage_error(
            "usage",
            f"`--checkpoint` chooses a checkpoint of a run, and `{name}` is none",
            hint="give the run directory",
        )
    model = find_model(name)
    run = run_of_model(model)
    if run is not None:
        folder = Path(model.adapter or model.weights)
        observer.notices([*newer_checkpoint(run, folder), *rounding_notices(read_resolved(run), folder, run)])
    return _with_base(model, run, options)


def _step(path: Path, options: GenerateOptions) -> int | None:
    """Return the step of the checkpoint that is named: by `--checkpoint 500` or `checkpoint-500`, or as the
    model."""
    given = (
        None
        if options.checkpoint is None
        else options.checkpoint.rstrip("/").rpartition("/")[2].removeprefix("checkpoint-")
    )
    if given is not None and not given.isdecimal():
        raise usage_error(
            "wrong-value", f"`--checkpoint {options.checkpoint}` is not a step", hint="--checkpoint 500"
        )
    return checkpoint_step(path) if given is None else int(given)


def _of_run(
    run: RunDir, name: str, step: int | None, options: GenerateOptions, observer: Observer, stack: ExitStack
) -> ChosenModel:
    """Return the merged model of a run, else its adapter, else that of a checkpoint.

    With `--base` an adapter comes first, since it has its base in the same weights.
    """
    is_adapter = read_resolved(run).lora is not None
    folders = (run.adapter, run.merged) if is_adapter and options.base else (run.merged, run.adapter)
    exported = next((folder for folder in folders if _is_exported(folder)), None)
    if is_adapter and (step is not None or exported is None or (options.base and exported == run.merged)):
        return _with_base(_of_checkpoint(run, step, observer, stack), run, options)
    if step is not None or exported is None:
        _refuse_unmerged(run, name, step)
    observer.notices([*newer_checkpoint(run, exported), *rounding_notices(read_resolved(run), exported, run)])
    model = find_model(str(exported))
    return _with_base(replace(model, name=name), run, options)


def _is_exported(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("config.json", "adapter_config.json"))


def _refuse_unmerged(run: RunDir, name: str, step: int | None) -> NoReturn:
    """Raises: usage error with the commands that merge a run, or one of its checkpoints."""
    if step is None and latest_checkpoint(run)[0] is not None:
        find_model(name)
    folder = run.path if step is None else run.path / f"merged-{step}"
    shown, output = shlex.quote(str(run.path)), shlex.quote(str(folder))
    if step is None:
        message = f"`{name}` has neither a merged model nor a complete checkpoint"
        raise usage_error("run-not-merged", message, hint=f"`fsdp-tune status {shown}` shows what it has")
    ways = (f"fsdp-tune merge-checkpoint {shown} --step {step} --output {output}", f"fsdp-tune chat {output}")
    raise usage_error(
        "run-not-merged",
        f"checkpoint-{step} of `{run.path}` is sharded, and has to be merged first",
        ways_out=ways,
    )


def _of_checkpoint(run: RunDir, step: int | None, observer: Observer, stack: ExitStack) -> ModelToEvaluate:
    """Return the adapter of a checkpoint, written as PEFT's files into a temporary directory. Raises:
    FsdpTuneError."""
    observer.phase("reading the adapter of a checkpoint")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-tune-"))) / "adapter"
    with hints_with_command(run.path):
        merged = merging.merge_checkpoint(
            run.path, MergeOptions(output=folder, step=step, adapter=True), observer.progress
        )
    observer.notices(merged.notices)
    return replace(find_model(str(folder)), name=str(merged.source))


def _with_base(model: ModelToEvaluate, run: RunDir | None, options: GenerateOptions) -> ChosenModel:
    """Add the base to a model, if `--base` wants it. Raises: usage error for a model without a base."""
    if not options.base:
        return ChosenModel((model,), (model.name,), run)
    if model.adapter is not None:
        weights = Path(model.weights)
        shown = weights.relative_to(Path.cwd()) if weights.is_relative_to(Path.cwd()) else model.weights
        return ChosenModel((model,), (model.name, f"{shown} (without the adapter)"), run)
    start = read_resolved(run).model if run is not None else None
    if start is None or start.name_or_path is None:
        reason = "is neither a run nor an adapter" if run is None else "was trained from random weights"
        raise usage_error(
            "no-base", f"`--base`: `{model.name}` {reason}, so it has no base", hint="leave out `--base`"
        )
    base = replace(find_model(start.name_or_path), revision=start.revision)
    return ChosenModel((model, base), (model.name, base.name), run)
