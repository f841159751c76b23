"""`validate` names the tensor of a base that no rule reads, and counts the fates of the others, from headers
alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Cli
from tests.merge.published import LAYOUTS
from tests.model.shards import INDEX, SHARDS, save_two_shards


def write_recipe(tmp_path: Path, base: Path) -> Path:
    with open(tmp_path / "rows.jsonl", "w", encoding="utf-8") as rows:
        rows.write(json.dumps({"input_ids": [3, 4, 5], "labels": [3, 4, 5]}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    data = {"train": [{"path": str(tmp_path / "rows.jsonl")}], "max_length": 32}
    launch = {"device": "cpu", "num_processes": 2}
    document = {
        "model": {"name_or_path": str(base), "tokenizer": "builtin:arithmetic"},
        "data": data,
        "launch": launch,
    }
    recipe.write_text(
        yaml.safe_dump(document | {"output_dir": str(tmp_path / "run"), "training": {"max_steps": 1}})
    )
    return recipe


@pytest.mark.parametrize("keeps_config", [True, False])
def test_validate_counts_decoded_tensors_or_refuses_them_by_name(
    cli: Cli, tmp_path: Path, keeps_config: bool
) -> None:
    base = LAYOUTS["qwen3 fp8"](tmp_path / "base").folder
    if not keeps_config:
        config = json.loads((base / "config.json").read_text())
        del config["quantization_config"]
        (base / "config.json").write_text(json.dumps(config))
    file = base / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(2, 2)}, file)
    recipe = write_recipe(tmp_path, base)
    done = cli("validate", "--config", str(recipe), "--json")
    answer = json.loads(done.stdout)
    if keeps_config:
        assert done.returncode == 0, done.stderr
        assert answer["model"]["tensors"]["counts"] == {"trained": 11, "decoded": 28, "carried": 1}
        return
    assert done.returncode == 2
    (error,) = answer["errors"]
    assert error["code"] == "model-quantised"
    assert "_proj.weight` is of the type F8_E4M3" in error["message"]
    assert error["file"] == str(file)


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, {"lora": {"r": 2}, "quantization": {}}], ids=["full", "qlora"])
@pytest.mark.parametrize("smooth", [False, True])
def test_validate_reads_the_settings_of_modelopt_from_their_own_file(
    cli: Cli, tmp_path: Path, sections: dict[str, object], smooth: bool
) -> None:
    base = LAYOUTS["qwen3_moe nvfp4 (hf_quant_config.json)"](tmp_path / "base").folder
    if smooth:
        file = base / "model.safetensors"
        save_file(load_file(file) | {"model.layers.0.self_attn.q_proj.pre_quant_scale": torch.ones(64)}, file)
    recipe = write_recipe(tmp_path, base)
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | sections))
    done = cli("validate", "--config", str(recipe), "--json")
    answer = json.loads(done.stdout)
    if not smooth and not sections:
        assert done.returncode == 0, done.stderr
        assert answer["model"]["tensors"]["counts"] == {"trained": 13, "decoded": 128}
        return
    assert done.returncode == 2
    messages = " ".join(error["message"] for error in answer["errors"])
    assert ("q_proj.pre_quant_scale` changes what a quantised layer computes" in messages) == smooth
    assert ("are quantised (modelopt)" in messages) == bool(sections)


def test_base_with_weights_under_names_that_no_rule_knows_is_refused_and_nothing_is_written(
    cli: Cli, tmp_path: Path
) -> None:
    """HQQ's names without settings: transformers would draw the weight at random, with a warning."""
    base = LAYOUTS["llama"](tmp_path / "base").folder
    file = base / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj"
    codes = tensors.pop(f"{name}.weight").to(torch.uint8)
    save_file(tensors | {f"{name}.W_q": codes.short(), f"{name}.meta": torch.ones(4)}, file)
    recipe = write_recipe(tmp_path, base)
    for command in ("validate", "train"):
        done = cli(command, "--config", str(recipe), "--json")
        assert done.returncode == 2, done.stderr
        (error,) = (
            each for each in json.loads(done.stdout)["errors"] if each["code"] == "model-weights-missing"
        )
        assert f"`{name}.weight`" in error["message"]
        assert error["hint"]
    assert not (tmp_path / "run").exists()


def test_tensor_that_two_files_hold_is_refused_with_both_files_and_a_hint(cli: Cli, tmp_path: Path) -> None:
    base = save_two_shards(tmp_path / "base")
    name = next(iter(load_file(base / SHARDS[0])))
    save_file({**load_file(base / SHARDS[1]), name: load_file(base / SHARDS[0])[name] + 1}, base / SHARDS[1])
    done = cli("validate", "--config", str(write_recipe(tmp_path, base)), "--json")
    assert done.returncode == 2
    (error,) = (each for each in json.loads(done.stdout)["errors"] if each["code"] == "model-weights-twice")
    assert error["file"] == str(base / INDEX)
    assert all(f"`{each}`" in error["message"] for each in (name, *SHARDS))
    assert error["hint"]
