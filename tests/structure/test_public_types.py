"""An installed copy of the package is typed: a strict checker finds no unknown type in what the public Python
API takes and returns."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fsdp_tune
from tests.structure.sources import ROOT

pytest.importorskip("basedpyright", reason="scripts/install without `test` installs it")

PACKAGE = "fsdp_tune"
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@functools.cache
def imported_names(module: str) -> dict[str, str]:
    """Name → module of its definition, for every `from … import …` of a module, also those for type checkers
    only."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    froms = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
    ]
    return {alias.name: str(node.module) for node in froms for alias in node.names}


def classes_in(annotation: object, module: str) -> Iterator[type]:
    """The classes of the package that an annotation names."""
    text = (
        annotation
        if isinstance(annotation, str)
        else annotation.__name__
        if isinstance(annotation, type)
        else str(annotation)
    )
    for name in set(IDENTIFIER.findall(text)):
        source = importlib.import_module(imported_names(module).get(name, module))
        found = getattr(source, name, None)
        if isinstance(found, type) and found.__module__.startswith(PACKAGE):
            yield found


def annotations_of(value: object) -> list[object]:
    """Annotations of parameters and result of a function, of what a property returns, or of a class's
    fields."""
    value = (
        value.fget
        if isinstance(value, property)
        else value.func
        if isinstance(value, functools.cached_property)
        else value
    )
    value = getattr(value, "__func__", value)
    return list(getattr(value, "__annotations__", {}).values())


def public_members(kind: type) -> list[str]:
    """Names of a class's own fields, properties and methods, without those that start with an underscore."""
    names = [*getattr(kind, "__annotations__", {}), *vars(kind)]
    of_pydantic = ("model_config", "model_fields", "model_computed_fields")
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and name not in of_pydantic]


def reachable() -> list[type]:
    """The classes of the package that a caller of the public API can hold, in the order in which they are
    found."""
    found: dict[type, None] = {}
    waiting: list[type] = []
    for name in fsdp_tune.__all__:
        value = getattr(fsdp_tune, name)
        waiting += (
            [value]
            if isinstance(value, type)
            else [kind for each in annotations_of(value) for kind in classes_in(each, value.__module__)]
        )
    while waiting:
        kind = waiting.pop()
        if kind in found:
            continue
        found[kind] = None
        own = [base for base in kind.__mro__ if base.__module__.startswith(PACKAGE)]
        waiting += own
        values = [each for name in public_members(kind) if (each := vars(kind).get(name)) is not None]
        annotations = [*annotations_of(kind), *(each for value in values for each in annotations_of(value))]
        waiting += [inner for each in annotations for inner in classes_in(each, kind.__module__)]
    return list(found)


def program() -> str:
    """A program that uses every public name, and every public member of every class that one of them leads
    to."""
    lines = ["import fsdp_tune", *sorted({f"import {kind.__module__}" for kind in reachable()}), ""]
    lines += [f"print(fsdp_tune.{name})" for name in fsdp_tune.__all__]
    for number, kind in enumerate(reachable()):
        members = public_members(kind) or ["__class__"]
        lines += [
            f"def use_{number}(value: {kind.__module__}.{kind.__qualname__}) -> None:",
            *(f"    print(value.{each})" for each in members),
        ]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the files of a wheel, and with the libraries of this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # a path in a .pth: its own are not read
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "bin" / "python"


def errors_of(python: Path, folder: Path, source: str) -> list[str]:
    """What a strict type checker reports about a file, one line each."""
    (folder / "uses.py").write_text(source, encoding="utf-8")
    settings = {"typeCheckingMode": "strict", "include": ["uses.py"], "reportMissingTypeStubs": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--outputjson",
        "--pythonpath",
        str(python),
        "--project",
        str(folder),
    ]
    # which would lead to the checkout
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=300
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, done.stderr
    lines = source.splitlines()
    return [
        f"{lines[each['range']['start']['line']].strip()}: {each['message']}"
        for each in report["generalDiagnostics"]
    ]


@pytest.mark.slow
def test_public_api_has_no_unknown_type_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    assert len(reachable()) > 100
    assert errors_of(installed, tmp_path, program()) == []


@pytest.mark.slow
def test_example_of_the_python_page_is_free_of_type_errors(installed: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert examples
    assert errors_of(installed, tmp_path, "\n".join(examples)) == []


@pytest.mark.slow
def test_type_that_is_not_declared_is_found_in_the_installed_copy(installed: Path, tmp_path: Path) -> None:
    module = next(installed.parents[1].glob(f"lib/*/site-packages/{PACKAGE}/jobs/train.py"))
    text = module.read_text(encoding="utf-8")
    planted = text.replace("recipe: LoadedRecipe,", "recipe,", 1)
    assert planted != text
    module.write_text(planted, encoding="utf-8")
    try:
        found = errors_of(installed, tmp_path, "import fsdp_tune\n\nprint(fsdp_tune.train)\n")
    finally:
        module.write_text(text, encoding="utf-8")
    assert any("partially unknown" in each for each in found)
