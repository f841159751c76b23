"""Where the package makes problems and notices, and the form of their messages, read from its source without
importing it.

A form is the text with `…` in the place of what is known at run time only. A variable is replaced by its text
where a single assignment
decides it: the last one before the call, in the same block or one around it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.structure import sources
from tests.structure.sources import PACKAGE, Source

MAKERS = {"usage_error", "failed_error", "Problem", "Notice", "Finding", "add_problem", "add_notice"}
"""Callables whose first argument is a code."""
UNKNOWN = "…"
_MESSAGE_POSITION = {"Finding": 2}
_HINT_POSITION = {"Finding": 3, "Problem": 3, "Notice": 3}


@dataclass(frozen=True)
class Site:
    code: str
    place: str
    message: str
    hint: str
    """The hint and the other ways out, as far as the source has words for them; else empty."""


def name_of(function: ast.expr) -> str:
    return (
        function.id
        if isinstance(function, ast.Name)
        else function.attr
        if isinstance(function, ast.Attribute)
        else ""
    )


def literals(node: ast.expr) -> Iterator[str]:
    """Return the strings that an expression is or chooses between; names and subscripts give none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def sites_in(module: Source) -> Iterator[Site]:
    """Every maker called with a literal code, or with a choice of literals."""
    calls = [node for node in module.nodes if _is_maker(node)]
    if calls:
        constants = _constants(module.path) | _imported(module.tree)
        yield from _Search(module, frozenset(node.lineno for node in calls)).sites_of(
            module.tree.body, _Scope(constants)
        )


def _is_maker(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) in MAKERS and bool(node.args)


@functools.cache
def all_sites() -> tuple[Site, ...]:
    return tuple(site for module in sources.modules() for site in sites_in(module))


@functools.cache
def _constants(path: Path) -> dict[str, ast.expr]:
    """Module-level names that are assigned once."""
    tree = sources.source(path).tree
    assigned = [(name, value) for statement in tree.body for name, value in _assignments(statement)]
    return {name: value for name, value in assigned if sum(name == other for other, _ in assigned) == 1}


def _imported(tree: ast.Module) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdp_tune."):
            parts = str(node.module).split(".")[1:]
            for path in (
                PACKAGE.joinpath(*parts).with_suffix(".py"),
                PACKAGE.joinpath(*parts, "__init__.py"),
            ):
                constants = _constants(path) if path.exists() else {}
                found |= {
                    alias.asname or alias.name: constants[alias.name]
                    for alias in node.names
                    if alias.name in constants
                }
    return found


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if (
        isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.value is not None
    ):
        yield statement.target.id, statement.value
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
            elif isinstance(target, ast.Tuple):
                values: Sequence[ast.expr | None] = [None] * len(target.elts)
                if isinstance(statement.value, ast.Tuple) and len(statement.value.elts) == len(target.elts):
                    values = statement.value.elts
                for each, value in zip(target.elts, values, strict=True):
                    if isinstance(each, ast.Name):
                        yield each.id, value or ast.Constant(UNKNOWN)


@dataclass
class _Scope:
    """Names and the expressions that decide them at one point of a function."""

    values: Mapping[str, ast.expr]

    def after(self, statement: ast.stmt) -> _Scope:
        """Names that a compound statement may have changed are unknown after it."""
        changed: dict[str, ast.expr] = dict(_assignments(statement))
        if not changed:
            stored = [
                node
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            ]
            changed = {node.id: ast.Constant(UNKNOWN) for node in stored}
        return _Scope({**self.values, **changed})

    def text(self, node: ast.expr | None, depth: int = 0) -> str:
        match node:
            case ast.Constant(value=str() as value):
                return value
            case ast.JoinedStr(values=parts):
                return "".join(self.text(part, depth) for part in parts)
            case ast.FormattedValue(value=ast.Name() as name, conversion=-1, format_spec=None):
                return self.text(name, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left, depth) + self.text(right, depth)
            case ast.Name(id=name) if name in self.values and depth < 5:
                return self.text(self.values[name], depth + 1)
            case _:
                return UNKNOWN


