"""Folders of `tests/` are the rooms of the package, and suites."""

from __future__ import annotations

from pathlib import Path

SUITES = {"architectures", "benchmarks", "chaos", "cuda", "exports", "faults", "fuzz", "gpu", "parity", "structure"}
"""Folders that test several rooms together."""


def test_test_folders_mirror_package_and_are_documented(repository: Path) -> None:
    folders = {path.relative_to(repository / "tests").parts[0] for path in (repository / "tests").glob("*/**/test_*.py")}
    rooms = {path.name for path in (repository / "fsdp_tune").iterdir() if (path / "__init__.py").is_file()}
    assert folders - rooms == SUITES
    page = (repository / "docs" / "development" / "testing.md").read_text(encoding="utf-8")
    assert [folder for folder in sorted(folders) if f"| `{folder}` |" not in page] == []
