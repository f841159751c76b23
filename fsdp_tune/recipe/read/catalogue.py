"""The recipes and the model configs that are installed with the package, found by name."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.values import as_mapping
from fsdp_tune.core.version import shipped
from fsdp_tune.recipe.schema.keys import closest

SUFFIXES = (".yaml", ".yml", ".json")


def catalogue_directory() -> Path:
    """Return `fsdp_tune/configs` of an installed wheel, or `configs/` of a checkout."""
    return shipped("configs", "configs")


def catalogue() -> dict[str, Path]:
    """Return the file of each recipe by name, sorted by name."""
    return {path.stem: path for path in sorted(catalogue_directory().glob("*.yaml"))}


def find_recipe(source: str) -> Path:
    """Return the path of a recipe, given as a path or as a catalogue name; an existing file takes precedence.
    The loader opens it later."""
    path, recipes = Path(source), catalogue()
    looks_like_path = path.suffix in SUFFIXES or "/" in source
    if source in recipes and not path.is_file():
        return recipes[source]
    if looks_like_path or path.exists() or path.is_symlink():
        if not (path.exists() or path.is_symlink()) and path.stem in recipes:
            hint = (
                f"the catalogue has a recipe of this name: `--config {path.stem}`, or `fsdp-tune recipes "
                f"copy {path.stem}`"
            )
            raise usage_error("recipe-not-found", f"there is no file `{source}`", hint=hint)
        return path
    near = closest(source, list(recipes))
    hint = (
        f"did you mean `{near}`?"
        if near
        else "`fsdp-tune recipes list` shows the catalogue; to use a file, pass its path"
    )
    raise usage_error("recipe-not-found", f"there is no file and no catalogue recipe `{source}`", hint=hint)


def headline(path: Path) -> str:
    """Return the first comment line of a recipe, which states its purpose."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.lstrip("# ").strip()
        if line.startswith("#") and text and not text.startswith("yaml-language-server"):
            return text
    return ""


def architecture(name: str) -> dict[str, object] | None:
    """Return the bundled `config.json` fields of a hub model, for use without network access; None for a
    model without a bundled config."""
    configs = as_mapping(
        json.loads(resources.files("fsdp_tune.recipe").joinpath("model_configs.json").read_bytes())
    )
    return as_mapping(configs[name]) if name in configs else None
