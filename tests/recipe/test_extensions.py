"""User extensions: entry points of an installed package, found by name and honoured only where the user
allows them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_tune

ENTRY_POINTS = """\
[fsdp_tune.loaders]
mine-rows = mine_rows:load
mine-broken = mine_rows:fail
[fsdp_tune.callbacks]
mine-callback = mine_training:Recorder
[fsdp_tune.metrics]
nll = mine_training:negative_log_likelihood
"""
ROWS = """
def load(path, options):
    assert path == "spec"
    for number in range(options["rows"]):
        yield {"prompt": f"{number}+1=", "completion": f"{number + 1}"}
    yield from options.get("then", [])

def fail(path, options):
    raise RuntimeError("the server is gone")
"""
TRAINING = """
import os
import torch
from transformers import TrainerCallback

class Recorder(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        with open(f"steps-of-rank-{os.environ['RANK']}", "a") as file:
            print(state.global_step, file=file)

def negative_log_likelihood(logits, targets, mask):
    losses = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets.clamp(min=0), reduction="none")
    return losses[mask].sum(), mask.sum()
"""  # noqa: E501
RECIPE = """\
model: {from_config: {model_type: gpt2, vocab_size: 384, n_positions: 64, n_layer: 1, n_embd: 16, n_head: 2}, tokenizer: builtin:arithmetic}
data:
  train: [{path: spec, loader: mine-rows, loader_options: {rows: 60}}]
  eval: {rows: 10}
  max_length: 32
training: {max_steps: 2, logging_steps: 1, eval_strategy: steps, eval_steps: 2, report_to: []}
extensions:
  callbacks: [mine-callback]
  metrics: [nll]
launch: {num_processes: 2, device: cpu}
merge: {at_end: false}
"""  # noqa: E501
ALLOWED = fsdp_tune.Allowed(extensions=True)


def install(folder: Path, version: str = "1.0") -> Path:
    """Write a package with entry points as an installer leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / "mine_rows.py").write_text(ROWS)
    (folder / "mine_training.py").write_text(TRAINING)
    facts = folder / "mine.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mine\nVersion: {version}\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(install(tmp_path / "packages")))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def problems(
    path: Path, *overrides: str, allowed: fsdp_tune.Allowed = ALLOWED
) -> list[tuple[str, int | None]]:
    with pytest.raises(fsdp_tune.FsdpTuneError) as caught:
        fsdp_tune.prepare(fsdp_tune.load_recipe(path, overrides), allowed=allowed)
    return [(problem.code, problem.where.line) for problem in caught.value.problems]


def test_recipe_alone_runs_no_extension(recipe: Path) -> None:
    refused = problems(recipe, allowed=fsdp_tune.Allowed())
    assert refused == [
        ("extension-not-allowed", 8),
        ("extension-not-allowed", 9),
        ("extension-not-allowed", 3),
    ]
    assert "mine_rows" not in sys.modules


def test_unknown_names_are_errors_that_list_the_installed_ones(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("[nll]", "[bleu]").replace("[mine-callback]", "[yours]"))
    with pytest.raises(fsdp_tune.FsdpTuneError) as caught:
        fsdp_tune.plan(fsdp_tune.load_recipe(recipe), allowed=ALLOWED)
    found = [(problem.code, problem.where.line, problem.hint) for problem in caught.value.problems]
    assert found == [
        ("unknown-extension", 8, "installed: mine-callback"),
        ("unknown-extension", 9, "installed: nll"),
    ]


def test_name_of_two_distributions_is_ambiguous(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = install(recipe.parent / "other")
    facts = (other / "mine.dist-info").rename(other / "other.dist-info")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(other))
    assert {code for code, _ in problems(recipe)} == {"ambiguous-extension"}


def test_loader_rows_are_handled_like_file_rows(recipe: Path) -> None:
    loaded = fsdp_tune.load_recipe(recipe, [f"data.cache_dir={recipe.parent}/cache"])
    done = fsdp_tune.prepare(loaded, show=1, allowed=ALLOWED)
    assert done.data.report.sets["train"].rows == 50
    assert done.rows[0][0].where.startswith("spec (mine-rows):")
    assert fsdp_tune.prepare(loaded, allowed=ALLOWED).data.reused


def test_failures_of_a_loader_name_the_loader_and_the_row(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("{rows: 60}", "{rows: 60, then: [text]}"))
    with pytest.raises(fsdp_tune.FsdpTuneError) as caught:
        fsdp_tune.prepare(fsdp_tune.load_recipe(recipe), allowed=ALLOWED)
    bad = next(problem for problem in caught.value.problems if problem.code == "bad-row")
    assert (bad.where.source, bad.where.line) == ("spec (mine-rows)", 61)
    recipe.write_text(RECIPE.replace("mine-rows", "mine-broken"))
    assert problems(recipe) == [("extension-failed", 3)]
    recipe.write_text(RECIPE.replace("loader: mine-rows", "loader: mine-rows, revision: main"))
    assert problems(recipe) == [("contradiction", 3)]


@pytest.mark.slow
@pytest.mark.ranks
def test_command_trains_with_extensions_and_reports_another_version_on_resume(recipe: Path) -> None:
    folder = recipe.parent
    environment = os.environ | {
        "PYTHONPATH": f"{folder / 'packages'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    }
    command = [sys.executable, "-m", "fsdp_tune", "train", str(recipe), "--set", "output_dir=run", "--json"]
    sources = (
        "data.train=[{path: spec, loader: mine-rows, loader_options: {rows: 60}}, {path: "
        "builtin:arithmetic, max_rows: 60}]"
    )
    command += ["--set", sources, "--set", "training.metric_for_best_model=spec_nll"]
    refused = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    done = subprocess.run(
        [*command, "--allow-extensions"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluation = next(line for line in lines if "eval_loss" in line)
    assert evaluation["eval_nll"] == pytest.approx(evaluation["eval_loss"], rel=1e-5)
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(evaluation["eval_loss"]))
    by_source = [evaluation[f"eval_{source}_loss"] for source in ("spec", "arithmetic")]
    assert min(by_source) < evaluation["eval_loss"] < max(by_source)
    assert evaluation["eval_spec_nll"] == pytest.approx(evaluation["eval_spec_loss"], rel=1e-5)
    state = json.loads((folder / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_metric"] == evaluation["eval_spec_nll"]
    assert [(folder / f"steps-of-rank-{rank}").read_text().split() for rank in (0, 1)] == [["1", "2"]] * 2
    recorded = json.loads((folder / "run" / "environment.json").read_text())["extensions"]
    assert {(each["kind"], each["name"], each["distribution"], each["version"]) for each in recorded} == {
        ("callbacks", "mine-callback", "mine", "1.0"),
        ("metrics", "nll", "mine", "1.0"),
        ("loaders", "mine-rows", "mine", "1.0"),
    }
    install(folder / "packages", "2.0")
    longer = [*command, "--allow-extensions", "--resume", "auto", "--set", "training.max_steps=3"]
    again = subprocess.run(longer, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    changed = [
        notice["message"]
        for notice in json.loads(again.stdout)["notices"]
        if notice["code"] == "extension-changed"
    ]
    assert "the steps so far used `nll` of mine 1.0; from step 2 on `nll` of mine 2.0" in changed
