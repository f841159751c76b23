"""The keys of a recipe as a list: lookup by path, values, descriptions of the accepted values, and
suggestions for unknown keys.

Findings of rules are about keys: contradictions between them, and keys without effect. The loader adds line
numbers.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from fsdp_tune.core.errors import Notice, Problem, Where
from fsdp_tune.core.units import enumerated, printable
from fsdp_tune.recipe.key_paths import dotted
from fsdp_tune.recipe.schema.key_effects import UNDECLARED, Effect
from fsdp_tune.recipe.schema.near_names import agree
from fsdp_tune.recipe.schema.recipe import Recipe, Training
from fsdp_tune.recipe.schema.training_fields import PASSED_EFFECTS, TRAINING_FIELDS, owner_of, training_value
from fsdp_tune.recipe.schema.value_kinds import Description, Section
from fsdp_tune.recipe.synonyms import synonym_hint

_SOURCES_TOO = (("data", "eval"), ("evaluation", "sets"))
"""Lists whose entries have the keys of those of `data.train`."""
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
        return next(
            (item for item in self.field.metadata if isinstance(item, Effect)), self.section.default_effect
        )


def meant_key(key: str) -> str:
    """Return the key of the schema that a misspelled key most likely means; a known key, or one like none, as
    it is."""
    *above, name = key.split(".")
    if field_at([part.partition("[")[0] for part in (*above, name)]) is not None:
        return key
    depth = len(above)
    near = closest(
        name,
        [
            known.path[-1]
            for known in all_keys()
            if known.path[:-1] == tuple(above) and len(known.path) == depth + 1
        ],
    )
    return key if near is None else ".".join((*above, near))


def sections_in(annotation: object) -> list[type[Section]]:
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
    """Return the declared effect of a key (`data.max_length`), or of the mapping that holds it
    (`launch.env.OMP_NUM_THREADS`).

    A key without a declaration affects everything.
    """
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(
        (found for prefix in prefixes if (found := _declared_effects().get(prefix)) is not None), UNDECLARED
    )


def values_by_key(recipe: Recipe) -> dict[str, object]:
    """Return every key with its value as JSON: `{"fsdp.version": 2, …}`. Lists are values; mappings are keys,
    unless empty."""
    return dict(_values(recipe.model_dump(mode="json", by_alias=True), ""))


def _values(value: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _values(cast(dict[str, object], inner), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def field_at(path: Sequence[str | int]) -> FieldInfo | None:
    """Return the field at a path; None below a free mapping and for an unknown key."""
    names = tuple(part for part in path if isinstance(part, str))
    return next((key.field for key in all_keys() if key.path == names), None)


def _free_values(path: Sequence[str | int]) -> object:
    """Return the type of the values of the mapping of any keys that a path leads into; None if it leads
    elsewhere."""
    if path[0] == "training" and len(path) > 2 and path[1] in TRAINING_FIELDS.fields:
        return object if "dict" in TRAINING_FIELDS.fields[str(path[1])].types else None
    above = next(filter(None, (field_at(path[:depth]) for depth in range(len(path) - 1, 0, -1))), None)
    if above is None or field_at(path) is not None:
        return None
    return next((get_args(each)[1] for each in _members(above.annotation) if get_origin(each) is dict), None)


def _members(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        yield from (member for argument in get_args(annotation) for member in _members(argument))
    else:
        yield annotation


def _is_known(path: Sequence[str | int]) -> bool:
    """Return whether a recipe can have a key: of the schema, of TrainingArguments, or in a free mapping."""
    is_passed = path[0] == "training" and len(path) == 2 and path[1] in TRAINING_FIELDS.fields
    return is_passed or field_at(path) is not None or _free_values(path) is not None


def has_default(path: Sequence[str | int]) -> bool:
    """Return whether null for a key is its default. In a mapping of any values, as `model.config_overrides`,
    null is one of them."""
    return _is_known(path) and _free_values(path) is not Any


def default_at(path: Sequence[str | int]) -> object:
    """Return the default of a key of the schema, or of a field of TrainingArguments."""
    field = field_at(path)
    return TRAINING_FIELDS.fields[str(path[-1])].default if field is None else default_of(field)


def default_of(field: FieldInfo) -> object:
    return field.get_default(call_default_factory=True)


def words(annotation: object, metadata: Sequence[object] = ()) -> str:
    """Describe the values of a type, for a sentence that ends in `takes …`."""
    return enumerated(_parts(annotation, metadata))


def _parts(annotation: object, metadata: Sequence[object] = ()) -> list[str]:
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


def element_words(annotation: object) -> str:
    """Describe the entries of the list in a type; "" if it has none."""
    if get_origin(annotation) is list:
        return words(get_args(annotation)[0])
    inner = [
        element_words(argument) for argument in get_args(annotation) if get_origin(annotation) is not Literal
    ]
    return next((found for found in inner if found), "")


def choices(annotation: object) -> list[str]:
    """Return the literal strings among the values of a type."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [choice for argument in get_args(annotation) for choice in choices(argument)]


def closest(name: str, candidates: Sequence[str]) -> str | None:
    lowered = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=CLOSE)
    return lowered[found[0]] if found else None


