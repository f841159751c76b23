"""Describe validation errors: the given value, the values that the key takes, the position, and the probable
intention."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from fsdp_tune.core.errors import Problem, Where
from fsdp_tune.core.units import ScalarError, enumerated, parse_plain, printable, shown
from fsdp_tune.recipe.conversions import STRATEGIES_ELSEWHERE
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.read.yaml_mistakes import UNSPACED
from fsdp_tune.recipe.read.yaml_source import ListNode, MappingNode, Node, ScalarNode, entries_of, plain_value
from fsdp_tune.recipe.schema.data_section import EVAL_TAGS
from fsdp_tune.recipe.schema.keys import (
    choices,
    closest,
    element_words,
    field_at,
    field_words,
    sections_in,
    unknown_key_hint,
)
from fsdp_tune.recipe.schema.optimizers import OPTIMIZERS
from fsdp_tune.recipe.schema.recipe import Training
from fsdp_tune.recipe.schema.training_fields import (
    TRAINING_FIELDS,
    installed_transformers,
    mismatch,
    owner_of,
    version_gap,
)
from fsdp_tune.recipe.schema.value_kinds import Text


def node_at(tree: Node, path: Sequence[str | int]) -> Node | None:
    node: Node | None = tree
    for part in path:
        if isinstance(node, MappingNode) and part in node.entries:
            node = node.entries[str(part)].node
        elif isinstance(node, ListNode) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            return None
    return node


def where_of(tree: Node, path: Sequence[str | int], *, key: bool = False) -> Where:
    """Return the position of a value (or of its key); of its nearest existing parent if it is absent."""
    for length in range(len(path), -1, -1):
        parent, node = node_at(tree, path[: length - 1]) if length else None, node_at(tree, path[:length])
        if node is not None:
            last = path[length - 1] if length else None
            at_key = isinstance(parent, MappingNode) and (key or length < len(path))
            found = (
                parent.entries[str(last)].where if at_key and isinstance(parent, MappingNode) else node.where
            )
            return Where(found.source, found.line, found.column, dotted(path))
    raise AssertionError("a tree has a root")


def explain(error: ValidationError, tree: MappingNode) -> dict[KeyPath, Problem]:
    """Return one problem for each wrong path."""
    problems: dict[KeyPath, Problem] = {}
    for details in error.errors(include_url=False):
        loc = _without_tag(details["loc"])
        path = _given_part(tree, loc)
        if details["type"] == "missing":
            problems[loc] = Problem("missing-key", f"`{dotted(loc)}` is missing", where_of(tree, loc))
        elif details["type"] == "extra_forbidden":
            problems[path] = unknown_key(tree, path)
        elif path not in problems:
            reason = (
                str(details["ctx"]["error"])
                if details["type"] == "value_error" and "ctx" in details
                else None
            )
            problems[path] = wrong_value(tree, path, reason)
    return problems


def _without_tag(loc: KeyPath) -> KeyPath:
    """Remove the tag that pydantic adds to a location for the chosen form of `data.eval`."""
    return (*loc[:2], *loc[3:]) if loc[:2] == ("data", "eval") and loc[2:3] and loc[2] in EVAL_TAGS else loc


def _given_part(tree: Node, loc: KeyPath) -> KeyPath:
    """Return the longest prefix of a pydantic location that exists in the file; the rest are names of union
    branches."""
    for length in range(len(loc), 0, -1):
        if node_at(tree, loc[:length]) is not None:
            return loc[:length]
    return ()


def unknown_key(tree: MappingNode, path: KeyPath) -> Problem:
    node = node_at(tree, path)
    hint = unknown_key_hint(path, plain_value(node) if node is not None else None)
    if path == ("data", "eval", "rows"):
        hint = "give `fraction` or `rows`, not both"
    return Problem(
        "unknown-key", f"unknown key `{shown(dotted(path))}`", where_of(tree, path, key=True), hint
    )


def wrong_value(tree: MappingNode, path: KeyPath, reason: str | None = None) -> Problem:
    """Return the problem of a wrong value. `reason` is the validator's message, if it has one (sizes,
    durations)."""
    node, field = node_at(tree, path), field_at(path)
    in_list = bool(path) and isinstance(path[-1], int)
    takes = (
        _free_words(path)
        if field is None
        else element_words(field.annotation)
        if in_list
        else field_words(field)
    )
    hint = (
        _unspaced_hint(path, node)
        or _source_hint(path, node)
        or _quotes_hint(node, takes)
        or _section_hint(path, node)
        or _value_hint(node, takes, choices(field.annotation) if field is not None else [])
    )
    where = where_of(tree, path)
    if isinstance(node, ScalarNode) and node.value is None and node.plain:
        message = f"`{dotted(path)}` has no value; it takes {takes}"
        return Problem("no-value", message, where, "write the value, or remove the line to use the default")
    if reason is not None and isinstance(node, ScalarNode) and isinstance(node.value, str):
        known = f"it takes {takes}" if field is not None and choices(field.annotation) else None
        return Problem("wrong-value", f"`{dotted(path)}`: {printable(reason)}", where, hint or known)
    return Problem("wrong-value", f"`{dotted(path)}` is {given(node)}; it takes {takes}", where, hint)


def _free_words(path: KeyPath) -> str:
    """Describe the values of a key below a free mapping: text in `launch.env` and `rename_columns`, else
    unknown."""
    parent = field_at(path[:-1])
    of_text = parent is not None and any(
        get_args(each)[1:2] in ((str,), (Text,)) for each in _mappings_in(parent.annotation)
    )
    return "text" if of_text else "another value"


def _mappings_in(annotation: object) -> list[object]:
    if get_origin(annotation) is dict:
        return [annotation]
    return [found for argument in get_args(annotation) for found in _mappings_in(argument)]


def _unspaced_hint(path: KeyPath, node: Node | None) -> str | None:
    """Return a hint for a missing space after a colon: YAML reads `name_or_path:gpt2` alone under `model:` as
    text."""
    field = field_at(path)
    match = UNSPACED.fullmatch(node.text) if isinstance(node, ScalarNode) and node.plain else None
    if field is None or match is None:
        return None
    names = {
        inner.alias or name
        for section in sections_in(field.annotation)
        for name, inner in section.model_fields.items()
    }
    return (
        f"write a space after the colon: `{match['key']}: {shown(match['value'])}`"
        if match["key"] in names
        else None
    )


def _source_hint(path: KeyPath, node: Node | None) -> str | None:
    """Return a hint for a file name, or a single source, in place of a list of sources."""
    if path[:1] != ("data",) or path[1:2] not in (("train",), ("eval",)):
        return None
    if isinstance(node, MappingNode) and len(path) == 2:
        named = entries_of(node).get("path")
        path_text = (
            shown(named.node.text) if named is not None and isinstance(named.node, ScalarNode) else "…"
        )
        return f"write a list: `{path[1]}: [{{path: {path_text}}}]`, or `- ` before the first key"
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str) or len(path) > 3:
        return None
    source = f"{{path: {shown(node.text)}}}"
    return f"write `{source}`" if len(path) == 3 else f"write `[{source}]`"


def _quotes_hint(node: Node | None, takes: str) -> str | None:
    """Return a hint for text that needs quotes: YAML reads `{name}` as a mapping and `false` as a boolean."""
    if "text" not in takes.split(" or ")[0].split(","):
        return None
    if isinstance(node, MappingNode) and len(node.entries) == 1:
        ((name, entry),) = node.entries.items()
        if isinstance(entry.node, ScalarNode) and entry.node.plain and not entry.node.text:
            return f'write "{{{shown(name)}}}" in quotes'
    if isinstance(node, ScalarNode) and isinstance(node.value, bool):
        return f'write "{node.text}" in quotes'
    return None


def _section_hint(path: KeyPath, node: Node | None) -> str | None:
    """Return a hint for the value of a key in place of its section: `precision: bf16`, `model: gpt2`."""
    field = field_at(path)
    if field is None or not isinstance(node, ScalarNode) or not isinstance(node.value, str):
        return None
    for section in sections_in(field.annotation):
        for name, inner in section.model_fields.items():
            if node.value in choices(inner.annotation) or (path, name) == (("model",), "name_or_path"):
                return f"write `{dotted(path)}: {{{inner.alias or name}: {shown(node.text)}}}`"
    return None


def given(node: Node | None) -> str:
    if isinstance(node, ScalarNode):
        return f"`{shown(node.text)}`" if node.plain else f'the text "{shown(node.text)}"'
    return "a mapping" if isinstance(node, MappingNode) else "a list"


def _value_hint(node: Node | None, takes: str, options: Sequence[str]) -> str | None:
    if not isinstance(node, ScalarNode):
        return None
    value = node.value
    kinds = re.sub("`[^`]*`", "", takes)  # without the values of the key
    wants_number = any(word in kinds for word in ("number", "a port", "share"))
    wants_text = re.search(r"\btext\b|\bname\b", kinds) is not None
    if node.suspicion and (wants_number or "true or false" in takes):
        return node.suspicion
    if isinstance(value, str):
        if not node.plain and (wants_number or "true or false" in takes) and _is_more_than_text(value):
            return "write it without quotes"
        if (meant := _MEANT.get(value.lower())) in options:
            return f"write `{meant}`"
        if (
            wants_number
            and (number := _number_in(value, is_whole="whole" in takes)) is not None
            and _is_in_range(number, takes)
        ):
            return f"write `{number}`"
        near = _strategy(value, options) or _longer(value, options) or closest(value, options)
        if near is None and takes.startswith("a list"):
            return f"write a list: `[{', '.join(shown(part.strip()) for part in value.split(','))}]`"
        return f"did you mean `{near}`?" if near else None
    if isinstance(value, float) and value.is_integer() and "whole number" in takes and abs(value) < 1e15:
        return f"write `{int(value)}`"
    if isinstance(value, int | float) and not isinstance(value, bool) and "a duration" in takes:
        return f"give the unit: `{node.text}s`, `{node.text}m` or `{node.text}h`"
    if isinstance(value, int | float) and not isinstance(value, bool) and "a size" in takes:
        return f"give the unit: `{node.text}GB`"
    if wants_text and not isinstance(value, bool | None):
        return f'write "{node.text}" in quotes if it is meant as text'
    return None


_MEANT = dict.fromkeys(("gpu", "gpus", "nvidia", "rocm", "amd", "hip"), "cuda") | {
    "intel": "xpu",
    "ascend": "npu",
    "apple": "mps",
}
"""Words for the values of a key, in lower case → the value."""
_NUMBER_WORDS = (
    *(
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_WITH_UNIT = re.compile(
    r"([-+]?(?:[1-9]\d{0,2}(?:[,_]\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?)\s*([a-z%]*)", re.IGNORECASE
)
"""A comma divides thousands: `0,5` may be a half."""
_LONGEST_UNIT = 10
"""Letters."""
_FACTORS = {"k": 10**3, "m": 10**6, "%": 0.01}


def _number_in(text: str, *, is_whole: bool) -> str | None:
    """Return the number that a text means, such as `three`, `3 epochs`, `1,000`, `10k` or `3 %`; None if
    there is none."""
    if text.lower() in _NUMBER_WORDS:
        return str(_NUMBER_WORDS.index(text.lower()))
    found = _WITH_UNIT.fullmatch(text.strip())
    if found is None or len(found[2]) > _LONGEST_UNIT:
        return None
    value = float(re.sub("[,_]", "", found[1])) * _FACTORS.get(found[2].lower(), 1)
    return f"{value:.0f}" if value.is_integer() else None if is_whole else f"{value:.10g}"


def _is_in_range(number: str, takes: str) -> bool:
    above = re.search(r"above (\d+)", takes)
    return (
        float(number) > float(above[1])
        if above is not None
        else float(number) >= 0 or "0 or more" not in takes
    )


def _strategy(text: str, options: Sequence[str]) -> str | None:
    """Return the sharding strategy that another tool, or another way of writing, calls `text`: FULL_SHARD for
    `zero-3`."""
    letters = re.sub("[^a-z0-9]", "", text.lower())
    named = (
        name
        for name, others in STRATEGIES_ELSEWHERE.items()
        if letters in (*others, name.lower().replace("_", ""))
    )
    return next((name for name in named if name in options), None)


def _longer(text: str, options: Sequence[str]) -> str | None:
    """Return the first option that begins with the text: `adamw_torch_fused` for `adamw`."""
    return next(
        (option for option in options if len(text) > 2 and option.lower().startswith(text.lower())), None
    )


def _is_more_than_text(text: str) -> bool:
    """Return whether the text would be a number or a boolean without its quotes."""
    try:
        return not isinstance(parse_plain(text)[0], str)
    except ScalarError:
        return False


def check_training(tree: MappingNode) -> dict[KeyPath, Problem]:
    """Check the fields of `training:` that are not in the schema against the table of TrainingArguments."""
    section = node_at(tree, ("training",))
    problems: dict[KeyPath, Problem] = {}
    installed = installed_transformers()
    for name, entry in entries_of(section).items():
        path: KeyPath = ("training", name)
        if name in Training.model_fields or (isinstance(entry.node, ScalarNode) and entry.node.broken):
            continue
        where = where_of(tree, path, key=True)
        if (owner := owner_of(name)) is not None:
            problems[path] = Problem("owned-field", f"`training.{name}` is not accepted: {owner}", where)
        elif name not in TRAINING_FIELDS.fields:
            problems[path] = unknown_key(tree, path)
        elif gap := version_gap(name, installed):
            problems[path] = Problem(
                "unknown-field", f"`training.{name}` cannot be passed to transformers: {gap}", where
            )
        elif takes := mismatch(name, plain_value(entry.node)):
            options = _enum_values(name)
            if len(options) > SHOWN_OPTIONS:
                takes = (
                    f"one of {len(options)} names, such as "
                    f"{enumerated([f'`{option}`' for option in options[:3]], 'and')}"
                )
            message = f"`training.{name}` is {given(entry.node)}; it takes {takes}"
            hint = _SWITCHED_OFF.get(name) if _is_nothing(entry.node) else None
            default = TRAINING_FIELDS.fields[name].default
            typical = 100 if default == -1 else default  # -1 means unset
            example = f", such as `{typical}`" if "number" in takes and type(default) in (int, float) else ""
            of_zero = mismatch(name, 0) or ""  # the range, which a value of another type does not show
            hint = (
                hint or _value_hint(entry.node, f"{takes}; {of_zero}", options) or f"write {takes}{example}"
            )
            problems[path] = Problem("wrong-value", message, where_of(tree, path), hint)
    return problems


SHOWN_OPTIONS = 15
_SWITCHED_OFF = {"max_grad_norm": "write `0` to switch clipping off"}


def _is_nothing(node: Node) -> bool:
    return isinstance(node, ScalarNode) and (
        node.value is None or str(node.value).lower() in {"none", "off", "no", "false"}
    )


def _enum_values(name: str) -> list[str]:
    """Return the names that a field takes, the supported optimizers first."""
    if name == "optim":
        return list(
            dict.fromkeys(
                [
                    *OPTIMIZERS,
                    *TRAINING_FIELDS.enums[
                        next(
                            kind
                            for kind in TRAINING_FIELDS.fields[name].types
                            if kind in TRAINING_FIELDS.enums
                        )
                    ],
                ]
            )
        )
    return [
        value for kind in TRAINING_FIELDS.fields[name].types for value in TRAINING_FIELDS.enums.get(kind, ())
    ]


_FREE: tuple[KeyPath, ...] = (("model", "from_config"), ("model", "config_overrides"))


def check_free_mappings(
    tree: MappingNode, *, training: Mapping[str, Any] = TRAINING_FIELDS.fields
) -> dict[KeyPath, Problem]:
    """Report values such as `no` or `0123` below keys that take any mapping, where no type would detect
    them."""
    places = [*_FREE, *(("training", name) for name, field in training.items() if "dict" in field.types)]
    problems: dict[KeyPath, Problem] = {}
    for path in places:
        node = node_at(tree, path)
        for inner, scalar in _scalars(node, path) if isinstance(node, MappingNode | ListNode) else []:
            if scalar.suspicion is not None:
                hint = f'or write "{scalar.text}" in quotes if it is meant as text'
                problems[inner] = Problem(
                    "doubtful-value", f"`{dotted(inner)}`: {scalar.suspicion}", where_of(tree, inner), hint
                )
    return problems


def _scalars(node: Node, path: KeyPath) -> list[tuple[KeyPath, ScalarNode]]:
    if isinstance(node, ScalarNode):
        return [(path, node)]
    named = (
        [(name, entry.node) for name, entry in node.entries.items()]
        if isinstance(node, MappingNode)
        else enumerate(node.items)
    )
    return [found for name, child in named for found in _scalars(child, (*path, name))]
