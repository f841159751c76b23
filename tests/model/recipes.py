from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdp_tune.core.devices import Machine
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.model_files import ModelFacts
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseLayout
from tests.model.families import FAMILIES


def recipe_of(model: str | dict[str, Any] = "llama", ranks: int = 2, **sections: dict[str, Any]) -> Recipe:
    """A resolved recipe for CPU ranks; `model` is a family or the section itself."""
    section = {"from_config": FAMILIES[model]} if isinstance(model, str) else model
    document = {
        "data": {"train": [{"path": "hand-made"}]},
        "precision": {"mixed_precision": "no"},
        **sections,
        "model": {"tokenizer": "builtin:arithmetic", **section},
        "launch": {"device": "cpu", "num_processes": ranks},
    }
    return resolve(Recipe.model_validate(document), Machine(None, 0, 2, None), cwd=Path("/")).recipe


def lora_recipe(
    folder: Path,
    lora: dict[str, Any],
    family: str | dict[str, Any] = "llama",
    ranks: int = 2,
    **sections: dict[str, Any],
) -> Recipe:
    """A resolved recipe with `lora:` for a model directory that holds a configuration alone."""
    folder.mkdir(exist_ok=True)
    config = FAMILIES[family] if isinstance(family, str) else family
    (folder / "config.json").write_text(json.dumps(config))
    return recipe_of({"name_or_path": str(folder)}, ranks, lora=lora, **sections)


def facts_of_model(recipe: Recipe) -> ModelFacts:
    """The facts of a recipe's model, which must have no problems."""
    found = find_facts(recipe)
    assert found.problems == ()
    assert found.facts is not None
    return found.facts


def model_facts(**changes: Any) -> ModelFacts:
    """The facts of a small GPT-2, with some of them changed."""
    facts = {
        "packaged": False,
        "model_type": "gpt2",
        "architecture": "GPT2LMHeadModel",
        "config": {"model_type": "gpt2", "use_cache": False},
        "base_folder": None,
        "config_changes": {},
        "exported_config": {"model_type": "gpt2", "use_cache": True},
        "generation_config": {"temperature": 0.5},
        "base_layout": BaseLayout(),
        "parameters": 1000,
        "trained_parameters": 1000,
        "embedding_rows": 9,
        "tied_embeddings": True,
        "is_embedding_trained": True,
        "trains_new_tokens": True,
        "max_positions": 64,
        "attention": "sdpa",
    }
    return ModelFacts.model_validate(facts | changes)