@dataclass(frozen=True)
class _Search:
    """The search of one module: statements without a maker are passed over, since following every name is
    slow."""

    module: Source
    lines: frozenset[int]
    """Lines on which makers are called."""

    def has_maker(self, statement: ast.stmt) -> bool:
        return any(statement.lineno <= line <= (statement.end_lineno or line) for line in self.lines)

    def sites_of(self, body: Sequence[ast.stmt], scope: _Scope) -> Iterator[Site]:
        last = max((index for index, statement in enumerate(body) if self.has_maker(statement)), default=-1)
        for statement in body[: last + 1]:
            if self.has_maker(statement):
                yield from self._sites_of_statement(statement, scope)
            scope = scope.after(statement)

    def _sites_of_statement(self, statement: ast.stmt, scope: _Scope) -> Iterator[Site]:
        blocks = [
            block
            for name in ("body", "orelse", "finalbody")
            if isinstance(block := getattr(statement, name, None), list)
        ]
        blocks += [
            each.body for each in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))
        ]
        inner = scope
        if isinstance(statement, (ast.FunctionDef, ast.For, ast.With)):
            bound = [
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            ]
            bound += [node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)]
            inner = _Scope({**scope.values, **dict.fromkeys(bound, ast.Constant(UNKNOWN))})
        for block in blocks:
            yield from self.sites_of(block, inner)
        own = (
            [statement]
            if not blocks
            else [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.expr)]
        )
        for call in (node for each in own for node in ast.walk(each)):
            if _is_maker(call):
                yield from _of_call(call, scope, self.module.path)


def _of_call(call: ast.Call, scope: _Scope, path: Path) -> Iterator[Site]:
    keywords = {each.arg: each.value for each in call.keywords}

    def argument(name: str, position: int | None) -> ast.expr | None:
        return keywords.get(name) or (
            call.args[position] if position is not None and len(call.args) > position else None
        )

    maker = name_of(call.func)
    message = scope.text(argument("message", _MESSAGE_POSITION.get(maker, 1)))
    hint, ways_out = argument("hint", _HINT_POSITION.get(maker)), argument("ways_out", None)
    has_hint = hint is not None and not (isinstance(hint, ast.Constant) and hint.value is None)
    hints = [_tidy(scope.text(hint))] if has_hint else []
    hints += [_tidy(scope.text(each)) for each in ways_out.elts] if isinstance(ways_out, ast.Tuple) else []
    shown = "; ".join(each for each in hints if re.search(r"\w", each))
    for code in literals(call.args[0]):
        place = f"{path.relative_to(PACKAGE.parent).as_posix()}:{call.lineno}"
        yield Site(code, place, _tidy(message), shown)


def is_legible(text: str) -> bool:
    """Whether a form has at least two words of its own, and more of them than gaps."""
    words = [word for word in text.split() if re.search(r"\w", word)]
    return len(words) >= 2 and text.count(UNKNOWN) < len(words)


def _tidy(text: str) -> str:
    return re.sub(f"{UNKNOWN}({UNKNOWN})+", UNKNOWN, " ".join(text.split()))


HEADING = re.compile(r"^## ([a-z0-9-]+)$", re.MULTILINE)


def message_table() -> str:
    """Return docs/reference/messages.tsv: each code with the forms of its messages and their hints.

    A message that only the run decides is `…`. Its row is there for its hint, or for the code if that has no
    other row.
    """
    sites = [
        replace(site, message=site.message if is_legible(site.message) else UNKNOWN) for site in all_sites()
    ]
    legible = {site.code for site in sites if site.message != UNKNOWN or site.hint}
    found = {
        (site.code, site.message, site.hint)
        for site in sites
        if site.message != UNKNOWN or site.hint or site.code not in legible
    }
    return "".join("\t".join(row) + "\n" for row in [("code", "message", "hint"), *sorted(found)])
