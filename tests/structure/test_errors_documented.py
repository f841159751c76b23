"""Every code of a message has a page in docs/reference/errors.md, and every page has its code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAKERS = {"usage_error", "failed_error", "Problem", "Notice", "Finding", "add_problem", "add_notice"}
"""Callables whose first argument is a code."""
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
HEADING = re.compile(r"^## `?([a-z0-9-]+)`?$", re.MULTILINE)


def name_of(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""


def literals(node: ast.expr) -> Iterator[str]:
    """Return the strings that an expression is or chooses between; names and subscripts give none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def codes_in(path: Path) -> Iterator[tuple[str, str]]:
    """(code, place) of every maker called with a literal, or with a choice of literals."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and name_of(node.func) in MAKERS and node.args:
            for code in literals(node.args[0]):
                yield code, f"{path}:{node.lineno}"


def all_codes(repository: Path) -> dict[str, str]:
    return {code: place for path in sorted((repository / "fsdp_tune").rglob("*.py")) for code, place in codes_in(path)}


def headings(repository: Path) -> list[str]:
    return HEADING.findall((repository / "docs" / "reference" / "errors.md").read_text(encoding="utf-8"))


def test_codes_are_kebab_case(repository: Path) -> None:
    assert {code: place for code, place in all_codes(repository).items() if CODE.fullmatch(code) is None} == {}


def test_every_code_has_an_error_section(repository: Path) -> None:
    documented = set(headings(repository))
    assert {code: place for code, place in all_codes(repository).items() if code not in documented} == {}


def test_every_error_section_has_a_code(repository: Path) -> None:
    codes = all_codes(repository)
    assert [heading for heading in headings(repository) if heading not in codes] == []


def test_error_sections_are_unique(repository: Path) -> None:
    found = headings(repository)
    assert len(found) == len(set(found))
