"""fp8 as users run it: refused before a rank starts, or trained, resumed on another number of ranks and
merged into a plain model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdp_tune.rehearsal.parity.model_directories import checkpoint_tensors
from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import Cli, document

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "vocab_size": 64,
}
RECIPE: dict[str, Any] = {
    "model": {"from_config": MODEL, "tokenizer": "builtin:arithmetic", "resize_embeddings": True},
    "data": {
        "train": [{"path": "builtin:arithmetic", "split": "train", "max_rows": 64}],
        "eval": [{"path": "builtin:arithmetic", "split": "test", "max_rows": 8}],
        "max_length": 64,
    },
    "precision": {"mixed_precision": "fp8", "fp8_recipe": "tensorwise"},
    "training": {
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "report_to": [],
    },
    "merge": {"dtype": "fp32"},
    "launch": {"device": "cpu", "num_processes": 2},
    "output_dir": "run",
}


@pytest.mark.slow
def test_model_without_linears_is_refused_by_validate(cli: Cli) -> None:
    done = cli("validate", "gpt2_smoke", "--set", "precision.mixed_precision=fp8", "--json")
    assert (done.returncode, [error["code"] for error in document(done)["errors"]]) == (
        2,
        ["fp8-nothing-to-convert"],
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_fp8_run_saves_a_model_without_fp8_state(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "fp8.yaml").write_text(json.dumps(RECIPE))
    done = cli("train", "--config", "fp8.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert "fp8-emulated" in [notice["code"] for notice in document(done)["notices"]]
    assert "kernels: mixed_precision fp8, " in done.stderr
    run = RunDir(tmp_path / "run")
    assert json.loads(run.readback_json.read_text())["fp8"]["gathered"] == 14
    assert json.loads(run.recipe_json.read_text())["data"]["pad_to_multiple_of"] == 16
    merged, saved = load_file(run.merged / "model.safetensors"), checkpoint_tensors(run.checkpoint(4))
    assert merged.keys() == saved.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in saved.items())
    resumed = cli(
        "train",
        "--config",
        "fp8.yaml",
        "--resume",
        "auto",
        "--json",
        "--set",
        "launch.num_processes=1",
        "--set",
        "training.max_steps=6",
    )
    assert resumed.returncode == 0, resumed.stderr
    assert document(resumed)["steps"] == 6
