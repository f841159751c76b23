"""Keys that differ between two recipes, and which of them cause a difference: shown by giving one side the
other's values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.secrets import mask_text, masked
from fsdp_tune.core.units import ScalarError, parse_plain
from fsdp_tune.core.values import as_list, as_mapping
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.schema.key_effects import Affects
from fsdp_tune.recipe.schema.keys import effect_of
from fsdp_tune.recipe.schema.reference import describe_key, described_names, passed_defaults
from fsdp_tune.recipe.schema.training_fields import CHOOSING

_ENVIRONMENT = ("launch", "env")
_INDEX = re.compile(r"\[\d+\]")
_AFFECTS = {
    Affects.DATA: "the rows and their order",
    Affects.NUMBERS: "losses and weights computed from the same rows",
    Affects.MEMORY: "memory",
    Affects.TIME: "time",
    Affects.RESULT: "which weights are delivered, and how they are rounded",
}
TRANSPORT = ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Variables of `launch.env` that choose how ranks exchange data: sums in another order, which is rounding."""


@dataclass(frozen=True, slots=True)
class DifferentKey(JsonAnswer):
    """A key of the resolved recipes."""

    key: str
    a: object
    b: object
    changes_numbers: bool
    """Whether the key affects the rows, their order, losses, weights or the delivered model: without more,
    the sides are not equal."""
    affects: list[str]
    meaning: str
    """As docs/reference/recipe.yaml describes the key."""


