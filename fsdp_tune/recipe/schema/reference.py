"""Documents generated from the schema: the commented reference, the JSON Schema for editors, the frozen list
of keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fsdp_tune.core.units import enumerated
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.recipe.schema.keys import Key, all_keys, default_of, field_words
from fsdp_tune.recipe.schema.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import (
    TRAINING_FIELDS,
    TrainingField,
    describe_field,
    owned_names,
)
from fsdp_tune.recipe.schema.unsupported_values import NOT_YET
from fsdp_tune.recipe.schema.value_kinds import Section

_HEAD = """\
# Every key of a recipe with its default and meaning. Generated from the schema; do not edit.
# `null` and `auto` are decided as described in the comment. Unknown keys are errors. `training:` also takes the fields of transformers'
# TrainingArguments that are listed as comments below it, with these defaults; TrainingArguments documents their meaning.
"""  # noqa: E501


_LAST_TRAINING_KEY = [key.name for key in all_keys() if key.path[0] == "training"][-1]


def reference_yaml() -> str:
    """Return all keys as a YAML document of the defaults, each with its meaning; the document is itself valid
    for the schema."""
    lines = [_HEAD.rstrip()]
    unsupported = {row.key: row for row in NOT_YET}
    always = {(), *(key.path for key in all_keys() if _is_section(key))}
    for key in all_keys():
        indent, name = "  " * (len(key.path) - 1), key.path[-1]
        if key.path[:-1] not in always:
            # A key inside a list, or inside a mapping that is absent by default.
            if not _is_described_elsewhere(key):
                lines.append(f"{indent}# {name}: {_source_line(key)}")
        elif _is_section(key):
            lines.append(f"{indent}{name}:")
        else:
            comment = f"{_meaning(key)} [{field_words(key.field)}]"
            if key.name in unsupported:
                comment += (
                    f" In this release: {', '.join(_yaml(value) for value in unsupported[key.name].works)}."
                )
            lines.append(f"{indent}{name}: {_yaml(default_of(key.field))}  # {comment}")
        if key.name == _LAST_TRAINING_KEY:
            lines.extend(_passed_field_lines())
    return "\n".join(lines) + "\n"


def _is_described_elsewhere(key: Key) -> bool:
    """Return whether a key of an entry is one of `data.train` too, where it is described."""
    section = key.path[:-1]
    return section == ("data", "eval") or (
        section == ("evaluation", "sets") and key.path[-1] in DataSource.model_fields
    )


def _passed_field_lines() -> list[str]:
    lines = ["  # Fields of TrainingArguments:"]
    for name, value in passed_defaults().items():
        words = (
            enumerated([f"`{each}`" for each in OPTIMIZERS])
            if name == "optim"
            else describe_field(TRAINING_FIELDS.fields[name])
        )
        lines.append(f"  # {name}: {_yaml(value)}  [{words}]")
    return lines


def _source_line(key: Key) -> str:
    default = "required" if key.field.is_required() else _yaml(default_of(key.field))
    return f"{default}  {_meaning(key)} [{field_words(key.field)}]"


def _is_section(key: Key) -> bool:
    """Return whether a key is a section that is always present, as opposed to a mapping that may be null or a
    list."""
    return isinstance(default_of(key.field), Section)


def _yaml(value: object) -> str:
    if isinstance(value, str):
        return value if value and not set(value) & set(":{}[]#\"'") else json.dumps(value)
    return json.dumps(value)


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """A key as the reference describes it. A section has no default."""

    meaning: str
    takes: str
    default: Any
    is_required: bool
    works: tuple[object, ...] = ()
    """The supported values, where this release does not support all."""


def described_names() -> list[str]:
    """Return the names of all keys and sections, and of the fields that `training:` passes on."""
    return [*(key.name for key in all_keys()), *(f"training.{name}" for name in _passed_fields())]


def describe_key(name: str) -> KeyFacts:
    """Describe one of `described_names`."""
    key = next((each for each in all_keys() if each.name == name), None)
    if key is None:
        field = name.removeprefix("training.")
        takes = (
            enumerated([f"`{each}`" for each in OPTIMIZERS])
            if field == "optim"
            else describe_field(_passed_fields()[field])
        )
        return KeyFacts(
            f"A field of transformers' TrainingArguments, which document `{field}`.",
            takes,
            passed_defaults()[field],
            is_required=False,
        )
    is_required = key.field.is_required()
    default = None if is_required or _is_section(key) else default_of(key.field)
    works = next((row.works for row in NOT_YET if row.key == name), ())
    return KeyFacts(_meaning(key), field_words(key.field), default, is_required, works)


def surface_lines() -> list[str]:
    """Return one line per key, `key · type · default`, in the order of the schema; then the fields that
    `training:` passes on."""
    lines: list[str] = []
    for key in all_keys():
        default = (
            "required"
            if key.field.is_required()
            else "section"
            if _is_section(key)
            else json.dumps(default_of(key.field))
        )
        lines.append(f"{key.name} · {field_words(key.field)} · {default}")
    for name, field in _passed_fields().items():
        lines.append(
            f"training.{name} · {describe_field(field)} · {json.dumps(field.default)} (transformers)"
        )
    return lines


def passed_defaults() -> dict[str, object]:
    """Return the fields of TrainingArguments that `training:` passes on, each with the value that a run
    without the key has."""
    return {name: field.default for name, field in _passed_fields().items()} | {"optim": DEFAULT_OPTIMIZER}


def _passed_fields() -> dict[str, TrainingField]:
    own = {key.path[1] for key in all_keys() if key.path[0] == "training" and len(key.path) == 2}
    return {
        name: field
        for name, field in TRAINING_FIELDS.fields.items()
        if name not in own and name not in owned_names()
    }


_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "null": "null",
    "dict": "object",
    "list": "array",
}


def json_schema() -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a recipe for editors, with the passed TrainingArguments and the
    accepted alternative types."""
    schema = Recipe.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "fsdp-tune recipe"
    definitions: dict[str, Any] = schema["$defs"]
    training = definitions["Training"]
    training["additionalProperties"] = False
    for name, field in _passed_fields().items():
        training["properties"][name] = {
            "anyOf": [_json_type(kind) for kind in field.types],
            "default": field.default,
        }
    _also_boolean(definitions["Precision"]["properties"]["mixed_precision"])
    _also_boolean(definitions["Fsdp"]["properties"]["activation_checkpointing"])
    report = training["properties"]["report_to"]
    report["anyOf"] = [{"type": report.pop("type"), "items": report.pop("items")}, {"type": "string"}]
    environment = definitions["Launch"]["properties"]["env"]
    environment["additionalProperties"] = {"type": ["string", "number"]}
    return schema


def _also_boolean(field: dict[str, object]) -> None:
    field["anyOf"] = [{"enum": field.pop("enum"), "type": field.pop("type")}, {"type": "boolean"}]


def _json_type(kind: str) -> dict[str, Any]:
    if kind in TRAINING_FIELDS.enums:
        return {"type": "string", "enum": list(TRAINING_FIELDS.enums[kind])}
    return {"const": False} if kind == "false" else {"type": _JSON_TYPES[kind]} if kind in _JSON_TYPES else {}


def _meaning(key: Key) -> str:
    """Return the docstring of a key in one line."""
    return " ".join((key.field.description or "").split())
