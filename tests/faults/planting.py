"""Plant a bug: edit the syntax tree of one named function of the package.

A plant names a module, a function in it and an edit. An edit looks inside that function for the smallest
piece of code of one kind that mentions all the given names, and replaces it. It raises `DoesNotApply` unless
exactly one piece matches, so a plant whose target has moved fails its test (`test_table.py`) instead of
planting nothing.

Names: `fsync` and `DISK.fsync` both match `DISK.fsync`; texts match the literal of that value (error codes,
dictionary keys); `return` and `raise` match those statements. In the replacement `_` is the code that it
replaces.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "fsdp_tune"


class DoesNotApply(Exception):
    """The target of a plant is gone, or more than one piece of code matches."""


@dataclass(frozen=True)
class Slot:
    """A node and where its parent holds it."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def fill(self, nodes: list[ast.AST]) -> None:
        if self.index is None:
            (node,) = nodes
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index : self.index + 1] = nodes


@dataclass(frozen=True)
class Edit:
    kind: Callable[[Slot], ast.AST | None]
    """The node of the slot whose names count, or None if the slot is of another kind."""
    names: tuple[str, ...]
    code: str

    def apply(self, function: ast.AST) -> None:
        found = [
            slot
            for slot in _slots(function)
            if (node := self.kind(slot)) is not None and _mentions(node, self.names)
        ]
        # The smallest: those that contain no other match.
        smallest = [
            slot
            for slot in found
            if not any(other is not slot and _contains(slot.node, other.node) for other in found)
        ]
        if len(smallest) != 1:
            lines = sorted(getattr(slot.node, "lineno", 0) for slot in smallest)
            places = ", ".join(f"line {number}" for number in lines) or "nowhere"
            raise DoesNotApply(f"{', '.join(self.names) or self.code}: expected one match, found {places}")
        (slot,) = smallest
        nodes = [_Fill(slot.node).visit(node) for node in _parsed(self.code, slot.node)]
        slot.fill(nodes)


@dataclass(frozen=True)
class Plant:
    name: str
    where: str
    """`module:function` under `fsdp_tune`, with the class of a method; `module` alone is everything in it."""
    edits: tuple[Edit, ...]
    rows: tuple[str, ...]
    by: tuple[str, ...]
    """The quickest tests of the rows that see it, where the first of a row would take long:
    `tests/….py::test_…[…]`."""

    @property
    def path(self) -> str:
        """Of the changed file, from the root of the package."""
        return self.where.split(":")[0].replace(".", "/") + ".py"

    def planted(self, package: Path = PACKAGE) -> str:
        """Return the module's source with the bug in it. Raises: DoesNotApply."""
        tree = ast.parse((package / self.path).read_text(encoding="utf-8"))
        function: ast.AST = tree
        for name in self.where.partition(":")[2].split(".") if ":" in self.where else []:
            named = [node for node in ast.iter_child_nodes(function) if getattr(node, "name", None) == name]
            if len(named) != 1:
                raise DoesNotApply(f"{self.where}: {len(named)} definitions of `{name}`")
            (function,) = named
        for edit in self.edits:
            edit.apply(function)
        return ast.unparse(ast.fix_missing_locations(tree))


def plant(name: str, where: str, *edits: Edit, rows: str, by: tuple[str, ...] = ()) -> Plant:
    """`rows`: ids with spaces between them. `by`: `folder/test_file.py::name_without_test_[parameters]`."""
    return Plant(
        name,
        where,
        edits,
        tuple(rows.split()),
        tuple(f"tests/{test.replace('::', '::test_')}" for test in by),
    )


def replace(name: str, code: str) -> Edit:
    """Read another expression instead of `name`; a call of it keeps its arguments."""
    return Edit(_expression, (name,), code)


def value(name: str, code: str) -> Edit:
    """Change what is assigned to `name`, its default as a parameter, or what a call passes for it."""
    return Edit(_value, (name,), code)


def result(code: str) -> Edit:
    """Change what the function's only `return` returns."""
    return Edit(_result, (), code)


