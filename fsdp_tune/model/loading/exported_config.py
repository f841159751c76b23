"""The configuration files of the trained model: what the base wrote and the recipe does not change stays as the base wrote it.

transformers 5 writes a configuration that it read from an older file with other fields (`rope_parameters`, `dtype`), which transformers 4
does not read: it would compute with default rotary frequencies and report nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from fsdp_tune.core.formats.config_fields import changed_fields, old_names, with_changes, with_floats, with_old_spellings
from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.directory import run_of

_NOT_COMPARED = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache", "quantization_config")
"""Fields that a merge sets, or that do not change the model."""


def base_folder(recipe: Recipe) -> Path | None:
    """Return the directory with the small files of the base: its own, that of the run it comes from, or its snapshot in the hub's cache."""
    name = recipe.model.name_or_path
    if name is None or recipe.model.from_config is not None:
        return None
    if (run := run_of(Path(name))) is not None:
        return run.model
    if Path(name).is_dir():
        return Path(name).resolve()
    cached = cached_model_file(name, recipe.model.revision, "config.json")
    return cached.parent if cached is not None else None


def exported_config(recipe: Recipe, changes: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return config.json of the trained model. `changes`: the fields of the base that the recipe changes; `config`: that of the run.

    The result is read again: if transformers does not find the run's configuration in it, its own spelling is written instead.
    """
    new = _fields(config) | {"use_cache": True}
    candidates = [with_old_spellings(new), new]
    folder = base_folder(recipe)
    if folder is not None and (written := _read_object(folder / "config.json")):
        own = with_changes(written, changes)
        candidates = [with_old_spellings(own), own, *candidates] if _is_of_transformers_5(written) else [own, *candidates]
    for candidate in candidates:
        candidate.pop("quantization_config", None)  # a merged model is not quantised
    return next((candidate for candidate in candidates if _reads_as(candidate, config)), candidates[-1])


def _is_of_transformers_5(written: Mapping[str, Any]) -> bool:
    """Return whether a config.json has what transformers 4 does not read: rotary positions, a renamed field, an infinity as an object."""
    nested = [value for name, value in written.items() if name.endswith("_config") and isinstance(value, dict)]
    has_new_rope = "rope_parameters" in written and "rope_theta" not in written
    has_new_names = not old_names(written, written).keys() <= written.keys()
    return has_new_rope or has_new_names or with_floats(written) != written or any(map(_is_of_transformers_5, nested))


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def _reads_as(candidate: Mapping[str, Any], config: PreTrainedConfig) -> bool:
    """Return whether a config.json is read as this configuration; fields of other readers may be added."""
    try:
        found = _fields(type(config).from_dict(with_floats(json.loads(json.dumps(candidate)))))
    except (TypeError, ValueError, KeyError, AttributeError):
        return False
    return not _compared(changed_fields(found, _fields(config)))


def _compared(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes without the fields that are not compared, in nested configurations too."""
    kept = {
        name: _compared(value) if name.endswith("_config") and isinstance(value, dict) else value
        for name, value in changes.items()
        if name not in _NOT_COMPARED
    }
    return {name: value for name, value in kept.items() if value != {} or changes[name] == {}}


def exported_generation_config(recipe: Recipe, config: GenerationConfig) -> dict[str, Any]:
    """Return generation_config.json as the base wrote it, or that of `config` if the base has none."""
    folder = base_folder(recipe)
    written = _read_object(folder / "generation_config.json") if folder is not None else None
    return written or json.loads(config.to_json_string())


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        found: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
