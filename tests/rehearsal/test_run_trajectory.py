"""The recipe of a run, trained by the plain loop on the rows of that run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_tune.data.store import RowStore
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.rehearsal.parity import run_trajectory
from fsdp_tune.rehearsal.parity.plain_loop import evaluate
from fsdp_tune.run.directory import RunDir
from tests.data.support import prepared, write_jsonl
from tests.launch.recipes import BASE, resolved

SMALL = BASE.replace(
    "{model_type: llama, hidden_size: 64}",
    "{model_type: llama, vocab_size: 264, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 2}",
)
TRAINING = (
    "training={max_steps: 3, learning_rate: 0.01, warmup_steps: 1, weight_decay: 0.05, adam_beta1: 0.8, "
    "adam_beta2: 0.9, adam_epsilon: 1.0e-6, max_grad_norm: 0.5, seed: 7}"
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    recipe = resolved(tmp_path, TRAINING, text=SMALL)
    made.recipe_json.write_text(recipe.model_dump_json(by_alias=True))
    rows = [{"text": "abc"}, {"text": "defghi"}, {"text": "jk"}, {"text": "lmnop"}]
    train = prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows)).train
    made.data_json.write_text(json.dumps({"train": train, "evals": {"held out": train}}))
    return made


def test_loop_has_the_settings_of_the_recipe(tmp_path: Path) -> None:
    recipe = resolved(
        tmp_path, TRAINING, "data.packing=true", "quantization={train: int4, group_size: 16}", text=SMALL
    )
    found = run_trajectory.settings_of(recipe, torch.bfloat16, frozenset({2}))
    assert (found.steps, found.global_batch_size, found.learning_rate, found.warmup_steps) == (3, 2, 0.01, 1)
    assert (found.weight_decay, found.betas, found.epsilon) == (0.05, (0.8, 0.9), 1e-6)
    assert (found.max_grad_norm, found.seed, found.packed) == (0.5, 7, True)
    assert (found.quantised, found.compute_dtype, found.skipped) == (("int4", 16), torch.bfloat16, {2})
    plain = run_trajectory.settings_of(resolved(tmp_path, text=SMALL), torch.float32, frozenset())
    assert (plain.quantised, plain.packed, plain.dft) == (None, False, False)


def test_trajectory_starts_from_the_weights_of_the_run(run: RunDir) -> None:
    found = run_trajectory.trajectory(run, torch.float32, frozenset())
    assert [len(found[key]) for key in ("loss", "grad_norm", "supervised_tokens")] == [3, 3, 3]
    assert found["loss"][2] < found["loss"][0]
    skipped = run_trajectory.trajectory(run, torch.float32, frozenset({1, 2, 3}))
    assert skipped["loss"][0] == found["loss"][0]
    recipe = run_trajectory.Recipe.model_validate_json(run.recipe_json.read_bytes())
    store = RowStore(json.loads(run.data_json.read_text())["train"])
    untrained = evaluate(build_full(recipe), torch.float32, [store])
    assert skipped["eval_loss"] == pytest.approx(untrained, rel=1e-6)
    assert found["eval_loss"] < untrained


def test_run_without_evaluations_has_no_eval_loss(run: RunDir) -> None:
    run.data_json.write_text(json.dumps(json.loads(run.data_json.read_text()) | {"evals": {}}))
    assert run_trajectory.trajectory(run, torch.float32, frozenset())["eval_loss"] is None


def test_script_prints_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def trajectory(*given: object) -> dict[str, object]:
        print("a library prints this")
        calls.append(given)
        return {"loss": [1.0]}

    monkeypatch.setattr(run_trajectory, "trajectory", trajectory)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    text = json.dumps({"run": str(tmp_path), "compute_dtype": "bf16", "skipped": [3, 1]})
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    run_trajectory.main()
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == ({"loss": [1.0]}, "a library prints this\n")
    assert calls == [1, (RunDir(tmp_path), torch.bfloat16, frozenset({1, 3}))]
