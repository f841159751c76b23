"""Find the value of a name in a script, without running it.

A name has a value at a use if its scope binds it once, by a plain assignment that every path to the use
passes. Names that are bound in another way (twice, by `+=`, in one branch, as a parameter, as a loop
variable, in a tuple) have none, and neither has a list or a mapping that the script may change in place.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from fsdp_tune.core.units import enumerated

UNKNOWN: Any = object()
"""The value of an expression that only running the script would give."""
_NUMERIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Div: lambda left, right: left / right,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.ExceptHandler, ast.match_case),
)
_Scopes = tuple[tuple[ast.AST, tuple[int, ...]], ...]
"""The scopes of a node from the module on, each with the blocks inside it that lead to the node."""
_ONLY_READ = frozenset(
    {
        "print",
        "len",
        "str",
        "repr",
        "sorted",
        "set",
        "list",
        "tuple",
        "dict",
        "min",
        "max",
        "sum",
        "enumerate",
        "zip",
    }
)


@dataclass(frozen=True, slots=True)
class _Place:
    scopes: _Scopes
    order: int
    """Position of a node among all nodes, in the order in which they run inside a scope."""


@dataclass(frozen=True, slots=True)
class _Binding:
    place: _Place
    line: int
    value: ast.expr | None
    """The assigned expression of a plain assignment; None for any other binding."""
    kind: str


class ScriptNames:
    """The names of a script, or of the cells of a notebook as one module. `has_lines`: messages name the
    lines of bindings."""

    def __init__(self, module: ast.Module, readers: frozenset[str], *, has_lines: bool) -> None:
        """`readers`: functions whose arguments are read, and which do not change a list or mapping that they
        get."""
        self._has_lines, self._readers = has_lines, readers | _ONLY_READ
        self._places: dict[int, _Place] = {}
        self._bindings: dict[tuple[int, str], list[_Binding]] = {}
        self._changed: set[str] = set()
        self._binds_any: list[int] = []
        self._order = 0
        self._visit(module, ((module, ()),), None)

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression of literals and of names that have one, else `UNKNOWN`."""
        if isinstance(node, ast.Name):
            found = self._binding(node)
            return (
                UNKNOWN
                if found is None or found.value is None
                else self._kept(node.id, self.value(found.value))
            )
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand)
            return -inner if _is_number(inner) else UNKNOWN
        if isinstance(node, ast.BinOp) and type(node.op) in _NUMERIC:
            left, right = self.value(node.left), self.value(node.right)
            fine = (
                _is_number(left)
                and _is_number(right)
                and not (isinstance(node.op, ast.Div | ast.FloorDiv) and right == 0)
            )
            return _NUMERIC[type(node.op)](left, right) if fine else UNKNOWN
        if isinstance(node, ast.List | ast.Tuple):
            items = [self.value(item) for item in node.elts]
            return UNKNOWN if any(item is UNKNOWN for item in items) else items
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            pairs = {
                str(cast("ast.Constant", key).value): self.value(item)
                for key, item in zip(node.keys, node.values, strict=True)
            }
            return UNKNOWN if any(item is UNKNOWN for item in pairs.values()) else pairs
        if isinstance(node, ast.Constant):
            value: object = node.value
            return value if value is None or isinstance(value, str | bool | int | float) else UNKNOWN
        return _of_torch(ast.unparse(node))

    def why_unknown(self, node: ast.expr) -> str:
        """Return why an expression has no value, with the lines that bind its first name without one."""
        for name in (
            each for each in ast.walk(node) if isinstance(each, ast.Name) and self.value(each) is UNKNOWN
        ):
            bindings = self._bindings.get((id(self._scope(name)), name.id), [])
            numbers = [str(each.line) for each in bindings]
            lines = (
                f" (lines {enumerated(numbers, 'and')})" if self._has_lines and len(set(numbers)) > 1 else ""
            )
            if any(each.kind == "parameter" for each in bindings):
                return f"`{name.id}` is a parameter of a function"
            if len(bindings) > 1:
                return f"`{name.id}` is bound more than once{lines}"
            if bindings and bindings[0].value is not None and self._binding(name) is None:
                return f"`{name.id}` is not bound on every path to this line"
            if bindings and bindings[0].value is not None and name.id in self._changed:
                return f"the script may change `{name.id}` in place"
        return "the script computes it"

    def _kept(self, name: str, value: object) -> object:
        """Return a value, unless it is a list or mapping that a name lets the script change."""
        is_changed = isinstance(value, list | dict) and name in self._changed
        return UNKNOWN if is_changed else cast("Any", value)

    def _scope(self, node: ast.Name) -> ast.AST | None:
        """Return the innermost scope that binds a name where it is used. A class is the scope of its own
        statements alone."""
        scopes = self._places[id(node)].scopes
        inner = scopes[-1][0]
        visible = [scope for scope, _ in scopes if not isinstance(scope, ast.ClassDef) or scope is inner]
        return next((scope for scope in reversed(visible) if (id(scope), node.id) in self._bindings), None)

    def _binding(self, node: ast.Name) -> _Binding | None:
        """Return the only binding of a name, if every path to a use passes it."""
        scope, use = self._scope(node), self._places[id(node)]
        bindings = self._bindings.get((id(scope), node.id), [])
        if len(bindings) != 1 or bindings[0].value is None:
            return None
        place = bindings[0].place
        is_local = use.scopes[-1][0] is scope
        blocks = next(blocks for each, blocks in use.scopes if each is scope)
        bound = next(blocks for each, blocks in place.scopes if each is scope)
        if blocks[: len(bound)] != bound or (is_local and place.order > use.order):
            return None
        # A function runs after its definition, so that what binds any name may come before its uses there.
        is_hidden = any(
            place.order < other and (not is_local or other < use.order) for other in self._binds_any
        )
        return None if is_hidden and isinstance(scope, ast.Module) else bindings[0]

    def _visit(self, node: ast.AST, scopes: _Scopes, parent: ast.AST | None) -> None:
        self._order += 1
        place = self._places[id(node)] = _Place(scopes, self._order)
        for name, line, value, kind in _bound_by(node, parent):
            of_function = [each for each, _ in scopes if not isinstance(each, _Comprehension)]
            scope = of_function[-1] if kind == "walrus" else scopes[-1][0]
            self._bindings.setdefault((id(scope), name), []).append(_Binding(place, line, value, kind))
        if isinstance(node, ast.Global | ast.Nonlocal):
            for name, (outer, _) in ((name, each) for name in node.names for each in scopes):
                self._bindings.setdefault((id(outer), name), []).append(
                    _Binding(place, node.lineno, None, "global")
                )
        if _binds_any(node):
            self._binds_any.append(self._order)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not self._is_read(node, parent):
            self._changed.add(node.id)
        if isinstance(node, _Function | ast.ClassDef):
            self._visit_scope(node, scopes)
        elif isinstance(node, _Comprehension):
            self._visit_children(node, (*scopes, (node, ())), node)
        else:
            # Arguments are read by the call that they belong to.
            self._visit_children(
                node, scopes, (parent or node) if isinstance(node, ast.keyword | ast.Starred) else node
            )

    def _visit_scope(self, node: _Function | ast.ClassDef, scopes: _Scopes) -> None:
        """Visit a function or class. Decorators, defaults and bases are evaluated outside of its scope."""
        inner = (*scopes, (node, ()))
        outside: list[ast.AST] = list(getattr(node, "decorator_list", []))
        if isinstance(node, ast.ClassDef):
            outside += [*node.bases, *node.keywords]
        else:
            given = node.args
            outside += [each for each in (*given.defaults, *given.kw_defaults) if each is not None]
            for argument in filter(
                None, (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
            ):
                binding = _Binding(_Place(inner, self._order), argument.lineno, None, "parameter")
                self._bindings.setdefault((id(node), argument.arg), []).append(binding)
        for child in outside:
            self._visit(child, scopes, node)
        for child in node.body if isinstance(node.body, list) else [node.body]:
            self._visit(child, inner, node)

    def _visit_children(self, node: ast.AST, scopes: _Scopes, parent: ast.AST) -> None:
        """Visit the parts of a node in the order in which they run. Each branch, loop or part of a `try` is a
        block of its own."""
        *outer, (scope, blocks) = scopes
        parts = dict(ast.iter_fields(node))
        if isinstance(
            node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor | ast.NamedExpr
        ):
            first = "iter" if "iter" in parts else "value"  # evaluated before its targets are bound
            parts = {first: parts[first], **parts}
        for name, value in parts.items():
            self._order += 1
            is_block = isinstance(node, _BRANCHES) and name in ("body", "orelse", "handlers", "finalbody")
            inner = (*outer, (scope, (*blocks, self._order))) if is_block else scopes
            for child in cast("list[object]", value) if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self._visit(child, inner, parent)

    def _is_read(self, node: ast.Name, parent: ast.AST | None) -> bool:
        """Return whether a use of a name cannot change its value in place."""
        if isinstance(parent, ast.Call):
            return node is not parent.func and called(parent) in self._readers
        if isinstance(parent, ast.For | ast.AsyncFor | ast.comprehension):
            return node is parent.iter
        return isinstance(
            parent,
            ast.Compare | ast.FormattedValue | ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.IfExp | ast.If,
        )


def called(node: ast.Call) -> str:
    """Return the last part of the name of a called function; "" if it has none."""
    function = node.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


class _Name(NamedTuple):
    """A name that a node binds."""

    name: str
    line: int
    value: ast.expr | None
    """The expression of a plain assignment."""
    kind: str


def _bound_by(node: ast.AST, parent: ast.AST | None) -> Iterator[_Name]:
    """Yield each name that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        if isinstance(parent, ast.AnnAssign):
            yield from (
                [_Name(node.id, node.lineno, parent.value, "plain")] if parent.value is not None else []
            )
        elif isinstance(parent, ast.Assign):  # names of a tuple have the tuple as their parent
            yield _Name(node.id, node.lineno, parent.value, "plain")
        else:
            yield _Name(
                node.id, node.lineno, None, "walrus" if isinstance(parent, ast.NamedExpr) else "other"
            )
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield _Name(node.name, node.lineno, None, "other")
    elif isinstance(node, ast.alias) and node.name != "*":
        yield _Name(node.asname or node.name.partition(".")[0], node.lineno, None, "other")
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
        yield _Name(node.name, node.lineno, None, "other")
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        yield _Name(node.rest, node.lineno, None, "other")


def _binds_any(node: ast.AST) -> bool:
    """Return whether a node may bind names that it does not write."""
    if isinstance(node, ast.ImportFrom):
        return any(each.name == "*" for each in node.names)
    return isinstance(node, ast.Call) and (
        called(node) in ("exec", "globals")
        or (called(node) in ("locals", "vars") and not node.args and isinstance(node.func, ast.Name))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _of_torch(text: str) -> object:
    """Return the name of a dtype, or whether the device computes in bf16, which a recipe decides by
    itself."""
    if text.startswith("torch.") and "(" not in text:
        return text.removeprefix("torch.")
    if re.fullmatch(r"(torch\.cuda\.)?is_bf(loat)?16_supported\(\)", text):
        return "auto"
    return False if re.fullmatch(r"not (torch\.cuda\.)?is_bf(loat)?16_supported\(\)", text) else UNKNOWN
