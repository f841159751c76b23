"""Changes to a config.json: which fields differ, and the spellings of transformers 4 and 5 for one fact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from fsdp_tune.core.families import OLD_LOCAL_ROPE, OLD_ROPE, SLIDING, family_of, is_nested
from fsdp_tune.core.values import as_mapping

_TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""How transformers 5 writes these values, `{"__float__": "Infinity"}`; transformers 4 writes and reads the
bare word."""


def changed_fields(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a config.json that differ from those of another one; of nested configurations
    their differing fields."""
    changed: dict[str, object] = {}
    for name, value in after.items():
        old = before.get(name)
        if is_nested(name, old) and is_nested(name, value):
            changed |= {name: inner} if (inner := changed_fields(old, value)) else {}  # type: ignore[arg-type]
        elif old != value:
            changed[name] = value
    return changed


VOCABULARY_KEY, TEXT_KEY = "vocab_size", "text_config"


def vocabulary_of(config: Mapping[str, object]) -> int | None:
    """Return the size of the vocabulary of a config.json; of a model of several modalities, that of its
    text."""
    text = as_mapping(config.get(TEXT_KEY))
    found = text.get(VOCABULARY_KEY, config.get(VOCABULARY_KEY))
    return found if isinstance(found, int) else None


def vocabulary_changes(config: Mapping[str, object], size: int) -> dict[str, object]:
    """Return the fields of `with_changes` for a vocabulary of another size."""
    has_text = VOCABULARY_KEY in as_mapping(config.get(TEXT_KEY))
    changes: dict[str, object] = {TEXT_KEY: {VOCABULARY_KEY: size}} if has_text else {}
    return changes if has_text and VOCABULARY_KEY not in config else {**changes, VOCABULARY_KEY: size}


def with_changes(config: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json with the fields of `changed_fields`, rotary positions in both spellings."""
    merged = {
        name: value
        for name, value in config.items()
        if "rope_parameters" not in changes or name not in (*OLD_ROPE, OLD_LOCAL_ROPE)
    }
    for name, value in changes.items():
        inner = config.get(name)
        are_nested = is_nested(name, inner) and is_nested(name, value)
        merged[name] = with_changes(inner, value) if are_nested else value  # type: ignore[arg-type]
    return (
        merged
        | (_old_rope_fields_of(merged) if "rope_parameters" in changes else {})
        | old_names(config, changes)
    )


def with_old_spellings(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json of transformers 5 that transformers 4 reads too, nested configurations
    included."""
    old: dict[str, object] = {
        name: with_old_spellings(as_mapping(value)) if is_nested(name, value) else with_floats(value)
        for name, value in config.items()
    }
    return old | _old_rope_fields_of(config) | old_names(config, config)


def with_floats(value: Any) -> Any:
    """Return a value of a config.json with the infinities and NaN that transformers 5 tags as floats."""
    match value:
        case {"__float__": str(word), **rest} if not rest and word in _TAGGED:
            return _TAGGED[word]
        case dict():
            return {name: with_floats(inner) for name, inner in cast("dict[str, Any]", value).items()}
        case list():
            return [with_floats(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def _old_rope_fields_of(config: Mapping[str, object]) -> dict[str, object]:
    fields = old_rope_fields(config.get("rope_parameters"))
    names = family_of(config.get("model_type")).old_rope_names
    return fields | {old: fields[name] for name, old in names.items() if name in fields}


def old_names(config: Mapping[str, object], fields: Mapping[str, object]) -> dict[str, object]:
    """Return those of `fields` that transformers 4 reads under another name for the model type of `config`,
    by that name."""
    return {
        old: fields[name]
        for name, old in family_of(config.get("model_type")).old_names.items()
        if name in fields
    }


def old_rope_fields(parameters: object) -> dict[str, object]:
    """Return `rope_parameters` in the fields of transformers 4; empty if they had no spelling there.

    Parameters by layer type had one for the two types of Gemma 3 and its relatives, whose sliding layers are
    not scaled.
    """
    if not isinstance(parameters, dict) or not parameters:
        return {}
    fields = cast("dict[str, Any]", parameters)
    if not any(isinstance(value, dict) for value in fields.values()):
        return _flat(fields)
    if set(fields) != {"full_attention", SLIDING} or not all(
        isinstance(value, dict) for value in fields.values()
    ):
        return {}
    local = _flat(fields[SLIDING])
    if local["rope_scaling"] is not None or "rope_theta" not in local:
        return {}
    return _flat(fields["full_attention"]) | {OLD_LOCAL_ROPE: local["rope_theta"]}


def _flat(parameters: Mapping[str, object]) -> dict[str, object]:
    own = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in parameters.items() if name not in own}
    is_scaled = scaling.get("rope_type", "default") != "default"
    return {name: parameters[name] for name in own if name in parameters} | {
        "rope_scaling": scaling if is_scaled else None
    }
