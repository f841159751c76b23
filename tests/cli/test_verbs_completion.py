"""Shell completion, by the protocol of Typer's scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_tune.cli import verbs
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.read.loader import load_recipe
from tests.pages.written import written
from tests.structure.test_surface import HEAVY


def bash(folder: Path, *words: str) -> list[str]:
    """What bash is answered about the last word; it splits words at `=`. Fails if a library that computes is imported."""
    heavy = folder / "heavy.json"
    program = (
        "import json, sys\nfrom fsdp_tune.cli.app import main\nsys.argv = ['fsdp-tune']\n"
        f"try: main()\nfinally: json.dump([each for each in {HEAVY!r} if each in sys.modules], open({str(heavy)!r}, 'w'))"
    )
    shell = {"_FSDP_TUNE_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(["fsdp-tune", *words]), "COMP_CWORD": str(len(words))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=os.environ | shell, timeout=60)
    assert (done.returncode, done.stderr, json.loads(heavy.read_text())) == (0, "", [])
    return done.stdout.split()


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


def test_bash_completes_recipes_gpus_and_runs(folder: Path) -> None:
    assert bash(folder, "train", "--config", "gpt2_") == ["gpt2_smoke", "gpt2_xl_two_24gb"]
    assert bash(folder, "plan", "gpt2_smoke", "--gpu", "H100-S") == ["H100-SXM"]
    assert bash(folder, "status", "") == ["own", "runs/one", "runs/two"]
    assert bash(folder, "report", "own", "runs/") == ["runs/one", "runs/two"]


def test_bash_completes_values_in_its_own_words(folder: Path) -> None:
    assert bash(folder, "train", "--set", "fsdp.sharding_strategy", "=", "HYBRID_SHARD_") == ["HYBRID_SHARD_ZERO2"]
    assert bash(folder, "train", "--set", "data.packing", "=") == ["true", "false"]
    assert bash(folder, "train", "--set", "a.b", "=", "c", "x", "--set", "training.lr_scheduler_type", "=", "cosine_warm") == [
        "cosine_warmup_with_min_lr"
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_the_word_as_a_whole(tmp_path: Path, shell: str) -> None:
    environment = {"_FSDP_TUNE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "fsdp-tune train --set data.packing=t"}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    program = "import sys; sys.argv = ['fsdp-tune']; from fsdp_tune.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | environment
    )
    assert "data.packing=true" in done.stdout
    assert done.stderr == ""


def test_recipes_are_names_of_the_catalogue_and_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert verbs.complete_recipes("mine") == ["mine.yml"]
    assert verbs.complete_recipes("rec") == ["recipes/mine.yaml"]
    assert verbs.complete_recipes("recipes/") == ["recipes/mine.yaml"]
    assert {"gpt2_smoke", "mine.yml"} < set(verbs.complete_sides(""))
    assert verbs.complete_runs("nowhere/") == verbs.complete_runs("runs/cache/") == []


def test_keys_are_those_that_can_be_set() -> None:
    found = verbs.complete_keys("")
    assert {"training.learning_rate", "training.max_grad_norm", "fsdp.version", "model.from_config", "output_dir"} <= set(found)
    assert not {"training", "fsdp", "data.train.path", "training.deepspeed"} & set(found)
    assert found == sorted(set(found))


def test_only_key_that_fits_is_followed_by_its_values() -> None:
    assert verbs.complete_overrides("data.packin") == ["data.packing", "data.packing_strategy"]
    assert verbs.complete_overrides("data.streami") == ["data.streaming=", "data.streaming=true", "data.streaming=false"]
    assert verbs.complete_overrides("training.weight_dec")[0] == "training.weight_decay="
    assert verbs.complete_overrides("no.such.key") == verbs.complete_overrides("no.such.key=t") == []
    assert verbs.complete_overrides("fsdp.version=") == ["fsdp.version=2"]


def test_values_that_are_offered_are_taken() -> None:
    refused: list[str] = []
    for key in verbs.complete_keys(""):
        for pair in verbs.complete_overrides(f"{key}="):
            try:
                load_recipe("gpt2_smoke", [pair])
            except FsdpTuneError as error:
                refused += [f"{pair}: {problem.message}" for problem in error.problems if problem.code in ("wrong-value", "unknown-key")]
    assert refused == []
