"""Imports in strings (programs of child processes, examples of pages) name modules and names that exist; slow
tests would show it late."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.structure.sources import source

pytestmark = pytest.mark.source

IMPORT = re.compile(r"from (fsdp_tune[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))")
PLACES = ("tests/**/*.py", "benchmarks/*.py", "scripts/*", "docs/**/*.md", "README*.md")
INVENTED = "tests/structure/test_layers.py"
"""Has the imports of an invented package."""


@functools.cache
def names_of(package: Path, module: str) -> set[str] | None:
    """Return the names that a module defines or imports anywhere, and its submodules; None without such a
    module."""
    path = package.joinpath(*module.split(".")[1:])
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        return None
    found = {child.stem for child in path.iterdir()} if path.is_dir() else set[str]()
    for node in source(file).nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing_names(package: Path, text: str) -> list[str]:
    missing: list[str] = []
    for module, inside, plain in IMPORT.findall(text):
        known = names_of(package, module)
        wanted = [re.split(r"\s+as\s+", word.strip())[0] for word in (inside or plain).split(",")]
        missing += [
            f"{module}.{name}"
            for name in wanted
            if name and not name.startswith("#") and (known is None or name not in known)
        ]
    return missing


def test_modules_and_names_that_strings_import_exist(repository: Path) -> None:
    paths = [path for place in PLACES for path in sorted(repository.glob(place)) if path.is_file()]
    assert len(paths) > 300
    missing = {
        str(path.relative_to(repository)): names
        for path in paths
        if str(path.relative_to(repository)) not in (INVENTED, "tests/structure/test_named_modules.py")
        and (names := missing_names(repository / "fsdp_tune", path.read_text(encoding="utf-8")))
    }
    assert missing == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("from fsdp_tune.core.errors import Problem, Notice as N\nfrom fsdp_tune.core import units", []),
        ("from fsdp_tune.core.errors import (\n    Problem,\n    Gone,\n)", ["fsdp_tune.core.errors.Gone"]),
        (
            "x = 1\nfrom fsdp_tune.run.directory import RunDir\nfrom fsdp_tune.run import flight\n",
            ["fsdp_tune.run.flight"],
        ),
    ],
)
def test_name_that_is_gone_is_found(repository: Path, text: str, missing: list[str]) -> None:
    assert missing_names(repository / "fsdp_tune", text) == missing
