"""`train --skip-rows FILE`: files of rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.in_process import errors, settings
from tests.cli.inspection import fake_model  # noqa: F401  a fixture
from tests.cli.small_runs import STREAM, write_rows


@pytest.mark.usefixtures("fake_model")
def test_bad_files_of_rows_are_errors_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"text": "1 plus 2 is 3."}] * 60)
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(STREAM | {"data": {"train": [{"path": "rows.jsonl"}], "max_length": 128}})
    )
    (tmp_path / "skip").write_text("rows.jsonl:1\nrows.jsonl:61\nother.jsonl:1\n")
    found = errors("train", "--config", "recipe.yaml", *settings("output_dir=run"), "--skip-rows", "skip")
    assert [(error["code"], error["file"], error["line"]) for error in found] == [
        ("skip-rows-unknown", "skip", 2),
        ("skip-rows-unknown", "skip", 3),
    ]
    assert not (tmp_path / "run").exists()
    (tmp_path / "skip").write_text("rows.jsonl\n")
    found = errors("train", "--config", "recipe.yaml", "--dry-run", "--skip-rows", "skip")
    assert found[0]["code"] == "skip-rows-line"
