"""Resolve the settings of a merge from the user's options and the run's `merge:` section."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from fsdp_tune.core.errors import Where, failed_error, usage_error
from fsdp_tune.core.units import parse_bytes
from fsdp_tune.merge.source import Selection
from fsdp_tune.recipe.schema import Merge, Recipe
from fsdp_tune.run.directory import RunDir

Verify = Literal["quick", "full", "none"]
DtypeOption = Literal["keep", "bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """Resolved settings. `recipe` is None for a checkpoint of another tool."""

    output: Path
    dtype: DtypeOption
    max_shard_bytes: int
    verify: Verify
    recipe: Recipe | None


def settle(
    selection: Selection,
    output: Path | None,
    dtype: DtypeOption | None,
    max_shard_bytes: int | None,
    verify: Verify | None,
    *,
    adapter: bool = False,
) -> MergeSettings:
    """Resolve the settings: options override the recipe, which overrides the defaults.

    A checkpoint of another tool keeps its dtype and needs `--output`. `adapter`: the output is an adapter alone, RUN/adapter.
    """
    run = selection.run
    recipe = _recipe(run) if run is not None else None
    if output is None:
        if run is None or recipe is None:
            raise usage_error(
                "merge-no-output",
                "the checkpoint is not in a run directory of fsdp-tune, so `--output` has no default",
                hint="pass `--output DIR`",
            )
        output = run.adapter if adapter else run.merged
    if recipe is None:
        return MergeSettings(output, dtype or "keep", max_shard_bytes or parse_bytes(Merge().max_shard_size), verify or "quick", None)
    wanted = recipe.merge.dtype
    own = recipe.compute_dtype if wanted == "auto" else wanted
    return MergeSettings(
        output, dtype or own, max_shard_bytes or parse_bytes(recipe.merge.max_shard_size), verify or recipe.merge.verify, recipe
    )


def _recipe(run: RunDir) -> Recipe | None:
    """Return the resolved recipe; None if another tool wrote the `checkpoint-N` directories."""
    try:
        return Recipe.model_validate_json(run.recipe_json.read_bytes())
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
