"""Keys of the schema that this release supports in part: the supported values of each, and the alternative.

A finished feature deletes its row. The supported optimizers are the rows of `recipe.schema.training_fields`; a test checks that every other
name of transformers is refused here.

Documents generated from the schema: the commented reference, the JSON Schema for editors, the frozen list of keys.
"""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from fsdp_tune.recipe.scalars import enumerated
from fsdp_tune.recipe.schema.keys import Key, all_keys, field_words
from fsdp_tune.recipe.schema.kinds import Section
from fsdp_tune.recipe.schema.recipe import Recipe, Training
from fsdp_tune.recipe.schema.training_fields import (
    DEFAULT_OPTIMIZER,
    OPTIMIZERS,
    TRAINING_FIELDS,
    TrainingField,
    describe_field,
    owned_names,
    training_value,
)


@dataclass(frozen=True, slots=True)
class NotYet:
    key: str
    works: tuple[Any, ...]
    """Values that are supported; any other is refused."""
    what: str
    """The missing feature, for a message that begins `this release has no`."""
    meanwhile: str


_BITSANDBYTES_TOO = {"adamw_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit"}
_ALL_OPTIMIZERS = TRAINING_FIELDS.enums["OptimizerNames"]
_BITSANDBYTES = tuple(name for name in _ALL_OPTIMIZERS if name.startswith("paged_") or "bnb" in name or name in _BITSANDBYTES_TOO)
_REFUSED_OPTIMIZERS = (
    (
        "galore_*",
        "GaLore under FSDP (its projections are of full gradients, and a rank has a part of each)",
        "write `adafactor`, whose state is as small, or use `lora:`",
    ),
    (
        "apollo_*",
        "APOLLO under FSDP (its random projections are of full gradients, and a rank has a part of each)",
        "write `adafactor`, whose state is as small, or use `lora:`",
    ),
    (
        "*lomo",
        "LOMO under FSDP (it updates parameters during the backward, before gradients of all ranks and micro-batches are added)",
        "write `adafactor`, which keeps next to no state",
    ),
    (
        "schedule_free_*",
        "schedule-free optimizers (evaluation and checkpoints need their averaged weights, which the training loop does not switch to)",
        "write `adamw_torch_fused` with `lr_scheduler_type: constant_with_warmup`",
    ),
    ("grokadamw", "GrokAdamW (it is in the package grokadamw, which is not tested with sharded parameters)", "write `adamw_torch_fused`"),
    (
        "stable_adamw",
        "StableAdamW (its package, torch-optimi, limits an update by its root mean square over this rank's part alone)",
        "write `adafactor`, which limits an update over all ranks",
    ),
    (
        "adamw_anyprecision",
        "AnyPrecisionAdamW (its package, torchdistx, is no longer maintained)",
        'write `adamw_torch_fused` with `optim_args: "state_dtype=bf16"`',
    ),
    ("adamw_torch_npu_fused", "Ascend NPUs", "write `adamw_torch_fused`"),
    ("adamw_torch_xla", "XLA devices", "write `adamw_torch_fused`"),
)
"""Pattern of names, the missing feature, and the alternative."""
# The schedule is computed from the step, also on resume.
_SCHEDULES = tuple(name for name in TRAINING_FIELDS.enums["SchedulerType"] if name not in {"reduce_lr_on_plateau", "greedy"})

