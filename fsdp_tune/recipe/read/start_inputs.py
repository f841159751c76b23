"""Inputs that only the start of a run reads: a resume takes them from the run's directory if their files are gone.

RUN/model has the configuration of the model, its tokenizer and its chat template, and a checkpoint has the weights; only that of an
adapter has no weights of the base.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.recipe.paths import can_only_be_a_path
from fsdp_tune.recipe.schema import Recipe

_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "chat_template.jinja")


def missing_start_inputs(recipe: Recipe) -> dict[str, str]:
    """Return the keys of a resolved recipe whose files are not on this machine, with their values, if a resume needs only the run's."""
    return {key: name for key, name, revision in _start_inputs(recipe) if not _is_here(name, revision)}


def _start_inputs(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yield key, value and revision on the hub."""
    model, template = recipe.model, recipe.data.chat_template
    if isinstance(model.from_config, str):
        yield "model.from_config", model.from_config, model.revision
    elif model.from_config is None and model.name_or_path is not None and recipe.lora is None:
        yield "model.name_or_path", model.name_or_path, model.revision
    if model.tokenizer is not None:
        yield "model.tokenizer", model.tokenizer, model.tokenizer_revision or "main"
    if template is not None and "/" in template:  # all others are bundled
        yield "data.chat_template", template, "main"


def _is_here(name: str, revision: str) -> bool:
    if name.startswith("builtin:") or "://" in name or Path(name).exists():
        return True
    return not can_only_be_a_path(name) and any(cached_model_file(name, revision, file) is not None for file in _FILES)


def from_run(recipe: Recipe, run: Path, keys: Collection[str]) -> Recipe:
    """Return the recipe with the inputs of `keys` taken from a run, for building the model that one of its checkpoints fills."""
    model, own = dict[str, Any](), str(run / "model")
    if {"model.name_or_path", "model.from_config"}.intersection(keys):
        model = {"name_or_path": str(run), "from_config": None}
    if "model.tokenizer" in keys:
        model["tokenizer"] = own
    data = {"chat_template": own} if "data.chat_template" in keys else {}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=model), "data": recipe.data.model_copy(update=data)})
