"""Map patterns and regular expressions that name layers to a model of fewer layers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

LISTS = ("layers", "layer", "h", "blocks", "block")
"""Names of the lists of decoder layers in transformers, XLM's aside. The index of another list, such as one
of experts, is not that of a layer."""
_NUMBER_IN_REGEX = re.compile(r"(?<![\w{,\[-])\d+(?![\w},\]-])")
"""A literal number, outside repetition counts and character ranges."""
_NAME_BEFORE = re.compile(r"([A-Za-z_]\w*)\\?\.$")


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


def map_group_patterns(groups: Sequence[Sequence[str]], of: int, to: int) -> list[list[str]]:
    """Map the patterns of each entry of `training.parameter_groups`; an entry may have none left.

    A small layer represents several layers, and belongs to the first entry with one of them: in a recipe, it
    is an error if a later entry matches it again.
    """
    mapped: list[list[str]] = []
    for patterns in groups:
        earlier = [pattern for group in mapped for pattern in group]
        mapped.append(
            [
                pattern
                for pattern in map_layer_patterns(patterns, of, to)
                if not any(fnmatch.fnmatchcase(pattern, other) for other in earlier)
            ]
        )
    return mapped


def map_lora_names(lora: Mapping[str, Any], of: int, to: int) -> dict[str, str | list[str]]:
    """Return the keys of `lora:` that name modules or parameters, with the layers in them mapped."""
    return {
        key: map_layer_regex(lora[key], of, to)
        if isinstance(lora[key], str)
        else map_layer_patterns(lora[key], of, to)
        for key in ("target_modules", "target_parameters", "modules_to_save")
        if key in lora
    }


class _LayerPattern(NamedTuple):
    """A pattern of module names that names layers: its parts before and after the index, and the matching
    indexes."""

    before: str
    after: str
    indexes: set[int]


def _layers_of(pattern: str, of: int) -> _LayerPattern | None:
    """Return the layers that a pattern names; None if it names none by an index that the model has."""
    parts = pattern.split(".")
    for position in range(1, len(parts)):
        part, before = parts[position], parts[position - 1]
        is_index = re.fullmatch(r"[\d*?\[\]!-]+", part) and re.search(r"[\d?]", part)
        if is_index and any(fnmatch.fnmatchcase(name, before) for name in LISTS):
            found = {index for index in range(of) if fnmatch.fnmatchcase(str(index), part)}
            if found:
                return _LayerPattern(".".join(parts[:position]), ".".join(parts[position + 1 :]), found)
    return None


def map_layer_regex(regex: str, of: int, to: int) -> str:
    """Map a regular expression of module names (`model\\.layers\\.(12|13)\\.mlp`) from a model of `of` layers
    to one of `to` layers."""
    found = {
        number.start(): int(number[0])
        for number in _NUMBER_IN_REGEX.finditer(regex)
        if _list_before(regex, number.start()) in (None, *LISTS)
    }
    numbers = set(found.values()) & set(range(of))
    if not numbers:
        return regex
    chosen = _blocks(numbers, of, to)

    def small(number: re.Match[str]) -> str:
        if number.start() not in found:
            return number[0]
        return str(min(chosen, key=lambda index: abs(index - int(number[0]) * to // of)))

    return _NUMBER_IN_REGEX.sub(small, regex)


def _list_before(regex: str, at: int) -> str | None:
    """Return the name that a number follows: directly (`experts\\.3`), or as an alternative of a group
    (`experts\\.(3|4)`); None if it follows no plain name."""
    while (name := _NAME_BEFORE.search(regex[:at])) is None:
        depth = 0
        while depth >= 0:  # to the bracket that opens the group
            at -= 1
            if at < 0:
                return None
            depth += {")": 1, "(": -1}.get(regex[at], 0)
    return name[1]


def _blocks(indexes: Iterable[int], of: int, to: int) -> list[int]:
    """Return the small layers that represent the given layers."""
    given = set(indexes)
    blocks = {small: {index for index in range(of) if index * to // of == small} for small in range(to)}
    return [small for small, block in blocks.items() if block and block <= given] or [min(given) * to // of]
