"""Quantisation-aware training as users run it: refused before a rank starts, or trained, resumed, merged, and
converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_tune.model.kernels.fake_quantised import base_config, plan_quantised, prepare_quantised
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.rehearsal.parity.model_directories import checkpoint_tensors
from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import Cli, document
from tests.cli.test_train_fp8 import RECIPE as FP8

RECIPE: dict[str, Any] = {
    **{key: value for key, value in FP8.items() if key != "precision"},
    "precision": {"mixed_precision": "bf16"},
    "quantization": {
        "train": "int4",
        "group_size": 32,
        "modules_to_not_convert": ["model.layers.0.mlp.down_proj"],
    },
    "merge": {"dtype": "fp32", "quantise": True},
}
IDS = torch.arange(20)[None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("quantization.train=nvfp4",), "torchao 0.18 does not emulate NVFP4"),
        (("quantization.train=fp8-int4",), "torchao 0.18 rounds the gradients"),
        (("quantization.group_size=48",), "does not divide the 64 inputs"),
        (("lora.r=4", "model.name_or_path=builtin:none"), "with `lora:` is not supported"),
        (("quantization.load=nf4",), "holds frozen ones in 4 bits"),
    ],
)
def test_unsupported_recipe_is_refused_by_validate(
    changes: tuple[str, ...], words: str, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "qat.yaml").write_text(json.dumps(RECIPE))
    done = cli(
        "validate", "--config", "qat.yaml", *(part for each in changes for part in ("--set", each)), "--json"
    )
    assert done.returncode == 2
    assert any(words in error["message"] and error["hint"] for error in document(done)["errors"]), document(
        done
    )["errors"]
    assert not (tmp_path / "run").exists()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("train", ["int4", "int8-int4"])
def test_quantised_model_computes_as_it_was_trained(train: str, cli: Cli, tmp_path: Path) -> None:
    recipe = RECIPE | {"quantization": RECIPE["quantization"] | {"train": train}}
    (tmp_path / "qat.yaml").write_text(json.dumps(recipe))
    done = cli("train", "--config", "qat.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert f"kernels: emulated {train}, " in done.stderr
    run = RunDir(tmp_path / "run")
    merged, saved = load_file(run.merged / "model.safetensors"), checkpoint_tensors(run.checkpoint(4))
    assert all(torch.equal(merged[name], tensor) for name, tensor in saved.items()), (
        "merged/ has the trained weights"
    )
    folder = tmp_path / "run" / "merged-quantised"
    record = json.loads((folder / "merge.json").read_text())
    assert (record["layers"], record["left"], record["difference"]) == (
        13,
        ["model.layers.0.mlp.down_proj", "lm_head"],
        0.0,
    )
    trained: Any = AutoModelForCausalLM.from_pretrained(run.merged, dtype=torch.bfloat16)
    resolved = Recipe.model_validate_json(run.recipe_json.read_bytes())
    prepare_quantised(resolved, trained)
    quantised: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert torch.equal(quantised(IDS).logits, trained(IDS).logits)
    alone: Any = AutoModelForCausalLM.from_pretrained(run.merged, dtype=torch.bfloat16)
    plan = plan_quantised(resolved, alone)
    quantize_(alone, base_config(resolved), filter_fn=lambda _, name: name in plan.quantised)
    assert torch.equal(quantised(IDS).logits, alone(IDS).logits), "torchao's own conversion"
    assert (
        AutoTokenizer.from_pretrained(folder).get_vocab()
        == AutoTokenizer.from_pretrained(run.merged).get_vocab()
    )
    assert "`model.layers.0.mlp.down_proj`" in (folder / "README.md").read_text()
    again = cli("merge-checkpoint", "run", "--quantise", "--json")
    assert [error["code"] for error in document(again)["errors"]] == ["merge-output-exists"]
    replaced = cli("merge-checkpoint", "run", "--quantise", "--overwrite", "--dtype", "bf16", "--json")
    assert document(replaced)["quantised"]["difference"] == 0.0, replaced.stderr
    changes = ("--set", "launch.num_processes=1", "--set", "training.max_steps=6")
    resumed = cli("train", "--config", "qat.yaml", "--resume", "auto", "--json", *changes)
    assert resumed.returncode == 0, resumed.stderr
    assert document(resumed)["steps"] == 6
