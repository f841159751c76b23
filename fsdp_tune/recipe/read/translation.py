"""Move and change keys on the tree of a recipe, and collect the notices and problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fsdp_tune.core.errors import Notice, Problem, Where
from fsdp_tune.core.units import Value, shown
from fsdp_tune.recipe.key_paths import NamePath, dotted
from fsdp_tune.recipe.read.yaml_source import (
    MappingEntry,
    MappingNode,
    Node,
    ScalarNode,
    plain_value,
)

Change = Callable[[Value], Value]


@dataclass(slots=True)
class Translation:
    """Changes to one tree, in place: that of the file, or that of one `--set`."""

    tree: MappingNode
    notices: list[Notice] = field(default_factory=list[Notice])
    problems: list[Problem] = field(default_factory=list[Problem])

    def find(self, path: NamePath) -> MappingEntry | None:
        node: Node = self.tree
        entry: MappingEntry | None = None
        for part in path:
            entry = node.entries.get(part) if isinstance(node, MappingNode) else None
            if entry is None:
                return None
            node = entry.node
        return entry

    def take(self, path: NamePath) -> MappingEntry | None:
        entry = self.find(path)
        parent = self.find(path[:-1])
        holder = self.tree if len(path) == 1 else parent.node if parent is not None else None
        if entry is not None and isinstance(holder, MappingNode):
            del holder.entries[path[-1]]
        return entry

    def put(self, path: NamePath, entry: MappingEntry, old: str) -> None:
        """Set the new spelling; add a problem if it already has another value."""
        holder = self.tree
        for part in path[:-1]:
            inner = holder.entries.setdefault(
                part, MappingEntry(entry.where, MappingNode({}, entry.where, partial=True))
            ).node
            if not isinstance(inner, MappingNode):
                return  # the section itself is wrong; validation reports it
            holder = inner
        there = holder.entries.get(path[-1])
        if there is not None and plain_value(there.node) != plain_value(entry.node):
            where = at(entry.where, dotted(path))
            line = f"line {there.where.line}" if there.where.line is not None else str(there.where)
            message = f"`{old}` is the old spelling of `{dotted(path)}`, which has another value on {line}"
            self.problems.append(Problem("two-spellings", message, where, f"keep `{dotted(path)}`"))
        holder.entries.setdefault(path[-1], entry)

    def add_notice(self, where: Where, key: str, message: str) -> None:
        self.notices.append(Notice("old-spelling", message, at(where, key)))

    def add_problem(self, where: Where, key: str, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem("no-counterpart", message, at(where, key), hint))

    def change_with_notice(self, path: NamePath, change: Change) -> None:
        """Change a value in place, with a notice if it differs."""
        entry = self.find(path)
        if entry is None or not isinstance(entry.node, ScalarNode):
            return
        old = entry.node
        entry.node = changed(old, change)
        if plain_value(entry.node) != old.value:
            key = dotted(path)
            self.add_notice(
                entry.where, key, f"`{key}: {node_text(old)}` is now `{key}: {node_text(entry.node)}`"
            )

    def replace(self, path: NamePath, change: Change) -> None:
        """Change a value in place, without a notice."""
        entry = self.find(path)
        if entry is not None:
            entry.node = changed(entry.node, change)


def changed(node: Node, change: Change) -> Node:
    """Return a node with the changed value; the same node if the value stays the same."""
    if not isinstance(node, ScalarNode) or node.broken:
        return node
    value = change(node.value)
    return node if value == node.value and type(value) is type(node.value) else text_node(value, node.where)


def text_node(value: Value, where: Where) -> ScalarNode:
    return ScalarNode(value, str(value), plain=True, where=where)


def node_text(node: Node) -> str:
    return shown(node.text) if isinstance(node, ScalarNode) else "…"


def at(where: Where, key: str) -> Where:
    return Where(where.source, where.line, where.column, key)
