"""Inputs that only the start of a run reads: a resume continues without them, or is refused before a rank
starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.data.read.file_access import CHAT_TEMPLATE
from fsdp_tune.data.tokenise.tokenizer import open_tokenizer
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import Done, document
from tests.cli.in_process import errors, invoke
from tests.cli.inspection import fake_model  # noqa: F401  a fixture
from tests.cli.small_runs import STREAM, losses, make_base, write_rows
from tests.cluster.test_remote_run import save

HUB_BASE, HUB_ENTRY = "someone/base", "hub/models--someone--base"
ROW = {
    "messages": [
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": "2, and 2 + 2 = 4"},
    ]
}
RECIPE: dict[str, Any] = {
    "model": {
        "name_or_path": "base",
        "tokenizer": "tokenizer",
        "tokens": {"add": ["<|new|>"]},
        "resize_embeddings": True,
    },
    "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64, "chat_template": "chat.jinja"},
    "training": {
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "report_to": [],
        "sample": {"prompts": ["1 +"], "every": 2, "max_new_tokens": 4},
    },
    "merge": {"at_end": False},
    "launch": {"device": "cpu", "num_processes": 2},
    "output_dir": "full",
}
FROM_CONFIG = {"model": {"from_config": "base", "tokenizer": "tokenizer"}, "output_dir": "drawn"}
FROM_HUB = {"model": {"name_or_path": HUB_BASE, "tokenizer": HUB_BASE}, "output_dir": "from-hub"}
LORA = {"lora": {"r": 4}, "output_dir": "adapter"}


class Started:
    """A folder with runs that have been trained to their end, each started once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_base(folder / "base")
        tokenizer = open_tokenizer(
            Recipe.model_validate({"model": {"tokenizer": "builtin:arithmetic"}})
        ).tokenizer
        tokenizer.save_pretrained(folder / "tokenizer")
        (folder / "chat.jinja").write_text(CHAT_TEMPLATE + "{# of this project #}\n")
        write_rows(folder / "rows.jsonl", [ROW] * 32)
        entry = folder / HUB_ENTRY
        for source in ("base", "tokenizer"):
            shutil.copytree(folder / source, entry / "snapshots" / "abc", dirs_exist_ok=True)
        (entry / "refs").mkdir()
        (entry / "refs" / "main").write_text("abc")

    def train(self, name: str, *options: str) -> Done:
        command = [sys.executable, "-m", "fsdp_tune", "train", "--config", f"{name}.yaml", "--json", *options]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(self.folder / "hub"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=environment,
            timeout=300,
        )

    def cut_run(self, changes: dict[str, Any]) -> tuple[str, RunDir]:
        """Return the name of a finished run and a copy of it that has stopped at step 2."""
        name = str(changes.get("output_dir", RECIPE["output_dir"]))
        whole, cut = self.folder / name, self.folder / "cut"
        if not whole.exists():
            (self.folder / f"{name}.yaml").write_text(json.dumps(RECIPE | changes))
            done = self.train(name)
            assert done.returncode == 0, done.stderr
        shutil.rmtree(cut, ignore_errors=True)
        shutil.copytree(whole, cut, ignore=shutil.ignore_patterns("checkpoint-4", "run.lock"))
        return name, RunDir(cut)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Started:
    return Started(tmp_path_factory.mktemp("started"))


def resume_without(started: Started, changes: dict[str, Any], gone: list[str]) -> tuple[str, RunDir, Done]:
    """Resume while files are away. Return the name of the run that was not cut, the one that was, and the
    command."""
    name, cut = started.cut_run(changes)
    away = started.folder / "away"
    away.mkdir()
    for each in gone:
        (started.folder / each).rename(away / Path(each).name)
    try:
        done = started.train(name, "--set", "output_dir=cut", "--resume", "auto")
    finally:
        for each in gone:
            (away / Path(each).name).rename(started.folder / each)
        away.rmdir()
    return name, cut, done


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({}, ["base", "tokenizer", "chat.jinja"]),
        ({}, ["base"]),
        ({}, ["tokenizer"]),
        ({}, ["chat.jinja"]),
        (FROM_CONFIG, ["base"]),
        (FROM_HUB, [HUB_ENTRY]),
        (LORA, ["tokenizer"]),
        (LORA, ["chat.jinja"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value.get("output_dir", "full")),
)
def test_resume_continues_without_what_only_the_start_reads(
    started: Started, changes: dict[str, Any], gone: list[str]
) -> None:
    name, cut, done = resume_without(started, changes, gone)
    assert done.returncode == 0, done.stderr
    assert document(done)["steps"] == 4
    whole = RunDir(started.folder / name)
    assert losses(cut.path) == losses(whole.path)
    recorded = [json.loads(run.recipe_json.read_text()) for run in (cut, whole)]
    assert [{**each, "output_dir": ""} for each in recorded] == [{**recorded[1], "output_dir": ""}] * 2


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("changes", "gone", "code", "key"),
    [
        ({}, "rows.jsonl", "data-not-found", "data.train[0]"),
        (LORA, "base", "not-found", "model.name_or_path"),
    ],
    ids=["data", "frozen-weights"],
)
def test_resume_without_what_it_needs_is_refused_before_ranks_start(
    started: Started, changes: dict[str, Any], gone: str, code: str, key: str
) -> None:
    _, cut, done = resume_without(started, changes, [gone])
    assert done.returncode == 2, done.stderr
    [error] = document(done)["errors"]
    assert (error["code"], error["key"]) == (code, key)
    assert gone in error["message"]
    assert "starting ranks" not in done.stderr
    assert not (cut.path / "checkpoint-4").exists()


@pytest.mark.usefixtures("fake_model")
def test_resume_without_its_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "run")
    write_rows(tmp_path / "rows.jsonl", [ROW] * 32)
    data = {"train": [{"path": "rows.jsonl"}], "max_length": 64}
    (tmp_path / "recipe.yaml").write_text(json.dumps(STREAM | {"data": data, "output_dir": "run"}))
    assert invoke("train", "--config", "recipe.yaml", "--no-start").exit_code == 0
    save(run, 2)
    (tmp_path / "rows.jsonl").unlink()
    before = sorted(run.path.rglob("*"))
    (error,) = errors("train", "--config", "recipe.yaml", "--resume", "auto")
    assert (error["code"], error["key"]) == ("data-not-found", "data.train[0]")
    assert "rows.jsonl" in error["message"]
    assert sorted(run.path.rglob("*")) == before
