"""Let trackers continue the run of a run directory: RUN/trackers.json keeps their ids, environment variables
pass them on.

transformers' callbacks start a tracker's run without an id. The variables are read by the tracker's package
or by the callback, so they are set before either is imported, on rank 0. A variable that the user has set
wins.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.values import is_mapping
from fsdp_tune.run.directory import RunDir


@dataclass(frozen=True, slots=True)
class Variables:
    """The environment variables by which a tracker continues a run."""

    id: str
    id_digits: int = 0
    """Length of an id that is chosen here; 0: the tracker's server chooses it, see `keep_id`."""
    resume: str | None = None
    """Takes `allow`: continue the run of this id, or start it."""
    directory: str | None = None
    """Where the tracker writes its files; without it they are in the working directory."""


VARIABLES = {
    "wandb": Variables("WANDB_RUN_ID", 8, "WANDB_RESUME", "WANDB_DIR"),
    "swanlab": Variables("SWANLAB_RUN_ID", 21, "SWANLAB_RESUME", "SWANLAB_LOG_DIR"),
    "comet_ml": Variables("COMET_EXPERIMENT_KEY", 32),
    "mlflow": Variables("MLFLOW_RUN_ID"),
}


def continue_tracker_runs(
    run: RunDir, trackers: Sequence[str], environment: MutableMapping[str, str], say: Callable[[str], None]
) -> None:
    """Set the variables of `trackers`, with the ids of an earlier start of this run directory if there are
    any."""
    ids = _kept_ids(run, say)
    now = dict(ids)
    for name in trackers:
        if (variables := VARIABLES.get(name)) is None:
            continue
        if variables.directory is not None:
            environment.setdefault(variables.directory, str(run.path))
        if variables.resume is not None and environment.setdefault(variables.resume, "allow") == "never":
            continue
        run_id = (
            environment.get(variables.id) or ids.get(name) or secrets.token_hex(16)[: variables.id_digits]
        )
        if run_id:
            environment[variables.id] = now[name] = run_id
    if now != ids:
        write_json(run.trackers_json, now)


def keep_id(run: RunDir, tracker: str, run_id: str, say: Callable[[str], None]) -> None:
    """Write the id of a tracker's run for later starts."""
    ids = _kept_ids(run, say)
    if ids.get(tracker) != run_id:
        write_json(run.trackers_json, {**ids, tracker: run_id})


def _kept_ids(run: RunDir, say: Callable[[str], None]) -> dict[str, str]:
    try:
        ids: object = json.loads(run.trackers_json.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        ids = None
    if is_mapping(ids) and all(isinstance(each, str) for each in ids.values()):
        return ids
    say(f"WARNING: {run.trackers_json} cannot be read; trackers start new runs")
    return {}
