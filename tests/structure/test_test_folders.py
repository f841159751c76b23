"""Folders of `tests/` are the rooms of the package, and suites; a test file is named after what it tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

SUITES = {
    "architectures",
    "benchmarks",
    "chaos",
    "cuda",
    "exports",
    "faults",
    "fuzz",
    "gpu",
    "parity",
    "structure",
}
"""Folders that test several rooms together."""


def test_test_folders_mirror_package_and_are_documented(repository: Path) -> None:
    folders = {
        path.relative_to(repository / "tests").parts[0]
        for path in (repository / "tests").glob("*/**/test_*.py")
    }
    rooms = {path.name for path in (repository / "fsdp_tune").iterdir() if (path / "__init__.py").is_file()}
    assert folders - rooms == SUITES
    page = (repository / "docs" / "development" / "testing.md").read_text(encoding="utf-8")
    assert [folder for folder in sorted(folders) if f"| `{folder}` |" not in page] == []


def test_test_files_are_named_after_a_module_of_their_room(repository: Path) -> None:
    """`test_MODULE.py` or `test_MODULE_ASPECT.py`; in `tests/cli/` the name of a command serves too."""
    commands = re.findall(
        r"^fsdp-tune ([a-z][a-z-]*)",
        (repository / "tests" / "golden" / "surface_cli.txt").read_text(),
        re.MULTILINE,
    )
    assert "merge-checkpoint" in commands
    strangers = []
    for path in sorted((repository / "tests").glob("*/**/test_*.py")):
        room = path.relative_to(repository / "tests").parts[0]
        if room in SUITES:
            continue
        names = [module.stem for module in (repository / "fsdp_tune" / room).rglob("*.py")]
        names += [command.replace("-", "_") for command in commands] if room == "cli" else []
        if not any(f"{path.stem}_".startswith(f"test_{name}_") for name in names):
            strangers.append(str(path.relative_to(repository)))
    assert strangers == []