def condition(names: str, code: str) -> Edit:
    """Change the condition (a test, a filter of a comprehension, an operand of `and` or `or`) that mentions
    all of `names`."""
    return Edit(_condition, tuple(names.split()), code)


def never(names: str) -> Edit:
    return condition(names, "False")


def always(names: str) -> Edit:
    return condition(names, "True")


def statement(names: str, code: str) -> Edit:
    """Change the simple statement that mentions all of `names`."""
    return Edit(_statement, tuple(names.split()), code)


def drop(names: str) -> Edit:
    return statement(names, "pass")


def catch(type_: str) -> Edit:
    """Catch another type in the function's only `except`."""
    return Edit(_caught, (), type_)


def _expression(slot: Slot) -> ast.AST | None:
    return (
        slot.node
        if isinstance(slot.node, ast.Name | ast.Attribute) and isinstance(slot.node.ctx, ast.Load)
        else None
    )


def _value(slot: Slot) -> ast.AST | None:
    match slot.parent:
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target) if slot.field == "value":
            return target
        case ast.keyword(arg=str(name)):
            return ast.Name(name)
        case ast.arguments(args=args) if slot.field == "defaults":
            return ast.Name(args[len(args) - len(slot.parent.defaults) + (slot.index or 0)].arg)
        case ast.arguments(kwonlyargs=args) if slot.field == "kw_defaults":
            return ast.Name(args[slot.index or 0].arg)
    return None


def _result(slot: Slot) -> ast.AST | None:
    return slot.node if isinstance(slot.parent, ast.Return) else None


_CONDITIONS = {
    (ast.If, "test"),
    (ast.While, "test"),
    (ast.IfExp, "test"),
    (ast.comprehension, "ifs"),
    (ast.BoolOp, "values"),
}


def _condition(slot: Slot) -> ast.AST | None:
    return slot.node if (type(slot.parent), slot.field) in _CONDITIONS else None


def _statement(slot: Slot) -> ast.AST | None:
    return slot.node if isinstance(slot.node, ast.stmt) and not hasattr(slot.node, "body") else None


def _caught(slot: Slot) -> ast.AST | None:
    return slot.node if isinstance(slot.parent, ast.ExceptHandler) and slot.field == "type" else None


def _slots(root: ast.AST) -> Iterator[Slot]:
    for parent in ast.walk(root):
        for field, held in ast.iter_fields(parent):
            for index, node in enumerate(held) if isinstance(held, list) else [(None, held)]:
                if isinstance(node, ast.AST):
                    yield Slot(parent, field, index, node)


def _contains(node: ast.AST, other: ast.AST) -> bool:
    return any(each is other for each in ast.walk(node))


def _mentions(node: ast.AST, names: tuple[str, ...]) -> bool:
    mentioned = [text for each in ast.walk(node) if (text := _name_of(each)) is not None]
    return all(any(text == name or text.endswith(f".{name}") for text in mentioned) for name in names)


def _name_of(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=base, attr=name):
            return f"{_name_of(base) or ''}.{name}"
        case ast.Constant(value=str(text)):
            return text
        case ast.keyword(arg=name):
            return name
        case ast.Return() | ast.Raise():
            return type(node).__name__.lower()
    return None


def _parsed(code: str, replaced: ast.AST) -> list[ast.AST]:
    if isinstance(replaced, ast.stmt):
        return list(ast.parse(code).body)
    return [ast.parse(code, mode="eval").body]


class _Fill(ast.NodeTransformer):
    """Puts the replaced code in the place of `_`."""

    def __init__(self, replaced: ast.AST) -> None:
        self._replaced = replaced

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return (
            copy.deepcopy(self._replaced) if node.id == "_" and isinstance(self._replaced, ast.expr) else node
        )

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_hole = (
            isinstance(node.value, ast.Name) and node.value.id == "_" and isinstance(self._replaced, ast.stmt)
        )
        return copy.deepcopy(self._replaced) if is_hole else self.generic_visit(node)
