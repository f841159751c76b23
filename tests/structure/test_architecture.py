"""Paths named in the architecture pages exist, and every folder has its layer."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.py)`")
IN_A_RUN = ("RUN/", "logs/")


def page(repository: Path) -> str:
    return (repository / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["docs/development/architecture.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_every_path_that_is_named_exists(repository: Path, name: str) -> None:
    text = (repository / name).read_text(encoding="utf-8")
    named = {path for path in PATH.findall(text) if not path.startswith(IN_A_RUN)}
    assert named
    assert [
        path
        for path in sorted(named)
        if not any((root / path).exists() for root in (repository, repository / "fsdp_tune"))
    ] == []


def test_every_layer_is_documented(repository: Path) -> None:
    contracts = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    layers = [
        name.replace(".", "/")
        for layer in contracts[0]["layers"]
        for name in re.findall(r"fsdp_tune\.([\w.]+)", layer)
    ]
    table = page(repository).partition("## Layers")[2].partition("## Three ways")[0]
    assert [name for name in layers if f"`{name}/`" not in table and f"`{name}.py`" not in table] == []


def test_every_folder_is_in_a_layer(repository: Path) -> None:
    contracts = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    layers = [
        repository / name.replace(".", "/")
        for layer in contracts[0]["layers"]
        for name in re.findall(r"fsdp_tune[\w.]+", layer)
    ]
    modules = [
        path for path in (repository / "fsdp_tune").rglob("*.py") if path.stem not in ("__init__", "__main__")
    ]
    assert [
        path
        for path in modules
        if not any(path.is_relative_to(layer) or path == layer.with_suffix(".py") for layer in layers)
    ] == []


def test_pre_commit_hooks_are_scripts_of_the_repository(repository: Path) -> None:
    repos = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [each["repo"] for each in repos] == ["local"]
    hooks = repos[0]["hooks"]
    assert {hook["entry"] for hook in hooks} == {"scripts/check", "scripts/test structure"}
    assert {hook["language"] for hook in hooks} == {"script"}
    assert all(os.access(repository / hook["entry"].split()[0], os.X_OK) for hook in hooks)
