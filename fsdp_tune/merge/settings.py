"""Resolve the settings of a merge from the user's options and the run's `merge:` section."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fsdp_tune.core.command import BaseWeights, MergeCheck, MergedDtype
from fsdp_tune.core.errors import Where, failed_error, usage_error
from fsdp_tune.core.units import parse_bytes
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.source import Selection
from fsdp_tune.recipe.schema.recipe import Merge, Recipe
from fsdp_tune.run.base_model import BASE_FILE, BaseModel
from fsdp_tune.run.directory import RunDir


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """Resolved settings. `recipe` is None for a checkpoint of another tool."""

    output: Path
    dtype: MergedDtype
    max_shard_bytes: int
    verify: MergeCheck
    recipe: Recipe | None
    base_weights: BaseWeights = "trained"


def settle(selection: Selection, options: MergeOptions) -> MergeSettings:
    """Resolve the settings: options override the recipe, which overrides the defaults.

    A checkpoint of another tool keeps its dtype and needs `--output`. Raises: usage error.
    """
    exports, output = options.adapter is True, options.output
    run = selection.run
    recipe = _recipe(run) if run is not None else None
    if output is None:
        if run is None or recipe is None:
            raise usage_error(
                "merge-no-output",
                "the checkpoint is not in a run directory of fsdp-tune, so `--output` has no default",
                hint="pass `--output DIR`",
            )
        output = run.adapter if exports else run.merged
    if recipe is None:
        most_bytes = options.max_shard_bytes or parse_bytes(Merge().max_shard_size)
        return MergeSettings(
            output, options.dtype or "keep", most_bytes, options.verify or "quick", None, options.base_weights or "trained"
        )
    wanted = recipe.merge.dtype
    own = options.dtype or (recipe.compute_dtype if wanted == "auto" else wanted)
    weights = options.base_weights or recipe.merge.base
    if own == "keep" and recipe.quantization is not None and weights == "trained" and not exports:
        raise usage_error(
            "merge-4-bits",
            "the trained weights of the base are in 4 bits, which `keep` cannot keep",
            ways_out=("write them in 16 bits: `--dtype bf16`", "add the adapter to the original weights: `--base-weights original`"),
        )
    if run is not None and recipe.quantization is not None and (weights == "trained" or exports):
        _require_base(run)
    return MergeSettings(
        output,
        own,
        options.max_shard_bytes or parse_bytes(recipe.merge.max_shard_size),
        options.verify or recipe.merge.verify,
        recipe,
        weights,
    )


def _require_base(run: RunDir) -> None:
    """Require the names of the weights in 4 bits, without which the adapter would be added to others. Raises: FailedError."""
    trained = BaseModel.read(run.base_json)
    if trained is None or trained.nf4_scales is None:
        raise failed_error(
            "merge-adapter-base",
            "it is missing, or does not name the weights that were trained in 4 bits",
            where=Where(str(run.base_json)),
            hint=f"copy the {BASE_FILE} of the run's exported adapter, or of another run of the same recipe, to this path",
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
