"""The number of positions that a model takes."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import Problem, Where
from fsdp_tune.core.families import max_positions
from fsdp_tune.recipe.schema.recipe import Recipe


def positions_of_run(recipe: Recipe, config: PreTrainedConfig) -> int | None:
    """Return `max_positions` after `model.rope_scaling`. `config` includes them already, except those of
    `dynamic`."""
    positions, scaling = max_positions(config), recipe.model.rope_scaling
    if positions is None or scaling is None or scaling.rope_type != "dynamic":
        return positions
    return int(scaling.factor * positions)


def beyond_table_of_positions(recipe: Recipe, model: PreTrainedModel) -> Problem | None:
    """Return the problem of a `max_length` beyond the model's table of positions; None if it fits, or if
    there is no table."""
    positions, longest = max_positions(model.config), recipe.data.max_length
    if positions is None or longest <= positions or not _has_table_of_positions(model, positions):
        return None
    message = f"data.max_length is {longest}, and the model has a table of positions for {positions} tokens"
    hint = f"write `max_length: {positions}`, or `--set data.max_length={positions}`"
    return Problem("max-length-beyond-positions", message, Where(key="data.max_length"), hint)


def _has_table_of_positions(model: PreTrainedModel, positions: int) -> bool:
    """Return whether positions are learned (GPT-2; OPT has two more rows) or computed once (GPT-J): larger
    ones are index errors."""
    embeddings = [
        m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()
    ]
    return hasattr(model.config, "n_positions") or any(
        0 <= m.num_embeddings - positions <= 2 for m in embeddings
    )
