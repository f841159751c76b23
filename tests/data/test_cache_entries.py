"""`cache list` and `cache clean`: entries are recognised, and none in use is removed."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from fsdp_tune.core.ownership import owned
from fsdp_tune.data import cache_entries
from fsdp_tune.data.cache import alone
from fsdp_tune.data.preparation import Prepared, prepare
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.data.support import ByteEncoder, recipe_for, rows_of, write_jsonl


def used(folder: Path, name: str, run: Path | None = None) -> Prepared:
    """Prepared data of a file of that name, read by a run."""
    rows = write_jsonl(
        folder / f"{name}.jsonl", [{"prompt": f"{name} {n} ", "completion": str(n)} for n in range(9)]
    )
    return prepare(recipe_for(folder, rows), ByteEncoder(), run=run)


def run_cache(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["cache", *arguments, "--cache-dir", str(folder / "cache"), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def removed(document: dict[str, Any]) -> list[str]:
    return sorted(entry["path"] for entry in document["removed"])


@pytest.fixture(autouse=True)
def _long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses of a test are not those of a run that is about to start."""
    monkeypatch.setattr(cache_entries, "STARTING_SECONDS", 0.0)


def test_entries_are_listed_with_size_content_and_last_use(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = used(tmp_path, "a"), used(tmp_path, "b", run)
    used(tmp_path, "a")
    listed = run_cache(tmp_path, "list")["entries"]
    assert [entry["path"] for entry in listed] == [first.path, second.path], "the one used last first"
    assert listed[0]["holds"] == "rows of a.jsonl: train 9"
    assert listed[0]["size_bytes"] == sum(
        file.stat().st_size for file in Path(first.path).rglob("*") if file.is_file()
    )
    assert [use["run"] for use in listed[1]["uses"]] == [str(run)]
    done = CliRunner().invoke(app, ["cache", "list", "--cache-dir", str(tmp_path / "cache")])
    assert f"run {run}" in done.output
    assert re.search(r"\d+ (second|minute)s? ago", done.output)


def test_clean_keeps_the_entry_of_a_live_run_and_removes_it_when_the_run_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    idle, busy = used(tmp_path, "a"), used(tmp_path, "b", run)
    used(tmp_path, "b", tmp_path / "later run that has ended")
    with owned(run / "run.lock"):
        cleaned = run_cache(tmp_path, "clean")
        assert removed(cleaned) == [idle.path]
        assert [(entry["path"], entry["reason"]) for entry in cleaned["kept"]] == [
            (busy.path, f"in use by run {run}")
        ]
        assert len(rows_of(busy)) == 9
    assert removed(run_cache(tmp_path, "clean")) == [busy.path]
    assert [
        path.name for path in (tmp_path / "cache" / "data").iterdir() if not path.name.endswith(".lock")
    ] == []
    assert not used(tmp_path, "a").reused


def test_clean_keeps_entry_of_starting_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_entries, "STARTING_SECONDS", 60.0)
    starting, prepared_only = used(tmp_path, "a", tmp_path / "run"), used(tmp_path, "b")
    assert removed(run_cache(tmp_path, "clean")) == [prepared_only.path]
    assert len(rows_of(starting)) == 9


def test_clean_removes_by_age_and_dry_run_removes_nothing(tmp_path: Path) -> None:
    old, new = used(tmp_path, "a"), used(tmp_path, "b")
    (use,) = Path(old.path).parent.glob(f".{Path(old.path).name}.use-*")
    use.write_text(json.dumps(json.loads(use.read_text()) | {"time": time.time() - 40 * 86_400}))
    assert removed(run_cache(tmp_path, "clean", "--older-than", "30d", "--dry-run")) == [old.path]
    assert len(rows_of(old)) == 9
    assert removed(run_cache(tmp_path, "clean", "--older-than", "30d")) == [old.path]
    assert len(rows_of(new)) == 9
    assert run_cache(tmp_path, "clean", "--older-than", "30", code=2)["errors"][0]["code"] == "usage"


def test_clean_removes_abandoned_stages_and_keeps_live_ones(tmp_path: Path) -> None:
    store = Path(used(tmp_path, "a").path)
    stage = store.with_name(f".{store.name}.stage-123")
    store.rename(stage)
    os.utime(stage, (0, 0))
    with alone(store):
        kept = run_cache(tmp_path, "clean")["kept"]
        assert [(entry["holds"], entry["reason"]) for entry in kept] == [
            ("unfinished or damaged data", "being built")
        ]
    assert removed(run_cache(tmp_path, "clean")) == [str(store)]
    assert not stage.exists()


def test_empty_and_missing_cache_are_listed(tmp_path: Path) -> None:
    assert run_cache(tmp_path, "list", code=2)["errors"][0]["code"] == "no-cache"
    (tmp_path / "cache").mkdir()
    assert run_cache(tmp_path, "list")["entries"] == []
    assert run_cache(tmp_path, "clean")["removed"] == []


def test_clean_keeps_files_that_are_not_entries(tmp_path: Path) -> None:
    """`data.cache_dir` may be a folder with other files in it; `data/` and `traces/` are common names."""
    entry = used(tmp_path, "a")
    trace = tmp_path / "cache" / "traces" / f"{'0' * 32}.npz"
    others = [
        tmp_path / "cache" / name
        for name in ("data/raw/rows.jsonl", "data/.raw.stage-1/x", "traces/mine.npz", "compiled/mine.py")
    ]
    for path in (trace, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    listed = {each["path"] for each in run_cache(tmp_path, "list")["entries"]}
    assert listed == {entry.path, str(trace.parent)}
    assert set(removed(run_cache(tmp_path, "clean"))) == listed
    assert not trace.exists()
    assert [path.read_text() for path in others] == ["mine"] * len(others)


@pytest.mark.parametrize(
    "compiles",
    [
        {"kernels": {"compile": True}},
        {"lora": {}, "quantization": {"load": "nf4"}},
        {"training": {"optim": "adamw_torch_8bit"}},
    ],
    ids=["layers", "4 bits", "optimizer"],
)
def test_compiled_kernels_of_a_live_run_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: dict[str, Any]
) -> None:
    """They are in the default cache directory, also those of a run that keeps its data elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    kernel = tmp_path / "user" / "fsdp-tune" / "compiled" / "kernel.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("")
    rows = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{n} ", "completion": str(n)} for n in range(9)])
    run = tmp_path / "run"
    run.mkdir()
    compiled = Recipe.model_validate(recipe_for(tmp_path, rows).model_dump(by_alias=True) | compiles)
    prepare(compiled, ByteEncoder(), run=run)
    with owned(run / "run.lock"):
        done = CliRunner().invoke(app, ["cache", "clean", "--json"])
        assert [entry["reason"] for entry in json.loads(done.stdout)["kept"]] == [f"in use by run {run}"]
    done = CliRunner().invoke(app, ["cache", "clean", "--json"])
    assert removed(json.loads(done.stdout)) == [str(kernel.parent)]
    assert not list(kernel.parent.parent.iterdir())