def _closest_ones(name: str, candidates: Sequence[str]) -> list[str]:
    """Return the names that begin with this one (`rename`: `rename_columns`), else the closest, several if
    they are equally close: `per_device_batch_size` resembles those of training and evaluation. Names of
    another unit or scope are no candidates."""
    candidates = [one for one in candidates if agree(name, one)]
    longer = sorted(one for one in candidates if one.startswith(f"{name.lower()}_"))
    if 0 < len(longer) <= LONGER:
        return longer
    near = difflib.get_close_matches(name.lower(), candidates, n=3, cutoff=CLOSE)
    ratios = [difflib.SequenceMatcher(None, one, name.lower()).ratio() for one in near]
    return sorted(one for one, ratio in zip(near, ratios, strict=True) if ratio > ratios[0] - AS_CLOSE)


def unknown_key_hint(path: Sequence[str | int], value: object = None) -> str | None:
    """Return a hint for an unknown key: the section that has it, its name in a recipe, or the closest
    spelling in the same section.

    `value` is the given one, which the name of another tool may change.
    """
    *parent_path, name = [part for part in path if isinstance(part, str)]
    parent = tuple(parent_path)
    if "token" in name.lower() and (
        "hf" in name.lower() or "hub" in name.lower() or "auth" in name.lower() or name.lower() == "token"
    ):
        return "a recipe never contains a token: set HF_TOKEN, or log in with `hf auth login`"
    known = synonym_hint(name, value, in_source=parent in (("data", "train"), *_SOURCES_TOO))
    homes = _homes(name, parent)
    if homes and (known is None or parent):  # `adapter` is a key of `lora:`, and at the top that of axolotl
        return "belongs " + enumerated(
            [f"under `{home}:`" if home else "at the top of the recipe" for home in homes]
        )
    if known is not None:
        return known
    if (owner := owner_of(name)) is not None:
        return owner
    siblings = [key.path[-1] for key in all_keys() if key.path[:-1] == parent]
    siblings += (
        [field for field in TRAINING_FIELDS.fields if owner_of(field) is None]
        if parent == ("training",)
        else []
    )
    if near := _closest_ones(name, siblings):
        return f"did you mean {enumerated([f'`{dotted((*parent, one))}`' for one in near])}?"
    place = f"`{'.'.join(parent)}`" if parent else "the top of a recipe"
    return (
        f"{place} takes {enumerated([f'`{sibling}`' for sibling in siblings], 'and')}"
        if siblings and len(siblings) <= 15
        else None
    )


def _homes(name: str, parent: tuple[str, ...]) -> list[str]:
    """Return the sections that have a key of this name: `training:` alone for one of TrainingArguments, as at
    the top elsewhere."""
    if name in TRAINING_FIELDS.fields and owner_of(name) is None and parent != ("training",):
        return ["training"]
    found = [
        ".".join(key.path[:-1])
        for key in all_keys()
        if key.path[-1] == name and key.path[:-1] not in {parent, *_SOURCES_TOO}
    ]
    return list(dict.fromkeys(found))


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a key, such as `fsdp.version`, or of a passed field of TrainingArguments."""
    section: object = recipe
    *parents, name = key.split(".")
    for parent in parents:
        section = getattr(section, parent)
    if parents == ["training"] and name not in Training.model_fields:
        return training_value(recipe.training, name)
    return getattr(section, "async_" if name == "async" else name)


Positions = Mapping[str, Where]


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a rule. `keys` lists the keys that contradict each other; the first one is the one to
    change."""

    code: str
    keys: tuple[str, ...]
    message: str
    hint: str | None = None
    ways_out: tuple[str, ...] = ()


Rule = Callable[[Recipe], Iterator[Finding]]


def given(recipe: Recipe, key: str) -> bool:
    """Return whether a key is written in the recipe, as opposed to having its default."""
    *parents, name = key.split(".")
    section = value_of(recipe, ".".join(parents)) if parents else recipe
    if section is None:  # `quantization: null`
        return False
    extra = section.model_extra or {}
    return name in section.model_fields_set or name in extra or f"{name}_" in section.model_fields_set


def located(finding: Finding, positions: Positions) -> tuple[Where, str]:
    """Return the position of the first written key, and the message with the lines of the others."""
    written = [key for key in finding.keys if key in positions]
    text = printable(finding.message)
    if not written:
        return Where(key=finding.keys[0] if finding.keys else None), text
    first = positions[written[0]]
    others = [f"`{key}` on {_place(positions[key])}" for key in written[1:]]
    message = f"{text} ({', '.join(others)})" if others else text
    return Where(first.source, first.line, first.column, written[0]), message


def as_problem(finding: Finding, positions: Positions) -> Problem:
    where, message = located(finding, positions)
    return Problem(finding.code, message, where, finding.hint, finding.ways_out)


def as_notice(finding: Finding, positions: Positions, *, strict: bool) -> Notice:
    where, message = located(finding, positions)
    return Notice(finding.code, message, where, finding.hint, strict)


def _place(where: Where) -> str:
    return f"line {where.line}" if where.line is not None else str(where)


def pinned(problem: Problem, positions: Positions) -> Problem:
    """Add to a problem that only names a key the line where that key, or its nearest parent, is written."""
    key = problem.where.key
    if problem.where.source is not None or key is None:
        return problem
    while key and key not in positions:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return problem.at(replace(positions[key], key=problem.where.key)) if key else problem
