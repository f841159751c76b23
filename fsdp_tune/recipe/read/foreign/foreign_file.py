"""Read the configuration of another tool: YAML, JSON, or a command line in a text file, with lines and comments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.recipe.read.foreign.command_line import command_in, parse_command
from fsdp_tune.recipe.read.foreign.ledger import Path as KeyPath
from fsdp_tune.recipe.read.tools import OPTION_NAMES, tool_of, tried
from fsdp_tune.recipe.read.yaml_text import read_text
from fsdp_tune.recipe.read.yaml_tree import ListNode, MappingNode, Node, compose

_YAML = (".yaml", ".yml")


@dataclass(slots=True)
class ForeignFile:
    path: Path
    tool: str
    values: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    above: Mapping[KeyPath, list[str]] = field(default_factory=dict[KeyPath, list[str]])
    """Lines of comment before a key."""
    beside: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """The comment on the line of a key."""


def read_foreign(path: Path, tool: str | None = None) -> ForeignFile:
    """Read a file, and recognise its tool unless it is given. Raises: FsdpTuneError if it has no keys, or those of no tool."""
    text = read_text(path)
    command = None if path.suffix in (*_YAML, ".json") else command_in(text)
    if command is not None:
        values, named = parse_command(command.words)
        found = ForeignFile(path, tool or named or "", values, above={(): command.comments})
    elif path.suffix == ".json":
        found = ForeignFile(path, tool or "", _json(text, path))
    else:
        found = _yaml(text, path, tool or "")
    found.tool = found.tool or tool_of(found.values) or ""
    if not found.tool:
        names = ", ".join(OPTION_NAMES)
        message = f"`{path}` is not recognised as the configuration of another trainer; keys that tell it: {tried(found.values)}"
        raise usage_error("unknown-foreign-file", message, hint=f"name the tool with `--from`: {names}", where=Where(str(path)))
    return found


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or JSON file that another one names. Raises: FsdpTuneError."""
    text = read_text(path)
    return _json(text, path) if path.suffix == ".json" else _yaml(text, path, "").values


def _json(text: str, path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise usage_error("duplicate-key", f"`{twice}` is written twice", hint="keep one of them", where=Where(str(path)))
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        where = Where(str(path), error.lineno, error.colno)
        raise usage_error("yaml-syntax", f"the file is not JSON: {error.msg}", where=where) from error
    return _mapping(values, path)


def _mapping(values: object, path: Path) -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        raise usage_error("not-a-mapping", "the file has no keys with values", where=Where(str(path)))
    return cast("dict[str, Any]", values)


def _yaml(text: str, path: Path, tool: str) -> ForeignFile:
    root, problems = compose(text, str(path))
    wrong = [problem for problem in problems if problem.code != "recipe-not-text"]
    if wrong:
        raise FsdpTuneError(*(_about_the_file(problem) for problem in wrong))
    values = _mapping(None if root is None else _value(root), path)
    lines: dict[KeyPath, int] = {}
    if root is not None:
        _collect_lines(root, (), lines)
    above, beside = _comments(text, lines)
    return ForeignFile(path, tool, values, lines, above, beside)


def _about_the_file(problem: Problem) -> Problem:
    return Problem(problem.code, problem.message.replace("the recipe", "the file"), problem.where, problem.hint)


def _value(node: Node) -> Any:
    """Return a node as values. Other tools read YAML 1.1, in which `yes` is a boolean and `1_000` a number."""
    if isinstance(node, MappingNode):
        return {key: _value(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, ListNode):
        return [_value(item) for item in node.items]
    if node.plain and node.suspicion is not None:
        value = yaml.safe_load(node.text)
        return value if isinstance(value, bool | int | float) else node.value
    return node.value


def _collect_lines(node: Node, path: KeyPath, lines: dict[KeyPath, int]) -> None:
    if isinstance(node, MappingNode):
        for name, entry in node.entries.items():
            lines[(*path, name)] = entry.where.line or 0
            _collect_lines(entry.node, (*path, name), lines)
    elif isinstance(node, ListNode):
        for index, item in enumerate(node.items):
            lines[(*path, index)] = item.where.line or 0
            _collect_lines(item, (*path, index), lines)


_BESIDE = re.compile(r"""^(?:[^#"']|"[^"]*"|'[^']*'|(?<=\S)[#'])*?(?:^|\s)#\s?(?P<words>.*)$""")


def _comments(text: str, lines: Mapping[KeyPath, int]) -> tuple[dict[KeyPath, list[str]], dict[KeyPath, str]]:
    """Return the comments above and beside each key: the outermost one of a line. Those before the first key belong to the file, ()."""
    by_line: dict[int, KeyPath] = {}
    for path, line in sorted(lines.items(), key=lambda item: len(item[0])):
        by_line.setdefault(line, path)
    above: dict[KeyPath, list[str]] = {}
    beside: dict[KeyPath, str] = {}
    waiting: list[str] = []
    is_first = True
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            waiting.append(line.strip().lstrip("#").strip())
        elif not line.strip() and is_first and waiting:
            above[()] = [*above.get((), []), *waiting]  # a block of its own at the top is about the file
            waiting = []
        elif number in by_line:
            if words := [each for each in waiting if each]:
                above[by_line[number]] = words
            waiting, is_first = [], False
            if match := _BESIDE.match(line):
                beside[by_line[number]] = match["words"].strip()
    if words := [each for each in waiting if each]:
        above[("",)] = words  # after the last key
    return above, beside
