"""Keys that `--set` and other options set: merged into the tree of a recipe's file, and validated with it.

`--set a.b=value` takes the same scalars and flow values as the file; errors cite `--set #2`. An option that
sets a key (`plan --num-gpus 4`) is handled in the same way, and errors cite the option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where
from fsdp_tune.core.units import ScalarError, enumerated, parse_plain, shown
from fsdp_tune.recipe.key_paths import KeyPath, NamePath, dotted
from fsdp_tune.recipe.read.legacy import take_aliases, translate
from fsdp_tune.recipe.read.recipe_text import check_characters
from fsdp_tune.recipe.read.translation import Translation
from fsdp_tune.recipe.read.yaml_source import (
    ListNode,
    MappingEntry,
    MappingNode,
    Node,
    ScalarNode,
    compose,
    entries_of,
    plain_value,
)
from fsdp_tune.recipe.schema.keys import has_default


@dataclass(frozen=True, slots=True)
class OptionOverride:
    """A key that is set by an option other than `--set`."""

    option: str
    """As the user wrote it: `--num-gpus 4`."""
    override: str
    """The equivalent `--set` argument: `launch.num_processes=4`."""


def apply_overrides(
    tree: MappingNode, overrides: Sequence[str], options: Sequence[OptionOverride] = ()
) -> tuple[list[Notice], list[Problem]]:
    """Merge every `--set` into `tree`, in order, then every option. An invalid one is reported as a problem
    and skipped."""
    entries, notices, problems = _read_overrides(overrides, options)
    for path, entry, where in entries:
        if lost := _lost(tree, path, entry):
            keys = enumerated([f"`{shown(name)}`" for name in lost], "and")
            message = f"`{shown(dotted(path))}` is replaced entirely: {keys} of the file no longer apply"
            hint = f"to set a single key: `--set {shown(dotted((*path, lost[0])))}=VALUE`"
            notices.append(Notice("section-replaced", message, Where(where.source, key=dotted(path)), hint))
        problems.extend(_put(tree, path, entry, where))
    return notices, problems


@dataclass(frozen=True, slots=True)
class Override:
    value: Any
    where: Where


def read_overrides(overrides: Sequence[str]) -> dict[KeyPath, Override]:
    """Return what each `--set` says by the path of its key, in order; no path is a part of another.

    Raises: FsdpTuneError for one that is not `KEY=VALUE`, or sets what another one sets.
    """
    entries, _, problems = _read_overrides(overrides)
    if problems:
        raise FsdpTuneError(*problems)
    return {path: Override(plain_value(entry.node), where) for path, entry, where in entries}


class _Setting(NamedTuple):
    """An entry that a `--set` or an option sets."""

    path: NamePath
    entry: MappingEntry
    where: Where


class _ReadOverrides(NamedTuple):
    settings: list[_Setting]
    notices: list[Notice]
    problems: list[Problem]


def _read_overrides(overrides: Sequence[str], options: Sequence[OptionOverride] = ()) -> _ReadOverrides:
    """Return the entries that every `--set` and then every option sets, none of which is a part of
    another."""
    found: list[_Setting] = []
    notices: list[Notice] = []
    problems: list[Problem] = []
    given = [(Where(f"--set #{number}"), text) for number, text in enumerate(overrides, start=1)]
    for where, text in [*given, *((Where(each.option), each.override) for each in options)]:
        try:
            branch = _parse(text, where)
        except FsdpTuneError as error:
            problems.extend(error.problems)
            continue
        translated, wrong = translate(branch)
        notices.extend(translated)
        problems.extend(wrong)
        take_aliases(branch)
        for path, entry in _leaves(branch, ()):
            if (earlier := _overlap(path, found)) is not None:
                message = f"`{shown(dotted(path))}` is set twice: {where} and {earlier}"
                problems.append(
                    Problem(
                        "duplicate-key", message, Where(where.source, key=dotted(path)), "keep one of them"
                    )
                )
            else:
                found.append(_Setting(path, entry, where))
    return _ReadOverrides(found, notices, problems)


def _parse(text: str, where: Where) -> MappingNode:
    """Return `a.b=v` as the mapping {a: {b: v}}. Raises: FsdpTuneError with an example of the syntax."""
    key, separator, raw = check_characters(text, where).partition("=")
    parts = key.strip().split(".")
    if not separator or not all(part and part == part.strip() for part in parts):
        found = re.fullmatch(r"\s*([\w.]+)\s*[:\s]\s*(\S.*)", text)
        example = (
            f"{found[1]}={shown(found[2])}" if found and not separator else "training.learning_rate=1e-4"
        )
        problem = Problem(
            "bad-override", f"`{shown(text)}` is not `KEY=VALUE`", where, f"write it as `--set {example}`"
        )
        raise FsdpTuneError(problem)
    value = raw.strip()
    if (index := re.search(r"\[\d*\]", key)) is not None:
        whole, rest = key[: index.start()], key[index.end() :].strip(". ")
        hint = (
            f"set the full list, the other keys too: `--set {shown(whole)}=[{{{shown(rest)}: "
            f"{shown(value)}}}]`"
            if rest
            else f"`--set {shown(whole)}=[…]`"
        )
        raise FsdpTuneError(
            Problem("bad-override", f"`{shown(key)}` leads into a list", Where(where.source, key=whole), hint)
        )
    if not value:
        hint = f'`--set {shown(key)}=null` resets it to the default, `--set {shown(key)}=""` is an empty text'
        raise FsdpTuneError(
            Problem("no-value", f"`{shown(key)}` has no value", Where(where.source, key=key.strip()), hint)
        )
    node = _value(value, Where(where.source, key=key.strip()))
    for part in reversed(parts):
        node = MappingNode({part: MappingEntry(where, node)}, where, partial=True)
    assert isinstance(node, MappingNode)
    return node


def _value(text: str, where: Where) -> Node:
    if text[0] in "[{\"'":
        node, problems = compose(text, str(where.source), line=None)
        if problems or node is None:
            raise FsdpTuneError(
                *(problems or [Problem("bad-override", f"`{shown(text)}` is not a value", where)])
            )
        return node
    try:
        value, suspicion = parse_plain(text)
    except ScalarError as error:
        raise FsdpTuneError(Problem("not-a-number", str(error), where)) from error
    return ScalarNode(value, text, plain=True, where=Where(where.source), suspicion=suspicion)


def _leaves(node: MappingNode, path: NamePath) -> list[tuple[NamePath, MappingEntry]]:
    found: list[tuple[NamePath, MappingEntry]] = []
    for name, entry in node.entries.items():
        if isinstance(entry.node, MappingNode) and entry.node.partial:
            found.extend(_leaves(entry.node, (*path, name)))
        else:
            found.append(((*path, name), entry))
    return found


def _overlap(path: NamePath, taken: Sequence[_Setting]) -> Where | None:
    for other in taken:
        shorter = min(len(path), len(other.path))
        if path[:shorter] == other.path[:shorter]:
            return other.where
    return None


def _lost(tree: MappingNode, path: NamePath, entry: MappingEntry) -> list[str]:
    """Return the keys of the file that are missing from a mapping that replaces theirs."""
    before = Translation(tree).find(path)
    if not isinstance(entry.node, MappingNode) or before is None:
        return []
    return [name for name in entries_of(before.node) if name not in entry.node.entries]


def _put(tree: MappingNode, path: NamePath, entry: MappingEntry, where: Where) -> list[Problem]:
    """Write an entry into a tree. The default of a key, null, makes no section: an empty one can mean
    something, as `lora` does."""
    is_null = isinstance(entry.node, ScalarNode) and entry.node.value is None and entry.node.plain
    is_default = is_null and has_default(path)
    holder = tree
    for depth, part in enumerate(path[:-1], 1):
        if is_default and part not in holder.entries:
            return []
        inner = holder.entries.setdefault(part, MappingEntry(where, MappingNode({}, where))).node
        if isinstance(inner, ListNode):
            hint = f"set the full list: `--set {shown(dotted(path[:depth]))}=[…]`"
            return [
                Problem(
                    "bad-override",
                    f"`{shown(dotted(path))}` leads into a list",
                    Where(where.source, key=dotted(path)),
                    hint,
                )
            ]
        if not isinstance(inner, MappingNode):
            if is_default:
                return []
            inner = MappingNode({}, where)
            holder.entries[part] = MappingEntry(where, inner)
        holder = inner
    if is_default:
        holder.entries.pop(path[-1], None)
    else:
        holder.entries[path[-1]] = entry
    return []