def different_paths(a: object, b: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths at which two documents differ; a list whose length differs is one value."""
    if isinstance(a, dict) and isinstance(b, dict):
        one, other = as_mapping(a), as_mapping(b)
        for key in [*one, *(key for key in other if key not in one)]:
            yield from different_paths(one.get(key), other.get(key), (*path, key))
    elif isinstance(a, list) and isinstance(b, list) and len(as_list(a)) == len(as_list(b)):
        for index, (one, other) in enumerate(zip(as_list(a), as_list(b), strict=True)):
            yield from different_paths(one, other, (*path, index))
    elif a != b or isinstance(a, bool) is not isinstance(b, bool):
        yield path


def with_passed_defaults(document: Mapping[str, object]) -> dict[str, object]:
    """Return a resolved recipe with the defaults of TrainingArguments written out: left out, they mean the
    same."""
    written = as_mapping(document.get("training"))
    defaults = {
        name: value
        for name, value in passed_defaults().items()
        if value is not None and written.get(name) is None
    }
    return {**document, "training": {**written, **defaults}}


def value_at(document: object, path: KeyPath) -> object:
    """Return the value at a path; None if there is none."""
    for part in path:
        document = (
            as_mapping(document).get(part)
            if isinstance(part, str)
            else next(iter(as_list(document)[part : part + 1]), None)
        )
    return document


def with_values(
    document: Mapping[str, object], source: Mapping[str, object], paths: Sequence[KeyPath]
) -> dict[str, object]:
    """Return a copy of a document with the values of another one at some paths; a key that the other lacks is
    removed."""
    made: dict[str, object] = json.loads(json.dumps(document))
    for path in paths:
        holder, part = value_at(made, path[:-1]), path[-1]
        value: object = json.loads(json.dumps(value_at(source, path)))
        holder_of_value = value_at(source, path[:-1])
        if isinstance(part, int):
            if isinstance(holder, list):
                as_list(holder)[part] = value
        elif not isinstance(holder_of_value, dict) or part not in holder_of_value:
            as_mapping(holder).pop(part, None)
        else:
            as_mapping(holder)[part] = value
    return made


def option_paths(
    paths: Sequence[KeyPath],
    rows: Iterable[tuple[KeyPath, Sequence[KeyPath]]],
    documents: Sequence[Mapping[str, object]],
) -> list[KeyPath]:
    """Return the options of a tool from which keys of a recipe come, as far as all `documents` have what
    holds them.

    `rows`: a path of the options, and the keys of the recipe that it gives values.
    """
    found: dict[KeyPath, None] = {}
    for option, targets in rows:
        if any(
            target[: len(path)] == path or path[: len(target)] == target
            for target in targets
            for path in paths
        ):
            while len(option) > 1 and not all(
                isinstance(value_at(each, option[:-1]), dict | list) for each in documents
            ):
                option = option[:-1]
            found[option] = None
    return [path for path in found if not any(path[:length] in found for length in range(1, len(path)))]


def affects_of(path: KeyPath) -> Affects:
    return effect_of(_INDEX.sub("", dotted(path))).affects


def is_of_data(name: str) -> bool:
    """Return whether a key, by its name, affects rows or their order."""
    return bool(effect_of(_INDEX.sub("", name)).affects & Affects.DATA)


def rounds_otherwise(name: str) -> bool:
    """Return whether a key, by its name, chooses how the same numbers are computed: ranks, micro-batches,
    kernels."""
    return bool(effect_of(_INDEX.sub("", name)).affects & (Affects.MEMORY | Affects.TIME))


def changes_numbers(path: KeyPath, *, chooses_by_evaluation: bool = True) -> bool:
    """Return whether a key changes rows, numbers or the delivered model. `chooses_by_evaluation`: of one of
    the sides."""
    name = _INDEX.sub("", dotted(path))
    is_choosing = name in CHOOSING or path[0] == "evaluation"
    if (is_choosing and not chooses_by_evaluation) or (
        path[:2] == _ENVIRONMENT and str(path[-1]).startswith(TRANSPORT)
    ):
        return False
    return bool(affects_of(path) & (Affects.DATA | Affects.NUMBERS | Affects.RESULT))


def different_key(path: KeyPath, a: object, b: object, *, chooses_by_evaluation: bool = True) -> DifferentKey:
    """Describe a key that differs, with secrets masked. `chooses_by_evaluation`: see `changes_numbers`."""
    name = _INDEX.sub("", dotted(path))
    affects = affects_of(path)
    meaning = describe_key(name).meaning if name in described_names() else ""
    return DifferentKey(
        key=dotted(path),
        a=_safe(path, _or_default(name, a)),
        b=_safe(path, _or_default(name, b)),
        changes_numbers=changes_numbers(path, chooses_by_evaluation=chooses_by_evaluation),
        affects=[text for flag, text in _AFFECTS.items() if affects & flag],
        meaning=meaning,
    )


def _or_default(name: str, value: object) -> object:
    """Return the default of a field of TrainingArguments that is not written: a resolved recipe leaves it
    out."""
    return (
        passed_defaults().get(name.removeprefix("training."))
        if value is None and name.startswith("training.")
        else value
    )


def _safe(path: KeyPath, value: object) -> object:
    if path[:2] == _ENVIRONMENT and isinstance(value, str):
        return masked(str(path[-1]), value)
    if isinstance(value, dict):
        return {key: _safe(path, each) for key, each in as_mapping(value).items()}
    if isinstance(value, list):
        return [_safe(path, each) for each in as_list(value)]
    return mask_text(value) if isinstance(value, str) else value


def causing(
    candidates: Sequence[KeyPath], vanishes: Callable[[Sequence[KeyPath]], bool]
) -> tuple[KeyPath, ...]:
    """Return a set of keys whose values, taken over from A, make a difference vanish in B; () if all of them
    do not.

    `vanishes` computes B again with A's values of some keys. First each key alone, then all of them, reduced
    one by one until no single key of the result can be left out. Another set may be smaller. No set is
    computed twice.
    """
    computed: dict[tuple[KeyPath, ...], bool] = {}

    def suffices(keys: tuple[KeyPath, ...]) -> bool:
        if keys not in computed:
            computed[keys] = vanishes(keys)
        return computed[keys]

    for path in candidates:
        if suffices((path,)):
            return (path,)
    needed = tuple(candidates)
    if len(needed) < 2 or not suffices(needed):
        return ()
    before: tuple[KeyPath, ...] = ()
    while needed != before:  # a key may be needed only as long as another one is there
        before = needed
        for path in before:
            rest = tuple(each for each in needed if each != path)
            if suffices(rest):
                needed = rest
    return needed


def by_likelihood(paths: Sequence[KeyPath], *, is_data_stage: bool) -> list[KeyPath]:
    """Return candidates with those first that affect what the stage shows; keys that change nothing are left
    out.

    How a step is divided among ranks may change how many rows it has, but no number of the same rows.
    """
    first = Affects.DATA if is_data_stage else Affects.NUMBERS
    rest = [path for path in paths if (affects_of(path) if is_data_stage else changes_numbers(path))]
    return sorted(rest, key=lambda path: (not affects_of(path) & first, not changes_numbers(path)))


def is_named(key: str, causes: set[str]) -> bool:
    """Return whether a key, or the section above or the key below it, is among the causes."""
    return any(
        key == each or key.startswith((f"{each}.", f"{each}[")) or each.startswith((f"{key}.", f"{key}["))
        for each in causes
    )


def is_among(path: KeyPath, resolved: set[KeyPath]) -> bool:
    """Return whether a written key, or one below or above it, differs in the resolved recipes too."""
    return any(path[: len(other)] == other or other[: len(path)] == path for other in resolved)


def set_fields(value: object) -> object:
    """Return a value without the fields that are unset or empty, which a recipe does not write."""
    if isinstance(value, dict):
        fields = {name: set_fields(each) for name, each in cast("dict[str, object]", value).items()}
        return {name: each for name, each in fields.items() if each is not None and each != {}}
    return [set_fields(each) for each in cast("list[object]", value)] if isinstance(value, list) else value


def setting_of(written: Mapping[str, object], path: KeyPath, value: object) -> tuple[str, object]:
    """Return the key and value that `--set` takes: of an entry of a list, the whole list of the document."""
    at = next((index for index, part in enumerate(path) if isinstance(part, int)), None)
    if at is None or value is None:
        return dotted(path), value
    whole = path[:at]
    return dotted(whole), set_fields(different_key(whole, value_at(written, whole), None).a)


def yaml_value(value: object) -> str:
    """Return the text that `--set` reads as this value."""
    with suppress(ScalarError):
        if (
            isinstance(value, str)
            and value
            and value == value.strip()
            and value[0] not in "[{\"'"
            and parse_plain(value) == (value, None)
        ):
            return value
    return json.dumps(value, ensure_ascii=False)
