"""Merge `--set a.b=value` into the tree of the file: the same scalars and flow values as in the file; errors cite `--set #2`.

A command's option that sets a key (`plan --num-gpus 4`) is handled in the same way, and errors cite the option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where
from fsdp_tune.recipe.read.legacy import Translation, translate
from fsdp_tune.recipe.read.yaml_text import check_characters
from fsdp_tune.recipe.read.yaml_tree import ListNode, MappingEntry, MappingNode, Node, ScalarNode, compose, entries_of
from fsdp_tune.recipe.scalars import ScalarError, enumerated, parse_plain, shown
from fsdp_tune.recipe.schema.keys import dotted

Path = tuple[str, ...]


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
    """Merge every `--set` into `tree`, in order, then every option. An invalid one is reported as a problem and skipped."""
    notices: list[Notice] = []
    problems: list[Problem] = []
    taken: list[tuple[Path, Where]] = []
    given = [(Where(f"--set #{number}"), text) for number, text in enumerate(overrides, start=1)]
    for where, text in [*given, *((Where(each.option), each.override) for each in options)]:
        try:
            branch = _parse(text, where)
        except FsdpTuneError as error:
            problems.extend(error.problems)
            continue
        found, wrong = translate(branch)
        notices.extend(found)
        problems.extend(wrong)
        for path, node in _leaves(branch, ()):
            if (earlier := _overlap(path, taken)) is not None:
                message = f"`{shown(dotted(path))}` is set twice: {where} and {earlier}"
                problems.append(Problem("duplicate-key", message, Where(where.source, key=dotted(path)), "keep one of them"))
                continue
            taken.append((path, where))
            if lost := _lost(tree, path, node):
                keys = enumerated([f"`{shown(name)}`" for name in lost], "and")
                message = f"`{shown(dotted(path))}` is replaced entirely: {keys} of the file no longer apply"
                hint = f"to set a single key: `--set {shown(dotted((*path, lost[0])))}=VALUE`"
                notices.append(Notice("section-replaced", message, Where(where.source, key=dotted(path)), hint))
            problems.extend(_put(tree, path, node, where))
    return notices, problems


def _parse(text: str, where: Where) -> MappingNode:
    """Return `a.b=v` as the mapping {a: {b: v}}. Raises: FsdpTuneError with an example of the syntax."""
    key, separator, raw = check_characters(text, where).partition("=")
    parts = key.strip().split(".")
    if not separator or not all(part and part == part.strip() for part in parts):
        found = re.fullmatch(r"\s*([\w.]+)\s*[:\s]\s*(\S.*)", text)
        example = f"{found[1]}={shown(found[2])}" if found and not separator else "training.learning_rate=1e-4"
        problem = Problem("bad-override", f"`{shown(text)}` is not `KEY=VALUE`", where, f"write it as `--set {example}`")
        raise FsdpTuneError(problem)
    value = raw.strip()
    if (index := re.search(r"\[\d*\]", key)) is not None:
        whole, rest = key[: index.start()], key[index.end() :].strip(". ")
        hint = (
            f"set the full list, the other keys too: `--set {shown(whole)}=[{{{shown(rest)}: {shown(value)}}}]`"
            if rest
            else f"`--set {shown(whole)}=[…]`"
        )
        raise FsdpTuneError(Problem("bad-override", f"`{shown(key)}` leads into a list", Where(where.source, key=whole), hint))
    if not value:
        hint = f'`--set {shown(key)}=null` resets it to the default, `--set {shown(key)}=""` is an empty text'
        raise FsdpTuneError(Problem("no-value", f"`{shown(key)}` has no value", Where(where.source, key=key.strip()), hint))
    node = _value(value, Where(where.source, key=key.strip()))
    for part in reversed(parts):
        node = MappingNode({part: MappingEntry(where, node)}, where, partial=True)
    assert isinstance(node, MappingNode)
    return node


def _value(text: str, where: Where) -> Node:
    if text[0] in "[{\"'":
        node, problems = compose(text, str(where.source), line=None)
        if problems or node is None:
            raise FsdpTuneError(*(problems or [Problem("bad-override", f"`{shown(text)}` is not a value", where)]))
        return node
    try:
        value, suspicion = parse_plain(text)
    except ScalarError as error:
        raise FsdpTuneError(Problem("not-a-number", str(error), where)) from error
    return ScalarNode(value, text, plain=True, where=Where(where.source), suspicion=suspicion)


def _leaves(node: MappingNode, path: Path) -> list[tuple[Path, MappingEntry]]:
    found: list[tuple[Path, MappingEntry]] = []
    for name, entry in node.entries.items():
        if isinstance(entry.node, MappingNode) and entry.node.partial:
            found.extend(_leaves(entry.node, (*path, name)))
        else:
            found.append(((*path, name), entry))
    return found


def _overlap(path: Path, taken: list[tuple[Path, Where]]) -> Where | None:
    for other, where in taken:
        shorter = min(len(path), len(other))
        if path[:shorter] == other[:shorter]:
            return where
    return None


def _lost(tree: MappingNode, path: Path, entry: MappingEntry) -> list[str]:
    """Return the keys of the file that are missing from a mapping that replaces theirs."""
    before = Translation(tree).find(path)
    if not isinstance(entry.node, MappingNode) or before is None:
        return []
    return [name for name in entries_of(before.node) if name not in entry.node.entries]


def _put(tree: MappingNode, path: Path, entry: MappingEntry, where: Where) -> list[Problem]:
    holder = tree
    for depth, part in enumerate(path[:-1], 1):
        inner = holder.entries.setdefault(part, MappingEntry(where, MappingNode({}, where))).node
        if isinstance(inner, ListNode):
            hint = f"set the full list: `--set {shown(dotted(path[:depth]))}=[…]`"
            return [Problem("bad-override", f"`{shown(dotted(path))}` leads into a list", Where(where.source, key=dotted(path)), hint)]
        if not isinstance(inner, MappingNode):
            inner = MappingNode({}, where)
            holder.entries[part] = MappingEntry(where, inner)
        holder = inner
    if isinstance(entry.node, ScalarNode) and entry.node.value is None and entry.node.plain:
        holder.entries.pop(path[-1], None)
    else:
        holder.entries[path[-1]] = entry
    return []
