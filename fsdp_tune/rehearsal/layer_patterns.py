"""Map patterns and regular expressions that name layers to a model of fewer layers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_NUMBER_IN_REGEX = re.compile(r"(?<![\w{,\[-])\d+(?![\w},\]-])")
"""A literal number, outside repetition counts and character ranges."""


def map_layer_patterns(patterns: Sequence[str], of: int, to: int) -> list[str]:
    """Map patterns of names (`model.layers.12.*`) from a model of `of` layers to one of `to` layers.

    A small layer represents a block of layers, and is matched if all layers of its block were. If no block is
    matched entirely, one small layer is, so that every pattern still matches a layer and, unless it matched
    all layers, leaves one out.
    """
    layers: dict[tuple[str, str], set[int]] = {}
    order: list[str | tuple[str, str]] = []
    for pattern in patterns:
        found = _layers_of(pattern, of)
        if found is None:
            order.append(pattern)
            continue
        around = (found.before, found.after)
        if around not in layers:
            order.append(around)
        layers.setdefault(around, set()).update(found.indexes)
    mapped: list[str] = []
    for each in order:
        if isinstance(each, str):
            mapped.append(each)
        else:
            before, after = each
            mapped += [
                ".".join(filter(None, (before, str(index), after))) for index in _blocks(layers[each], of, to)
            ]
    return mapped


class _LayerPattern(NamedTuple):
    """A pattern of module names that names layers: its parts before and after the index, and the matching
    indexes."""

    before: str
    after: str
    indexes: set[int]


def _layers_of(pattern: str, of: int) -> _LayerPattern | None:
    """Return the layers that a pattern names; None if it has no layer index."""
    parts = pattern.split(".")
    for position, part in enumerate(parts):
        if re.fullmatch(r"[\d*?\[\]!-]+", part) and any(
            character.isdigit() or character == "?" for character in part
        ):
            found = {index for index in range(of) if fnmatch.fnmatchcase(str(index), part)}
            if found:
                return _LayerPattern(".".join(parts[:position]), ".".join(parts[position + 1 :]), found)
    return None


def map_layer_regex(regex: str, of: int, to: int) -> str:
    """Map a regular expression of module names (`model\\.layers\\.(12|13)\\.mlp`) from a model of `of` layers
    to one of `to` layers."""
    numbers = {int(text) for text in _NUMBER_IN_REGEX.findall(regex)} & set(range(of))
    if not numbers:
        return regex
    chosen = _blocks(numbers, of, to)
    return _NUMBER_IN_REGEX.sub(
        lambda found: str(min(chosen, key=lambda index: abs(index - int(found[0]) * to // of))), regex
    )


def _blocks(indexes: Iterable[int], of: int, to: int) -> list[int]:
    """Return the small layers that represent the given layers."""
    given = set(indexes)
    blocks = {small: {index for index in range(of) if index * to // of == small} for small in range(to)}
    return [small for small, block in blocks.items() if block and block <= given] or [min(given) * to // of]
