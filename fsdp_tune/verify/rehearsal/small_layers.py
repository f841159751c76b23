"""Patterns of module names that name decoder layers by number, for a model with fewer layers. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

_NUMBER_IN_REGEX = re.compile(r"(?<![\w{,\[-])\d+(?![\w},\]-])")
"""A number of its own: no repetition and no range of characters."""


def on_small_layers(patterns: Sequence[str], of: int, to: int) -> list[str]:
    """Return patterns of names (`model.layers.12.*`) for a model with `to` of `of` layers.

    A small layer stands for a block of layers. It is named if all layers of its block were; if no block is named in full, one small
    layer is, so that every pattern still matches something and, unless all layers were named, some layer is not.
    """
    layers: dict[tuple[str, str], set[int]] = {}
    order: list[str | tuple[str, str]] = []
    for pattern in patterns:
        found = _layers_of(pattern, of)
        if found is None:
            order.append(pattern)
            continue
        before, after, indexes = found
        if (before, after) not in layers:
            order.append((before, after))
        layers.setdefault((before, after), set()).update(indexes)
    mapped: list[str] = []
    for each in order:
        if isinstance(each, str):
            mapped.append(each)
        else:
            before, after = each
            mapped += [".".join(filter(None, (before, str(index), after))) for index in _blocks(layers[each], of, to)]
    return mapped


def _layers_of(pattern: str, of: int) -> tuple[str, str, set[int]] | None:
    """Return what stands before and after the number of a layer, and the layers it matches; None if no number is named."""
    parts = pattern.split(".")
    for place, part in enumerate(parts):
        if re.fullmatch(r"[\d*?\[\]!-]+", part) and any(character.isdigit() or character == "?" for character in part):
            found = {index for index in range(of) if fnmatch.fnmatchcase(str(index), part)}
            if found:
                return ".".join(parts[:place]), ".".join(parts[place + 1 :]), found
    return None


def ignored_on_small_layers(regex: str, of: int, to: int) -> str:
    """Return a regular expression of module names (`model\\.layers\\.(12|13)\\.mlp`) for a model with `to` of `of` layers."""
    numbers = {int(text) for text in _NUMBER_IN_REGEX.findall(regex)} & set(range(of))
    if not numbers:
        return regex
    chosen = _blocks(numbers, of, to)
    return _NUMBER_IN_REGEX.sub(lambda found: str(min(chosen, key=lambda index: abs(index - int(found[0]) * to // of))), regex)


def _blocks(indexes: Iterable[int], of: int, to: int) -> list[int]:
    """Return the small layers that stand for the given layers."""
    given = set(indexes)
    blocks = {small: {index for index in range(of) if index * to // of == small} for small in range(to)}
    return [small for small, block in blocks.items() if block and block <= given] or [min(given) * to // of]
