"""Keys that other tools have, with their defaults, generated from the tools' own schemas by
`tests/migrate/tool_keys.py`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from fsdp_tune.recipe.read.tool_detection import EXAMPLES, LLAMA_FACTORY, TRL
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS

_OF_THE_TRAINER = frozenset({TRL, LLAMA_FACTORY, EXAMPLES})
"""Tools whose options are fields of TrainingArguments, with its defaults where they have none of their
own."""
FILE = Path(__file__).with_suffix(".json")


@cache
def tool_keys(tool: str) -> dict[str, object]:
    """Return the keys at the top of a tool's file; the default of each, None if it is null or computed. {}:
    no table of the tool."""
    return json.loads(FILE.read_text(encoding="utf-8")).get(tool, {})


def is_default_of(tool: str, key: str, value: object) -> bool:
    """Return whether a value is that of a key which is left out. A default that is null or computed has no
    value that equals it."""
    default: object = tool_keys(tool).get(key)
    if key not in tool_keys(tool) and tool in _OF_THE_TRAINER and key in TRAINING_FIELDS.fields:
        default = TRAINING_FIELDS.fields[key].default
    numbers = isinstance(value, int | float) and isinstance(default, int | float)
    same_kind = type(value) is type(default) or (numbers and bool not in (type(value), type(default)))
    return default is not None and same_kind and value == default
