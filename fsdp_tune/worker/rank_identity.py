"""Check that all ranks run the same code on the same recipe and data, before any of them loads a model."""

from __future__ import annotations

import contextlib
import json
import platform

from fsdp_tune.cluster.doctor_checks import differences_of_ranks
from fsdp_tune.core.errors import FailedError, Problem
from fsdp_tune.core.package_versions import installed_versions
from fsdp_tune.core.units import counted
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.manifest import digest
from fsdp_tune.worker.agreement import gather

PACKAGES = ("fsdp-tune", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy")


def identity(run: RunDir) -> dict[str, str]:
    """Return the values that must be equal on all ranks: versions, and digests of the files that ranks read.

    Where each machine has its own run directory, paths in it are left out.
    """
    files = {path.name: path.read_bytes() for path in (run.recipe_json, run.data_json)}
    with contextlib.suppress(ValueError):  # of another version, which differs
        recipe = Recipe.model_validate_json(files[run.recipe_json.name])
        if recipe.has_own_directories:
            data = json.loads(files[run.data_json.name])
            files[run.recipe_json.name] = recipe.on_all_machines.model_dump_json().encode()
            files[run.data_json.name] = json.dumps(
                [data[name] for name in ("key", "train_rows", "skipped", "attempts")], sort_keys=True
            ).encode()
    digests = {name: digest(content) for name, content in files.items()}
    versions = {name: found or "not installed" for name, found in installed_versions(PACKAGES).items()}
    return {"python": platform.python_version(), **versions, **digests}


def check_same(run: RunDir) -> None:
    """Check that all ranks are alike. Collective. Raises: FailedError on every rank, with each difference to
    rank 0."""
    found = differences_of_ranks(gather(identity(run)))
    if found:
        others = len(found) - 1
        more = f" (and {counted(others, 'more difference')})" if others else ""
        hint = (
            "install the same packages on every machine, and start each with the same recipe and data; all "
            "of them see one run directory, except with `launch.shared_directory: false`"
        )
        raise FailedError(Problem("ranks-differ", f"{found[0]}{more}", hint=hint))
