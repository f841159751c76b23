"""Shell completion, by the protocol of Typer's scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from fsdp_tune.cli import completion
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.read.loader import load_recipe
from tests.cli.forked import command, ended
from tests.pages.written import written
from tests.structure.test_surface import HEAVY


def bash(folder: Path, *requests: list[str]) -> list[list[str]]:
    """Return the answers to bash about the last words of each request; it splits words at `=`. No library
    that computes is imported."""
    program = f"""
import io, json, os, sys
from contextlib import redirect_stdout
from fsdp_tune.cli.app import main

answers = []
for words in {requests!r}:
    os.environ |= {{"_FSDP_TUNE_COMPLETE": "complete_bash", "COMP_WORDS": "\\n".join(["fsdp-tune", *words]), "COMP_CWORD": str(len(words))}}
    sys.argv = ["fsdp-tune"]
    with redirect_stdout(io.StringIO()) as answer:
        try:
            main()
        except SystemExit as leaving:
            assert leaving.code == 0, leaving
    answers.append(answer.getvalue().split())
print(json.dumps([answers, [name for name in {HEAVY!r} if name in sys.modules]]))
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=folder, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers, heavy = json.loads(done.stdout)
    assert heavy == []
    return answers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path / "runs" / "one")
    written(tmp_path / "runs" / "two")
    written(tmp_path / "own")
    (tmp_path / "runs" / "cache").mkdir()
    (tmp_path / "recipes").mkdir()
    for name in ("recipes/mine.yaml", "mine.yml", "mine.jsonl"):
        (tmp_path / name).write_text("")
    return tmp_path


def test_bash_completes_recipes_gpus_runs_and_values_in_its_own_words(folder: Path) -> None:
    expected = [
        (["train", "--config", "gpt2_"], ["gpt2_smoke", "gpt2_xl_two_24gb"]),
        (["plan", "gpt2_smoke", "--gpu", "H100-S"], ["H100-SXM"]),
        (["status", ""], ["own", "runs/one", "runs/two"]),
        (["report", "own", "runs/"], ["runs/one", "runs/two"]),
        (["train", "--set", "fsdp.sharding_strategy", "=", "HYBRID_SHARD_"], ["HYBRID_SHARD_ZERO2"]),
        (["train", "--set", "data.packing", "="], ["true", "false"]),
        (
            ["train", "--set", "a.b", "=", "c", "x", "--set", "training.lr_scheduler_type", "=", "constant_"],
            ["constant_with_warmup"],
        ),
    ]
    assert bash(folder, *(words for words, _ in expected)) == [found for _, found in expected]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_the_word_as_a_whole(shell: str) -> None:
    variables = {
        "_FSDP_TUNE_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "fsdp-tune train --set data.packing=t",
    }
    done = ended(command(), **variables, _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert "data.packing=true" in done.out
    assert done.err == ""


def test_recipes_are_names_of_the_catalogue_and_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert completion.complete_recipes("mine") == ["mine.yml"]
    assert completion.complete_recipes("rec") == ["recipes/mine.yaml"]
    assert completion.complete_recipes("recipes/") == ["recipes/mine.yaml"]
    assert {"gpt2_smoke", "mine.yml"} < set(completion.complete_sides(""))
    assert completion.complete_runs("nowhere/") == completion.complete_runs("runs/cache/") == []


def test_keys_are_those_that_can_be_set() -> None:
    found = completion.complete_keys("")
    assert {
        "training.learning_rate",
        "training.max_grad_norm",
        "fsdp.version",
        "model.from_config",
        "output_dir",
    } <= set(found)
    assert not {"training", "fsdp", "data.train.path", "training.deepspeed"} & set(found)
    assert found == sorted(set(found))


def test_only_key_that_fits_is_followed_by_its_values() -> None:
    assert completion.complete_overrides("data.packin") == ["data.packing", "data.packing_strategy"]
    assert completion.complete_overrides("data.streami") == [
        "data.streaming=",
        "data.streaming=true",
        "data.streaming=false",
    ]
    assert completion.complete_overrides("training.weight_dec")[0] == "training.weight_decay="
    assert (
        completion.complete_overrides("no.such.key") == completion.complete_overrides("no.such.key=t") == []
    )
    assert completion.complete_overrides("fsdp.version=") == ["fsdp.version=2"]


def test_values_that_are_offered_are_taken() -> None:
    offered = [completion.complete_overrides(f"{key}=") for key in completion.complete_keys("")]
    for pairs in zip_longest(*offered):  # every key at once, with its first value, its second, …
        assert refused([pair for pair in pairs if pair is not None]) == []
    assert refused(["data.packing=perhaps", "data.shuffle=true", "a.b=1"]) == ["data.packing", "a"]


def refused(overrides: list[str]) -> list[str | None]:
    try:
        load_recipe("gpt2_smoke", overrides)
    except FsdpTuneError as error:
        return [
            problem.where.key for problem in error.problems if problem.code in ("wrong-value", "unknown-key")
        ]
    return []
