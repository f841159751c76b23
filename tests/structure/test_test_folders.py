"""Folders of `tests/` mirror those of the package, and a file named after a module is in that module's folder."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

SUITES = {"architectures", "benchmarks", "chaos", "cuda", "exports", "faults", "fuzz", "gpu", "parity", "structure"}
"""Folders that test several rooms together."""


def rooms_of_modules(repository: Path) -> dict[str, set[str]]:
    """Stem of a module → the rooms that have a module of that name."""
    package = repository / "fsdp_tune"
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in package.glob("*/**/*.py"):
        rooms[path.stem].add(path.relative_to(package).parts[0])
    return rooms


def test_test_folders_mirror_package_and_are_documented(repository: Path) -> None:
    folders = {path.relative_to(repository / "tests").parts[0] for path in (repository / "tests").glob("*/**/test_*.py")}
    rooms = {room for rooms in rooms_of_modules(repository).values() for room in rooms}
    assert folders - rooms == SUITES
    page = (repository / "docs" / "development" / "testing.md").read_text(encoding="utf-8")
    assert [folder for folder in sorted(folders) if f"| `{folder}` |" not in page] == []


def test_test_files_are_in_the_folder_of_their_module(repository: Path) -> None:
    rooms = rooms_of_modules(repository)
    misplaced = {}
    for path in (repository / "tests").glob("*/**/test_*.py"):
        folder, module = path.relative_to(repository / "tests").parts[0], path.stem.removeprefix("test_")
        if folder not in SUITES and folder not in rooms.get(module, {folder}):
            misplaced[str(path.relative_to(repository))] = f"belongs in tests/{' or tests/'.join(sorted(rooms[module]))}"
    assert misplaced == {}
