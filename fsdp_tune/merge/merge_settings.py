"""The settings of a merge, from its options and the `merge:` section of the run's recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.command import BaseWeights, MergeCheck, MergedDtype
from fsdp_tune.core.errors import Where, failed_error, usage_error
from fsdp_tune.core.units import parse_bytes
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.source import Selection, recipe_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Merge
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
    quantise: bool = False


def settle(selection: Selection, options: MergeOptions) -> MergeSettings:
    """Resolve the settings: options override the recipe, which overrides the defaults.

    A checkpoint of another tool keeps its dtype and needs `--output`. Raises: usage error.
    """
    exports, output = options.adapter is True, options.output
    run = selection.run
    recipe = recipe_of(run) if run is not None else None
    if output is None:
        if run is None or recipe is None:
            raise usage_error(
                "merge-no-output",
                "the checkpoint is not in a run directory of fsdp-tune, so `--output` has no default",
                hint="pass `--output DIR`",
            )
        output = run.adapter if exports else run.merged
    if recipe is None:
        most_bytes, check = (
            options.max_shard_bytes or parse_bytes(Merge().max_shard_size),
            options.verify or "quick",
        )
        weights = options.base_weights or "trained"
        return MergeSettings(
            output, options.dtype or "keep", most_bytes, check, None, weights, quantise=bool(options.quantise)
        )
    wanted = recipe.merge.dtype
    own = options.dtype or (recipe.compute_dtype if wanted == "auto" else wanted)
    weights = options.base_weights or recipe.merge.base
    if own == "keep" and recipe.nf4 is not None and weights == "trained" and not exports:
        raise usage_error(
            "merge-4-bits",
            "the trained weights of the base are in 4 bits, which `keep` cannot keep",
            ways_out=(
                "write them in 16 bits: `--dtype bf16`",
                "add the adapter to the original weights: `--base-weights original`",
            ),
        )
    if run is not None and recipe.nf4 is not None and (weights == "trained" or exports):
        _require_base(run)
    return MergeSettings(
        output,
        own,
        options.max_shard_bytes or parse_bytes(recipe.merge.max_shard_size),
        options.verify or recipe.merge.verify,
        recipe,
        weights,
        quantise=recipe.merge.quantise and recipe.quantised_training is not None
        if options.quantise is None
        else options.quantise,
    )


def _require_base(run: RunDir) -> None:
    """Require the names of the weights in 4 bits, without which the adapter would be added to others. Raises:
    FailedError."""
    trained = BaseModel.read(run.base_json)
    if trained is None or trained.nf4_scales is None:
        raise failed_error(
            "merge-adapter-base",
            "it is missing, or does not name the weights that were trained in 4 bits",
            where=Where(str(run.base_json)),
            hint=f"copy the {BASE_FILE} of the run's exported adapter, or of another run of the same "
            "recipe, to this path",
        )
