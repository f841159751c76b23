"""The outcome of a value of another tool: written into a recipe, asked of a person, or dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from fsdp_tune.core.units import printable
from fsdp_tune.core.values import is_mapping
from fsdp_tune.recipe.key_paths import KeyPath, as_path, flattened

Settings = Mapping[str, object] | Mapping[KeyPath, object] | Mapping[str | KeyPath, object]
"""Values of a recipe by key, which is dotted or a path; a value may be a mapping of keys."""

_SHOWN_CHARACTERS = 100


class Fate(StrEnum):
    """What became of a key of the other tool."""

    KEPT = "kept"
    CONVERTED = "converted"
    COMPUTED = "computed"
    QUESTION = "question"
    DROPPED = "dropped"


class Weight(StrEnum):
    """How strongly a value is meant; of two values for one key the stronger is written."""

    DEFAULT = "default"
    """What the other tool does where its file says nothing."""
    IMPLIED = "implied"
    """Follows from a key about something else: an adapter has a rank."""
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Write:
    """The value is these keys of a recipe. `reason`: how they differ from it."""

    settings: Settings
    reason: str = ""
    fate: Fate = Fate.CONVERTED
    weight: Weight = Weight.GIVEN


@dataclass(frozen=True, slots=True)
class Ask:
    """A person has to decide. `near`: the key of a recipe that the question is about, dotted or a path."""

    words: str
    near: str | KeyPath = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """The value has no counterpart and needs none."""

    reason: str


def by_path(settings: Settings) -> Iterator[tuple[KeyPath, object]]:
    """Return each key of a part of a recipe with its value, by its path."""
    for key, value in settings.items():
        yield from flattened(value, as_path(key))


def in_words(outcome: Write | Ask | Drop) -> str:
    """Return an outcome as the rest of a hint."""
    match outcome:
        case Ask():
            return outcome.words
        case Drop():
            return f"leave it out: {outcome.reason}"
        case Write():
            lines = "` and `".join(written(str(key), value) for key, value in outcome.settings.items())
            return f"write `{lines}`{f', {outcome.reason}' if outcome.reason else ''}"


def nested(key: str, value: object) -> dict[str, object]:
    """Return a dotted key and its value as a part of a recipe; entries of `data.train` are a list."""
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: [tree] if part == "train" and is_mapping(tree) else tree}
    return tree


def written(key: str, value: object) -> str:
    """Return a dotted key and its value as one line of YAML: `data: {max_length: 512}`."""
    tree = nested(key, value)
    line = yaml.safe_dump(
        tree, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False
    ).strip()
    line = printable(line.removeprefix("{").removesuffix("}"))
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
