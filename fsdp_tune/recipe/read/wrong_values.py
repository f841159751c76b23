"""Take wrong values out of a recipe, so that the rest of it can be checked."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, cast

from pydantic import ValidationError

from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.read.yaml_source import MappingNode, Node, ScalarNode
from fsdp_tune.recipe.schema.keys import Finding
from fsdp_tune.recipe.schema.recipe import Recipe


def broken(node: Node, path: KeyPath) -> list[KeyPath]:
    """Return the paths of the scalars that are not what their syntax promises."""
    if isinstance(node, ScalarNode):
        return [path] if node.broken else []
    if isinstance(node, MappingNode):
        return [found for key, entry in node.entries.items() for found in broken(entry.node, (*path, key))]
    return [found for index, item in enumerate(node.items) for found in broken(item, (*path, index))]


def drop(data: Any, path: KeyPath, dropped: set[str]) -> None:
    """Remove a wrong value; a list with a wrong entry is removed entirely, so that no index shifts."""
    numbers = [index for index, part in enumerate(path) if isinstance(part, int)]
    short = path[: numbers[0]] if numbers else path
    dropped.add(dotted(short))
    holder: dict[object, object] | None = data
    for part in short[:-1]:
        inner = holder.get(part) if holder is not None else None
        holder = cast(dict[object, object], inner) if isinstance(inner, dict) else None
    if holder is not None and short:
        holder.pop(short[-1], None)


def without(recipe: Recipe, keys: Collection[str]) -> Recipe | None:
    """Return the recipe with the defaults of keys that contradict each other, or None if the others are wrong together.

    A section goes with a key that has no default. Entries of lists stay, since nothing is derived from them.
    """
    data = recipe.model_dump(by_alias=True, exclude_unset=True)
    for key in keys:
        if "[" not in key:
            drop(data, tuple(key.split(".")), set())
    for _ in range(3):
        try:
            return Recipe.model_validate(data)
        except ValidationError as error:
            for each in error.errors(include_url=False):
                drop(data, each["loc"][:-1] if each["type"] == "missing" else each["loc"], set())
    return None


def touches(finding: Finding, dropped: set[str]) -> bool:
    """Return whether a finding concerns a key whose wrong value was dropped."""
    return any(key == gone or re.match(re.escape(gone) + r"[.\[]", key) for key in finding.keys for gone in dropped)
