"""Push the model of a finished run, or another merged directory, to the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.session import session
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.merge.destination import RECORD_NAME
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.merge.upload import HubTarget, Pushed, upload
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import RunDir


def push(
    source: str | Path,
    *,
    to: str | None = None,
    public: bool | None = None,
    revision: str | None = None,
    adapter: bool = False,
    observer: Observer = Observer(),
) -> Pushed:
    """Upload the merged model of a run (`adapter`: its adapter), or the output of a merge, and return the address of the commit.

    What is not given is that of the run's recipe (`training.hub_model_id`, `hub_private_repo`, `hub_revision`), else the name of the run,
    private, on main. Raises: FsdpTuneError, with exit code 1 if the hub does not take it.
    """
    path = Path(source)
    with session():
        run = RunDir(path)
        recipe = read_resolved(run) if run.is_used else None
        folder = _folder(path, run if recipe is not None else None, adapter=adapter)
        if recipe is not None:
            observer.notices(newer_checkpoint(run, folder))
        target = target_of(recipe) if recipe is not None else None
        name = to or (target.repository if target is not None else None)
        if name is None:
            raise usage_error("push-name", f"`{path}` is not a run, so its repository must be named", hint="--to OWNER/NAME")
        chosen = HubTarget(
            name,
            is_public=public if public is not None else bool(target and target.is_public),
            revision=revision or (target.revision if target is not None else None),
        )
        pushed = upload(folder, chosen, f"fsdp-tune push {shlex.quote(str(path))}{f' --to {shlex.quote(to)}' if to else ''}")
        observer.notices(pushed.notices)
        return pushed


def target_of(recipe: Recipe) -> HubTarget:
    """Return where a recipe pushes its model."""
    training = recipe.training
    return HubTarget(
        str(training_value(training, "hub_model_id") or recipe.name),
        is_public=training_value(training, "hub_private_repo") is False,
        revision=training_value(training, "hub_revision"),
    )


def _folder(path: Path, run: RunDir | None, *, adapter: bool) -> Path:
    """Return the directory to upload. Raises: usage error if there is none."""
    if run is None:
        if not (path / RECORD_NAME).is_file():
            message = "it is neither a run nor the output of a merge" if path.exists() else "it does not exist"
            raise usage_error(
                "push-not-merged", message, where=Where(str(path)), hint="give a run, or a directory that `merge-checkpoint` wrote"
            )
        return path
    folder = run.adapter if adapter else run.merged
    if not (folder / RECORD_NAME).is_file():
        how = f"fsdp-tune merge-checkpoint {'--adapter ' if adapter else ''}{shlex.quote(str(path))}"
        message = f"the run has no {'exported adapter' if adapter else 'merged model'} yet"
        raise usage_error("push-not-merged", message, where=Where(str(folder)), hint=f"`{how}`")
    return folder
