"""The keys of a recipe as a list: lookup by path, values, descriptions of the accepted values, and suggestions for unknown keys."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from fsdp_tune.recipe.scalars import enumerated
from fsdp_tune.recipe.schema.kinds import UNDECLARED, Description, Effect, Section
from fsdp_tune.recipe.schema.recipe import Recipe, Training
from fsdp_tune.recipe.schema.training_fields import PASSED_EFFECTS, TRAINING_FIELDS, owner_of, training_value
from fsdp_tune.recipe.synonyms import synonym_hint

Path = tuple[str | int, ...]
_SCALAR_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "a value",
}
CLOSE = 0.72
AS_CLOSE = 0.03
LONGER = 3
"""Names that begin with an unknown one, at most: more of them would be a list and not a correction."""


@dataclass(frozen=True, slots=True)
class Key:
    """`path` has no list indexes: the keys of a source are `data.train.path` and so on."""

    path: tuple[str, ...]
    field: FieldInfo
    section: type[Section]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def effect(self) -> Effect | None:
        """The declared effect: that of the field, or else that of its section."""
        return next((item for item in self.field.metadata if isinstance(item, Effect)), self.section.default_effect)


def dotted(path: Sequence[str | int]) -> str:
    """Format a path: ("data", "train", 0, "path") → `data.train[0].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the section classes inside a type, through unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) is Literal:
        return []
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def _walk(section: type[Section], prefix: tuple[str, ...]) -> Iterator[Key]:
    for attribute, field in section.model_fields.items():
        path = (*prefix, field.alias or attribute)
        yield Key(path, field, section)
        for inner in sections_in(field.annotation):
            yield from _walk(inner, path)


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key in the order of the schema, each section before its keys."""
    return tuple(_walk(Recipe, ()))


@cache
def _declared_effects() -> dict[str, Effect]:
    passed = {f"training.{name}": effect for name, effect in PASSED_EFFECTS.items()}
    return passed | {key.name: key.effect for key in all_keys() if key.effect is not None}


def effect_of(name: str) -> Effect:
    """Return the declared effect of a key (`data.max_length`), or of the mapping that holds it (`launch.env.OMP_NUM_THREADS`).

    A key without a declaration affects everything.
    """
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((found for prefix in prefixes if (found := _declared_effects().get(prefix)) is not None), UNDECLARED)


def values_by_key(recipe: Recipe) -> dict[str, Any]:
    """Return every key with its value as JSON: `{"fsdp.version": 2, …}`. Lists are values; mappings are keys, unless empty."""
    return dict(_values(recipe.model_dump(mode="json", by_alias=True), ""))


def _values(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _values(cast(dict[str, Any], inner), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """Return the field at a path; None below a free mapping and for an unknown key."""
    names = tuple(part for part in path if isinstance(part, str))
    return next((key.field for key in all_keys() if key.path == names), None)


def words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values of a type, for a sentence that ends in `takes …`."""
    return enumerated(_parts(annotation, metadata))


def _parts(annotation: Any, metadata: Sequence[Any] = ()) -> list[str]:
    for item in metadata:
        if isinstance(item, Description):
            return [item.text]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _parts(arguments[0], arguments[1:])
    if origin is Literal:
        return [f"`{value}`" for value in arguments]
    if origin in (Union, types.UnionType):
        return [part for argument in arguments for part in _parts(argument)]
    if origin is list:
        return [f"a list (each entry {words(arguments[0])})"]
    if origin is dict or annotation is dict:
        return ["a mapping"]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        names = [f"`{field.alias or name}`" for name, field in annotation.model_fields.items()]
        return [f"a mapping with {enumerated(names, 'and')}" if len(names) < 5 else "a mapping of its keys"]
    return [_SCALAR_WORDS.get(cast(object, annotation), "another value")]


def field_words(field: FieldInfo) -> str:
    return words(field.annotation, field.metadata)


def element_words(annotation: Any) -> str:
    """Describe the entries of the list in a type; "" if it has none."""
    if get_origin(annotation) is list:
        return words(get_args(annotation)[0])
    inner = [element_words(argument) for argument in get_args(annotation) if get_origin(annotation) is not Literal]
    return next((found for found in inner if found), "")


def choices(annotation: Any) -> list[str]:
    """Return the literal strings among the values of a type."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [choice for argument in get_args(annotation) for choice in choices(argument)]


def closest(name: str, candidates: Sequence[str]) -> str | None:
    lowered = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=CLOSE)
    return lowered[found[0]] if found else None


def _closest_ones(name: str, candidates: Sequence[str]) -> list[str]:
    """Return the names that begin with this one (`rename`: `rename_columns`), else the closest, several if they are equally close:
    `per_device_batch_size` resembles those of training and evaluation."""
    longer = sorted(one for one in candidates if one.startswith(f"{name.lower()}_"))
    if 0 < len(longer) <= LONGER:
        return longer
    near = difflib.get_close_matches(name.lower(), candidates, n=3, cutoff=CLOSE)
    ratios = [difflib.SequenceMatcher(None, one, name.lower()).ratio() for one in near]
    return sorted(one for one, ratio in zip(near, ratios, strict=True) if ratio > ratios[0] - AS_CLOSE)


def unknown_key_hint(path: Sequence[str | int], value: Any = None) -> str | None:
    """Return a hint for an unknown key: the section that has it, its name in a recipe, or the closest spelling in the same section.

    `value` is the given one, which the name of another tool may change.
    """
    *parent_path, name = [part for part in path if isinstance(part, str)]
    parent = tuple(parent_path)
    if "token" in name.lower() and ("hf" in name.lower() or "hub" in name.lower() or "auth" in name.lower() or name.lower() == "token"):
        return "a recipe never contains a token: set HF_TOKEN, or log in with `hf auth login`"
    known = synonym_hint(name, value, in_source=parent in (("data", "train"), ("data", "eval")))
    homes = _homes(name, parent)
    if homes and (known is None or parent):  # `adapter` is a key of `lora:`, and at the top that of axolotl
        return "belongs " + enumerated([f"under `{home}:`" if home else "at the top of the recipe" for home in homes])
    if known is not None:
        return known
    if (owner := owner_of(name)) is not None:
        return owner
    siblings = [key.path[-1] for key in all_keys() if key.path[:-1] == parent]
    siblings += [field for field in TRAINING_FIELDS.fields if owner_of(field) is None] if parent == ("training",) else []
    if near := _closest_ones(name, siblings):
        return f"did you mean {enumerated([f'`{dotted((*parent, one))}`' for one in near])}?"
    place = f"`{'.'.join(parent)}`" if parent else "the top of a recipe"
    return f"{place} takes {enumerated([f'`{sibling}`' for sibling in siblings], 'and')}" if siblings and len(siblings) <= 15 else None


def _homes(name: str, parent: tuple[str, ...]) -> list[str]:
    """Return the sections that have a key of this name: `training:` alone for one of TrainingArguments, as at the top elsewhere."""
    if name in TRAINING_FIELDS.fields and owner_of(name) is None and parent != ("training",):
        return ["training"]
    found = [".".join(key.path[:-1]) for key in all_keys() if key.path[-1] == name and key.path[:-1] not in {parent, ("data", "eval")}]
    return list(dict.fromkeys(found))


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a key, such as `fsdp.version`, or of a passed field of TrainingArguments."""
    section: Any = recipe
    *parents, name = key.split(".")
    for parent in parents:
        section = getattr(section, parent)
    if parents == ["training"] and name not in Training.model_fields:
        return training_value(recipe.training, name)
    return getattr(section, "async_" if name == "async" else name)