NOT_YET = (
    NotYet(
        "parallelism.tp_size",
        (1,),
        "tensor parallelism (FSDP is faster with a row for each GPU: docs/evidence/tensor-parallelism.md)",
        "leave it at 1; with fewer rows than GPUs write `sp_size`",
    ),
    NotYet(
        "parallelism.cp_size",
        (1,),
        "context parallelism (Accelerate's discards the mask, so that packed examples see each other)",
        "write `sp_size`, which divides each row over as many ranks",
    ),
    NotYet(
        "training.optim",
        tuple(name for name in (None, *_ALL_OPTIMIZERS) if name not in _BITSANDBYTES),
        "bitsandbytes under FSDP (it counts blocks by a parameter's full size, and its kernels take no DTensor)",
        "write `adamw_torch_8bit` (torchao), which keeps each rank's part in blocks",
    ),
    *(
        NotYet(
            "training.optim",
            tuple(name for name in (None, *_ALL_OPTIMIZERS) if not fnmatch.fnmatchcase(name or "", pattern)),
            what,
            meanwhile,
        )
        for pattern, what, meanwhile in _REFUSED_OPTIMIZERS
    ),
    NotYet(
        "training.lr_scheduler_type", _SCHEDULES, "schedule that depends on losses", "write linear, cosine or another function of the step"
    ),
)


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a key, such as `fsdp.version`, or of a passed field of TrainingArguments."""
    section: Any = recipe
    *parents, name = key.split(".")
    for parent in parents:
        section = getattr(section, parent)
    if parents == ["training"] and name not in Training.model_fields:
        return training_value(recipe.training, name)
    return getattr(section, "async_" if name == "async" else name)


def refused(recipe: Recipe) -> list[tuple[NotYet, Any]]:
    """Return the rows whose key has an unsupported value in `recipe`, with that value."""
    given = [(row, value_of(recipe, row.key)) for row in NOT_YET]
    return [(row, value) for row, value in given if not any(type(value) is type(good) and value == good for good in row.works)]


_HEAD = """\
# Every key of a recipe with its default and what it means. Generated from the schema; do not edit.
# `null` and `auto` are decided as described in the comment. Unknown keys are errors. `training:` also takes the fields of transformers'
# TrainingArguments that are listed as comments below it, with these defaults; TrainingArguments documents their meaning.
"""


_LAST_TRAINING_KEY = [key.name for key in all_keys() if key.path[0] == "training"][-1]


def default_of(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def reference_yaml() -> str:
    """Return all keys as a YAML document of the defaults, each with its meaning; the document is itself valid for the schema."""
    lines = [_HEAD.rstrip()]
    unsupported = {row.key: row for row in NOT_YET}
    always = {(), *(key.path for key in all_keys() if _is_section(key))}
    for key in all_keys():
        indent, name = "  " * (len(key.path) - 1), key.path[-1]
        if key.path[:-1] not in always:
            # A key inside a list, or inside a mapping that is absent by default.
            if key.path[:-1] != ("data", "eval"):
                lines.append(f"{indent}# {name}: {_source_line(key)}")
        elif _is_section(key):
            lines.append(f"{indent}{name}:")
        else:
            comment = f"{key.field.description or ''} [{field_words(key.field)}]"
            if key.name in unsupported:
                comment += f" In this release: {', '.join(_yaml(value) for value in unsupported[key.name].works)}."
            lines.append(f"{indent}{name}: {_yaml(default_of(key.field))}  # {comment}")
        if key.name == _LAST_TRAINING_KEY:
            lines.extend(_passed_field_lines())
    return "\n".join(lines) + "\n"


def _passed_field_lines() -> list[str]:
    lines = ["  # Fields of TrainingArguments:"]
    for name, value in passed_defaults().items():
        words = enumerated([f"`{each}`" for each in OPTIMIZERS]) if name == "optim" else describe_field(TRAINING_FIELDS.fields[name])
        lines.append(f"  # {name}: {_yaml(value)}  [{words}]")
    return lines


def _source_line(key: Key) -> str:
    default = "required" if key.field.is_required() else _yaml(default_of(key.field))
    return f"{default}  {key.field.description or ''} [{field_words(key.field)}]"


def _is_section(key: Key) -> bool:
    """Return whether a key is a section that is always present, as opposed to a mapping that may be null or a list."""
    return isinstance(default_of(key.field), Section)


def _yaml(value: Any) -> str:
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
    works: tuple[Any, ...] = ()
    """The supported values, where this release does not support all."""


def described_names() -> list[str]:
    """Return the names of all keys and sections, and of the fields that `training:` passes on."""
    return [*(key.name for key in all_keys()), *(f"training.{name}" for name in _passed_fields())]


def describe_key(name: str) -> KeyFacts:
    """Describe one of `described_names`."""
    key = next((each for each in all_keys() if each.name == name), None)
    if key is None:
        field = name.removeprefix("training.")
        takes = enumerated([f"`{each}`" for each in OPTIMIZERS]) if field == "optim" else describe_field(_passed_fields()[field])
        return KeyFacts(
            f"A field of transformers' TrainingArguments, which document `{field}`.", takes, passed_defaults()[field], is_required=False
        )
    is_required = key.field.is_required()
    default = None if is_required or _is_section(key) else default_of(key.field)
    works = next((row.works for row in NOT_YET if row.key == name), ())
    return KeyFacts(key.field.description or "", field_words(key.field), default, is_required, works)


def surface_lines() -> list[str]:
    """Return one line per key, `key · type · default`, in the order of the schema; then the fields that `training:` passes on."""
    lines: list[str] = []
    for key in all_keys():
        default = "required" if key.field.is_required() else "section" if _is_section(key) else json.dumps(default_of(key.field))
        lines.append(f"{key.name} · {field_words(key.field)} · {default}")
    for name, field in _passed_fields().items():
        lines.append(f"training.{name} · {describe_field(field)} · {json.dumps(field.default)} (transformers)")
    return lines


def passed_defaults() -> dict[str, Any]:
    """Return the fields of TrainingArguments that `training:` passes on, each with the value that a run without the key has."""
    return {name: field.default for name, field in _passed_fields().items()} | {"optim": DEFAULT_OPTIMIZER}


def _passed_fields() -> dict[str, TrainingField]:
    own = {key.path[1] for key in all_keys() if key.path[0] == "training" and len(key.path) == 2}
    return {name: field for name, field in TRAINING_FIELDS.fields.items() if name not in own and name not in owned_names()}


_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "null": "null", "dict": "object", "list": "array"}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a recipe for editors, with the passed TrainingArguments and the accepted alternative types."""
    schema = Recipe.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "fsdp-tune recipe"
    definitions: dict[str, Any] = schema["$defs"]
    training = definitions["Training"]
    training["additionalProperties"] = False
    for name, field in _passed_fields().items():
        training["properties"][name] = {"anyOf": [_json_type(kind) for kind in field.types], "default": field.default}
    _also_boolean(definitions["Precision"]["properties"]["mixed_precision"])
    _also_boolean(definitions["Fsdp"]["properties"]["activation_checkpointing"])
    report = training["properties"]["report_to"]
    report["anyOf"] = [{"type": report.pop("type"), "items": report.pop("items")}, {"type": "string"}]
    environment = definitions["Launch"]["properties"]["env"]
    environment["additionalProperties"] = {"type": ["string", "number"]}
    return schema


def _also_boolean(field: dict[str, Any]) -> None:
    field["anyOf"] = [{"enum": field.pop("enum"), "type": field.pop("type")}, {"type": "boolean"}]


def _json_type(kind: str) -> dict[str, Any]:
    if kind in TRAINING_FIELDS.enums:
        return {"type": "string", "enum": list(TRAINING_FIELDS.enums[kind])}
    return {"const": False} if kind == "false" else {"type": _JSON_TYPES[kind]} if kind in _JSON_TYPES else {}
