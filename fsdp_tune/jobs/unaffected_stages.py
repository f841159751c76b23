"""Inspect model and rows of a recipe with mistakes, as far as they do not depend on the keys with a mistake.

A stage whose keys have a mistake already is not run, since what it finds would be about other values than the
user's: it is listed as unchecked.
"""

from __future__ import annotations

from collections.abc import Collection

from fsdp_tune.jobs.inspection import Inspection, inspect, inspect_data, inspect_model
from fsdp_tune.jobs.recipes import missing_sources
from fsdp_tune.recipe.schema.keys import meant_key
from fsdp_tune.recipe.schema.recipe import Recipe

MODEL_KEYS = (
    *("model", "lora", "quantization", "precision", "kernels", "fsdp", "launch.device"),
    *("data.max_length", "data.packing", "training.optim", "training.optim_args"),
)
TOKENIZER_KEYS = tuple(
    f"model.{name}"
    for name in ("name_or_path", "tokenizer", "revision", "tokenizer_revision", "trust_remote_code", "tokens")
)
ROW_KEYS = ("data", "training.sample")
NOT_OF_ROWS = tuple(
    f"data.{name}"
    for name in (
        *(
            "packing",
            "packing_strategy",
            "eval_packing",
            "overlong",
            "drop_duplicates",
            "stream_lanes",
            "curriculum",
            "shuffle",
            "shuffle_buffer_size",
        ),
        *("mixture", "pad_to_multiple_of", "num_proc", "cache_dir"),
    )
)
"""Keys of `data:` by which examples are cut, packed, ordered or stored: a row is read and encoded without
them."""


def inspect_remaining(recipe: Recipe, suspects: Collection[str], *, offline: bool) -> Inspection:
    """Inspect model and rows of a recipe with mistakes, as far as they do not depend on the keys with a
    mistake, `suspects`.

    `recipe`: resolved, as far as it could be. The rest is listed in `unchecked`.
    """
    meant = {key: meant_key(key) for key in sorted(suspects)}
    of_model = [key for key, known in meant.items() if _reads(MODEL_KEYS, known)]
    of_tokenizer = [key for key, known in meant.items() if known == "model" or _reads(TOKENIZER_KEYS, known)]
    of_rows = [
        key for key, known in meant.items() if _reads(ROW_KEYS, known) and not _reads(NOT_OF_ROWS, known)
    ]
    if not (of_model or of_tokenizer or of_rows):
        return inspect(recipe, offline=offline)
    found = Inspection()
    if not of_model:
        found = inspect_model(recipe, offline=offline)
    elif not of_rows:
        found = inspect_data(recipe, has_tokenizer=not of_tokenizer)
    if of_model:
        found.unchecked.append(f"the model and its adapters, which depend on {_listed(of_model)}")
    if of_rows:
        found.problems.extend(missing_sources(recipe))
        found.unchecked.append(
            f"tokenizer, chat template and rows, which depend on {_listed([*of_tokenizer, *of_rows])}"
        )
    return found


def _reads(keys: Collection[str], suspect: str) -> bool:
    """Return whether a suspect key is one of `keys`, or in one of these sections."""
    return any(suspect == key or suspect.startswith((f"{key}.", f"{key}[")) for key in keys)


def _listed(keys: Collection[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
