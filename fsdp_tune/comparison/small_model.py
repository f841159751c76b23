"""The configuration of the small model that stands for a recipe's in a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from fsdp_tune.core import families
from fsdp_tune.core.hub import hub_is_reachable
from fsdp_tune.recipe.read.catalogue import architecture
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.rehearsal.layer_patterns import map_group_patterns, map_layer_patterns, map_lora_names
from fsdp_tune.run.directory import run_of
from fsdp_tune.run.written_files import model_files


def raw_config(recipe: Recipe) -> dict[str, object]:
    """Return config.json as its file has it: two versions of transformers read the same. Raises: OSError,
    ValueError."""
    source = recipe.model.from_config
    if isinstance(source, dict):
        return dict(source)
    if isinstance(source, str):
        path = Path(source)
        return json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    name = str(recipe.model.name_or_path)
    run = run_of(Path(name))
    try:
        local_only = not (Path(name).exists() or hub_is_reachable())
        options: dict[str, object] = {"revision": recipe.model.revision, "local_files_only": local_only}
        found, _ = PreTrainedConfig.get_config_dict(model_files(run) if run else name, **options)
    except OSError:
        facts = architecture(name)
        if facts is None:
            raise
        return facts
    return {key: value for key, value in found.items() if key not in ("_commit_hash", "transformers_version")}


def with_default_sizes(config: dict[str, Any]) -> dict[str, object]:
    """Return a configuration with the whole numbers that it leaves to its class, such as the number of
    layers."""
    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    every: dict[str, object] = json.loads(made.to_json_string(use_diff=False))
    sizes: dict[str, object] = {name: value for name, value in every.items() if type(value) is int}
    return sizes | config


def map_patterns(raw: dict[str, Any], config: dict[str, object], small: dict[str, object]) -> None:
    """Map patterns that name layers to the layers of the small model."""
    of, to = families.LAYERS.of(config), families.LAYERS.of(small)
    if of is None or to is None:
        return
    raw["model"]["freeze"] = map_layer_patterns(raw["model"]["freeze"], of, to)
    groups = raw["training"]["parameter_groups"]
    mapped = map_group_patterns([group["match"] for group in groups], of, to)
    raw["training"]["parameter_groups"] = [
        group | {"match": match} for group, match in zip(groups, mapped, strict=True) if match
    ]
    if raw["lora"] is not None:
        raw["lora"] |= map_lora_names(raw["lora"], of, to)
        raw["lora"] |= {"layers_to_transform": None, "rank_pattern": {}, "alpha_pattern": {}, "adapter": None}
