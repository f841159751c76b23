"""Sources of rows that name the same bytes, compared without a network and without code of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.comparison.identity import are_same_files
from fsdp_tune.data.read import sources
from fsdp_tune.data.read.file_access import FileDigests


def are_same(folder: Path, a: dict[str, Any], b: dict[str, Any], key: str = "path") -> bool:
    recipes = [{"data": {"train": [source]}} for source in (a, b)]
    return are_same_files(("data", "train", 0, key), *recipes, FileDigests(folder / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(f'{{"text": "{text}"}}\n')
    return tmp_path


def test_globs_and_paths_in_the_home_directory_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    globs = [{"path": f"{folder}/{name}/*.jsonl"} for name in "abc"]
    assert are_same(folder, globs[0], globs[1])
    assert not are_same(folder, globs[0], globs[2])
    assert are_same(folder, {"path": "~/a/rows.jsonl"}, {"path": str(folder / "b")})


def test_loader_of_the_user_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs are compared without `--allow-extensions`."""
    called: list[str] = []
    monkeypatch.setattr(sources, "find_extension", lambda _kind, name, _where: called.append(name))
    paths = [{"path": str(folder / name / "rows.jsonl"), "loader": "mine"} for name in "ab"]
    assert not are_same(folder, paths[0], paths[1])
    assert called == []


@pytest.mark.parametrize(
    "source",
    [
        {"path": "owner/name", "data_files": "a.jsonl"},
        {"path": "json", "data_files": "https://host/a.jsonl"},
        {"path": "https://host/a.jsonl"},
        {"path": "builtin:arithmetic"},
    ],
)
def test_nothing_is_downloaded(source: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queried: list[object] = []
    for name in ("load_from_hub", "find_urls"):
        monkeypatch.setattr(sources, name, lambda *given, **_: queried.append(given))
    assert not are_same(folder, source, source)
    assert queried == []
