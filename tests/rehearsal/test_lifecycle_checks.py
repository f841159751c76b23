"""`rehearse` as users run it, and its message for each kind of faulty run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs import inspection
from fsdp_tune.jobs.validate import rehearse
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.rehearsal import lifecycle_checks
from fsdp_tune.rehearsal.lifecycle_checks import Rehearsal
from tests.cli.conftest import cli, document  # noqa: F401  a fixture

CHECKS = [
    "train",
    "kill a rank",
    "resume",
    "same curve as uninterrupted",
    "same model as uninterrupted",
    "merge-checkpoint",
    "reload with transformers",
]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """A complete rehearsal of the embedded recipe; several tests inspect its files."""
    from fsdp_tune.core.devices import Machine
    from fsdp_tune.recipe.resolve import resolve
    from fsdp_tune.rehearsal.scale_down import scale_down_recipe
    from fsdp_tune.rehearsal.scaled_data import ReadableInputs

    folder = tmp_path_factory.mktemp("rehearsal")
    recipe = resolve(load_recipe("gpt2_smoke").recipe, Machine(None, 0, 2, None), cwd=folder).recipe
    config = recipe.model.from_config
    assert isinstance(config, dict)
    small = scale_down_recipe(
        recipe, config, folder, ranks=2, device="cpu", steps=24, inputs=ReadableInputs()
    )
    rehearsal = Rehearsal(small.write(folder), folder, ranks=2, steps=24)
    checks = list(rehearsal.checks())
    assert [(check.name, check.passed) for check in checks] == [(name, True) for name in CHECKS], checks
    return rehearsal


@pytest.fixture
def copy_of(rehearsed: Rehearsal, tmp_path: Path) -> Rehearsal:
    shutil.copytree(rehearsed.folder, tmp_path / "copy")
    return Rehearsal(rehearsed.recipe, tmp_path / "copy", rehearsed.ranks, rehearsed.steps)


def failure(check: Callable[[], str]) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        check()
    assert type(caught.value).__name__ == "_Failed"
    return str(caught.value)


def edit_line(rehearsal: Rehearsal, step: int, **changes: Any) -> None:
    path = rehearsal.killed.metrics_jsonl
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line | changes if line.get("step") == step and "loss" in line else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_loss_difference_fails_the_curve_check(copy_of: Rehearsal) -> None:
    edit_line(copy_of, 17, loss=2.5)
    assert failure(copy_of.compare_curves).startswith("step 17: loss is 2.5 in the resumed run, ")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_changed_merged_tensor_fails_the_logits_check(copy_of: Rehearsal) -> None:
    file = copy_of.killed.merged / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.ln_f.weight"][3] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    assert "logits of the merged model differ from those of the checkpoint" in failure(copy_of.reload)
    assert "the merged weights differ" in failure(copy_of.compare_models)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_wrong_eval_loss_fails_the_reload_check(copy_of: Rehearsal) -> None:
    path = copy_of.killed.metrics_jsonl
    path.write_text(path.read_text() + json.dumps({"step": 24, "eval_loss": 2.0}) + "\n")
    assert "instead of the run's 2.000000" in failure(copy_of.reload)


def refusal(monkeypatch: pytest.MonkeyPatch, name: str, *overrides: str) -> set[str]:
    """Return the codes of the errors with which a rehearsal ends before it starts a run."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: F401  two threads would import them at once

    # without the imports of a child
    monkeypatch.setattr(inspection, "_inspect_in_child", lambda recipe, **_: find_facts(recipe))
    monkeypatch.setattr(lifecycle_checks, "start_training", lambda *_: pytest.fail("a run is started"))
    with pytest.raises(FsdpTuneError) as caught:
        rehearse(load_recipe(name, overrides))
    assert caught.value.exit_code == 2
    return {problem.code for problem in caught.value.problems}


def test_recipe_error_is_reported_before_any_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": 3}\n')
    rows = f"data.train=[{{path: {tmp_path}/rows.jsonl}}]"
    assert refusal(monkeypatch, "gpt2_smoke", rows, "data.eval=null") == {"bad-row", "bad-rows"}


def test_unreachable_unpackaged_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, "llama7b_full_shard", "model.name_or_path=nobody/nothing") == {
        "model-unreachable"
    }


@pytest.mark.cold
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("recipe", "parity"),
    [
        ("gpt2_smoke", False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("gpt2_smoke", True), ("llama7b_full_shard", False), ("llama7b_full_shard", True))
        ),
    ],
)
def test_rehearsal_passes(recipe: str, parity: bool, cli) -> None:  # noqa: F811
    done = cli("rehearse", "--config", recipe, "--json", *(["--parity"] if parity else []))
    assert done.returncode == 0, done.stderr
    found = document(done)
    assert found["passed"]
    assert len(found["checks"]) >= 7
    assert found["folder"] is None


def test_interrupted_rehearsal_ends_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = children.start((sys.executable, "-c", "import time; time.sleep(60)"), os.environ)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle_checks, "start_training", lambda *_: training)
    monkeypatch.setattr(Rehearsal, "_wait_for_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Rehearsal(tmp_path / "recipe.yaml", tmp_path, ranks=2, steps=4).kill_a_rank()
    assert training.returncode == -signal.SIGKILL


def test_run_that_outlives_its_killed_rank_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = (sys.executable, "-ISc", "import time; time.sleep(60)")
    training, rank = children.start(sleeps, os.environ), children.start(sleeps, os.environ)
    monkeypatch.setattr(lifecycle_checks, "start_training", lambda *_: training)
    monkeypatch.setattr(lifecycle_checks, "CHILD_SECONDS", 0.1)
    monkeypatch.setattr(Rehearsal, "_wait_for_checkpoint", lambda *_: rank.pid)
    with pytest.raises(lifecycle_checks._Failed, match=r"did not end as one that has lost a rank: .* took"):
        Rehearsal(tmp_path / "recipe.yaml", tmp_path, ranks=2, steps=4).kill_a_rank()
    assert rank.wait(20) == -signal.SIGKILL


def test_run_without_a_checkpoint_in_time_is_said_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = children.start((sys.executable, "-ISc", "import time; time.sleep(60)"), os.environ)
    monkeypatch.setattr(lifecycle_checks, "start_training", lambda *_: training)
    monkeypatch.setattr(lifecycle_checks, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(lifecycle_checks, "CHILD_SECONDS", 5.0)
    with pytest.raises(lifecycle_checks._Failed, match="no checkpoint was complete after"):
        Rehearsal(tmp_path / "recipe.yaml", tmp_path, ranks=2, steps=4).kill_a_rank()
    assert training.returncode == -signal.SIGKILL


def test_killed_rehearsal_ends_its_children(tmp_path: Path) -> None:
    """The child writes its pid and sleeps; the kernel kills it when its parent is killed."""
    child = (
        f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
        "time.sleep(60)"
    )
    parent = (
        "import sys; from fsdp_tune.rehearsal.lifecycle_checks import run_child; run_child((sys.executable, "
        f"'-c', {child!r}))"
    )
    rehearsal = subprocess.Popen([sys.executable, "-c", parent])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert rehearsal.poll() is None
        time.sleep(0.02)
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    rehearsal.kill()
    rehearsal.wait()
    assert psutil.wait_procs([started], timeout=20)[0]
