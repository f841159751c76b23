"""Find the run of a directory that a user names, and the runs in it."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.core.atomic import STAGE_MARK
from fsdp_tune.core.errors import usage_error
from fsdp_tune.run.directory import RunDir


def existing_run(path: Path) -> RunDir:
    """Return the run whose directory `path` is. Raises: usage error `not-a-run`, with the runs that are
    near."""
    run = RunDir(path.resolve())
    if not run.is_used:
        message = (
            f"{path} is not a run directory (it has no {run.recipe_json.name})"
            if path.exists()
            else f"{path} does not exist"
        )
        raise usage_error(
            "not-a-run", message, hint=_near(path) or "pass the run directory that `train` printed"
        )
    return run


def _near(path: Path) -> str | None:
    """Return a hint that names the run that contains `path`, or the runs in it."""
    if RunDir(path.parent).is_used:
        return f"give the run that contains it: {path.parent}"
    runs = [run.name for run in runs_in(path)]
    return f"the runs in it are {', '.join(runs[:8])}{' …' if len(runs) > 8 else ''}" if runs else None


def runs_in(path: Path) -> list[RunDir]:
    """Return the runs whose directories are in `path`, sorted by name, without those that are being
    created."""
    found = (
        [inner for inner in sorted(path.iterdir()) if STAGE_MARK not in inner.name] if path.is_dir() else []
    )
    return [RunDir(inner) for inner in found if RunDir(inner).is_used]
