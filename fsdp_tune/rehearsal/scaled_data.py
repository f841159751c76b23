"""Scale the data of a recipe down: few and short rows, of the built-in data set if the recipe's cannot be
read here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.recipe.schema.data_section import EvalFraction, EvalRows
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.rehearsal.scaled_recipe import ScaledRecipe

MAX_LENGTH_TOKENS = 128
ROWS = 400
EVAL_ROWS = 16


@dataclass(frozen=True, slots=True)
class ReadableInputs:
    """Which inputs of the recipe can be read on this machine."""

    tokenizer: bool = True
    data: bool = True
    tokens: int = 0
    """The row length at which the recipe's data keep trained tokens
    (`data.shortest_length.length_with_targets`)."""


def scale_down_data(small: ScaledRecipe, recipe: Recipe, folder: Path, inputs: ReadableInputs) -> None:
    """Read few and short rows, of the built-in data set if the recipe's cannot be read here."""
    small.document["data"] |= {"cache_dir": str(folder / "cache"), "num_proc": "auto"}
    if inputs.data and inputs.tokenizer:
        _own_data(small, recipe)
    else:
        _builtin_data(small, recipe, inputs)
    data = small.document["data"]
    shortest = MAX_LENGTH_TOKENS * max(1, -(-inputs.tokens // MAX_LENGTH_TOKENS))
    if recipe.data.max_length > shortest:
        data["max_length"] = shortest
        why = (
            f", since prompts are longer than {MAX_LENGTH_TOKENS} tokens"
            if shortest > MAX_LENGTH_TOKENS
            else ""
        )
        small.changes.append(f"data.max_length: {shortest} instead of {recipe.data.max_length}{why}")
        if recipe.data.overlong in ("drop", "error") and "overlong" in data:
            data["overlong"] = (
                "truncate"  # rows that fit the real length must not be dropped at the small one
            )
            small.changes.append(
                f"data.overlong: truncate instead of {recipe.data.overlong}, which is for the real length"
            )


_KEPT_DATA = frozenset(
    {"max_length", "packing", "packing_strategy", "pad_to_multiple_of", "shuffle", "cache_dir"}
)
"""Keys of `data` that rows of the built-in data set have too."""
_REPLACED_DATA = frozenset({"train", "eval", "eval_packing", "stream_lanes", "num_proc"})
"""Those that the rehearsal, or its resolution, sets itself."""


def _builtin_data(small: ScaledRecipe, recipe: Recipe, inputs: ReadableInputs) -> None:
    data = {name: value for name, value in small.document["data"].items() if name in _KEPT_DATA}
    data["train"] = [{"path": "builtin:arithmetic", "split": "train", "max_rows": ROWS}]
    data["eval"] = [
        {"path": "builtin:arithmetic", "split": "test", "max_rows": EVAL_ROWS, "label": "held_out"}
    ]
    small.document["data"] = data
    why = (
        "that tokenizer encodes nothing else"
        if inputs.data
        else "some of the recipe's data cannot be read here"
    )
    small.changes.append(f"data: builtin:arithmetic, since {why}")
    written = recipe.data.model_dump(exclude_defaults=True)
    if others := [f"data.{name}" for name in written if name not in _KEPT_DATA | _REPLACED_DATA]:
        small.changes.append(f"{', '.join(others)}: the default; NOT rehearsed")


def _own_data(small: ScaledRecipe, recipe: Recipe) -> None:
    data = small.document["data"]
    if recipe.data.streaming:
        data |= {"stream_lanes": "auto", "shuffle_buffer_size": min(data["shuffle_buffer_size"], ROWS)}
        small.changes.append(
            f"data: streams as in the recipe, shuffled in windows of {data['shuffle_buffer_size']} rows"
        )
    else:
        for source in data["train"]:
            source["max_rows"] = min(source["max_rows"] or ROWS, ROWS)
        small.changes.append(f"data: at most the first {ROWS} rows of each source")
    if recipe.data.on_bad_row == "skip":
        data["max_bad_share"] = 1.0
        small.changes.append(
            f"data.max_bad_share: 1 instead of {recipe.data.max_bad_share:g}, which is a share of all rows"
        )
    wanted = recipe.data.eval
    if isinstance(wanted, EvalRows) and wanted.rows > EVAL_ROWS:
        data["eval"] = {"rows": EVAL_ROWS}
        small.changes.append(f"data.eval.rows: {EVAL_ROWS} instead of {wanted.rows}")
    elif (
        isinstance(wanted, EvalFraction) and wanted.fraction < EVAL_ROWS / ROWS
    ):  # a small part of few rows may be none
        data["eval"] = {"fraction": EVAL_ROWS / ROWS}
        small.changes.append(f"data.eval.fraction: {EVAL_ROWS / ROWS:g} instead of {wanted.fraction:g}")
    elif isinstance(wanted, list):
        for source in data["eval"]:
            source["max_rows"] = min(source["max_rows"] or EVAL_ROWS, EVAL_ROWS)
        small.changes.append(f"data.eval: at most the first {EVAL_ROWS} rows of each set")
