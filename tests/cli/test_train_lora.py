"""LoRA as users run it: trained, resumed, merged, loaded by PEFT, continued, and refused on another base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fsdp_tune.core.tensors.peft_names import PREFIX
from fsdp_tune.model.adapters.lora import is_of_adapter
from fsdp_tune.model.adapters.nf4 import dequantise, quantise
from fsdp_tune.rehearsal.parity.model_directories import checkpoint_tensors
from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import Cli, document
from tests.cli.small_runs import LORA, losses, make_base

EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40).view(2, 20)).logits


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_adapter_is_trained_merged_and_continued_on_its_base_alone(cli: Cli, tmp_path: Path) -> None:
    base, run = make_base(tmp_path / "base"), RunDir(tmp_path / "run")
    (tmp_path / "lora.yaml").write_text(json.dumps(LORA))
    trained = cli("train", "--config", "lora.yaml", "--json")
    assert trained.returncode == 0, trained.stderr
    assert "lora: adapters on 2 down_proj, 2 gate_proj" in trained.stderr
    assert {name.split(".")[-3] for name in checkpoint_tensors(run.checkpoint(6))} == {"lora_A", "lora_B"}

    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), run.adapter
    )
    merged = AutoModelForCausalLM.from_pretrained(run.merged)
    assert merged.dtype == torch.float32
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(
        logits(merged), logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)), atol=1e-3
    )

    continued = LORA | {"lora": {"adapter": "run"}, "output_dir": "continued"}
    (tmp_path / "continued.yaml").write_text(json.dumps(continued))
    valid = cli("validate", "--config", "continued.yaml")
    assert valid.returncode == 0, valid.stderr

    weights = (base / "model.safetensors").read_bytes()
    make_base(base, seed=1)
    refused = cli(
        "train", "--config", "lora.yaml", "--resume", "auto", "--set", "training.max_steps=8", "--json"
    )
    assert (refused.returncode, [error["code"] for error in document(refused)["errors"]]) == (
        2,
        ["base-changed"],
    )
    refused = cli("merge-checkpoint", "run", "--merged", "--overwrite", "--json")
    assert (refused.returncode, [error["code"] for error in document(refused)["errors"]]) == (
        1,
        ["merge-adapter-base"],
    )

    (base / "model.safetensors").write_bytes(weights)
    resumed = cli(
        "train", "--config", "lora.yaml", "--resume", "auto", "--set", "training.max_steps=8", "--json"
    )
    assert (resumed.returncode, document(resumed)["steps"]) == (0, 8), resumed.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_killed_run_continues_bitwise_and_another_run_continues_its_adapter(cli: Cli, tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    (tmp_path / "lora.yaml").write_text(json.dumps(LORA))
    whole, cut = RunDir(tmp_path / "run"), RunDir(tmp_path / "cut")
    assert cli("train", "--config", "lora.yaml", "--set", "merge.adapter=adapter").returncode == 0
    assert not whole.merged.exists()
    shutil.copytree(
        whole.path, cut.path, ignore=shutil.ignore_patterns("checkpoint-6", "merged", "adapter", "run.lock")
    )
    done = cli(
        "train",
        "--config",
        "lora.yaml",
        "--set",
        "output_dir=cut",
        "--set",
        "merge.adapter=adapter",
        "--resume",
        "auto",
    )
    assert done.returncode == 0, done.stderr
    assert losses(cut.path) == losses(whole.path)
    one, other = (load_file(run.adapter / "adapter_model.safetensors") for run in (cut, whole))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)

    further = cli(
        "train", "--config", "lora.yaml", "--set", "output_dir=further", "--set", "lora.adapter=run/adapter"
    )
    assert further.returncode == 0, further.stderr
    assert losses(tmp_path / "further")[0] < losses(whole.path)[0] - 0.05

    make_base(tmp_path / "base", seed=1)
    refused = cli("validate", "--config", "lora.yaml", "--set", "lora.adapter=run/adapter", "--json")
    assert (refused.returncode, [error["code"] for error in document(refused)["errors"]]) == (
        2,
        ["adapter-does-not-fit"],
    )
    refused = cli("merge-checkpoint", "run/adapter", "--output", "merged", "--json")
    assert (refused.returncode, [error["code"] for error in document(refused)["errors"]]) == (
        1,
        ["merge-adapter-base"],
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_run_is_resumed_without_the_adapter_that_it_was_started_from(cli: Cli, tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    (tmp_path / "lora.yaml").write_text(json.dumps(LORA))
    assert cli("train", "--config", "lora.yaml", "--set", "merge.adapter=adapter").returncode == 0
    further = LORA | {"lora": {"adapter": "run"}, "merge": {"adapter": "adapter"}, "output_dir": "whole"}
    (tmp_path / "further.yaml").write_text(json.dumps(further))
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    done = cli("train", "--config", "further.yaml")
    assert done.returncode == 0, done.stderr
    shutil.copytree(
        whole.path, cut.path, ignore=shutil.ignore_patterns("checkpoint-6", "adapter", "run.lock")
    )
    shutil.rmtree(tmp_path / "run")
    resumed = cli(
        "train", "--config", "further.yaml", "--set", "output_dir=cut", "--resume", "auto", "--json"
    )
    assert (resumed.returncode, document(resumed)["steps"]) == (0, 6), resumed.stderr
    assert losses(cut.path) == losses(whole.path)
    one, other = (load_file(run.adapter / "adapter_model.safetensors") for run in (cut, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert json.loads(cut.recipe_json.read_text())["lora"]["adapter"] == str(tmp_path / "run" / "adapter")
    again = cli("train", "--config", "further.yaml", "--set", "output_dir=cut", "--overwrite", "--json")
    assert (again.returncode, [error["code"] for error in document(again)["errors"]]) == (
        2,
        ["adapter-does-not-fit"],
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_rehearsal_of_a_lora_recipe_passes(cli: Cli, tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    recipe = LORA | {"lora": {"r": 8, "use_dora": True, "layers_to_transform": [1]}}
    (tmp_path / "lora.yaml").write_text(json.dumps(recipe))
    done = cli("rehearse", "--config", "lora.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert document(done)["passed"]
    assert "lora.r: 4" in document(done)["changes"]


@pytest.mark.slow
@pytest.mark.ranks
def test_noisy_embeddings_and_a_faster_b_are_trained(cli: Cli, tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    recipe = LORA | {
        "lora": {"r": 4, "loraplus_lr_ratio": 8},
        "training": LORA["training"] | {"neftune_noise_alpha": 5.0},
    }
    (tmp_path / "noisy.yaml").write_text(json.dumps(recipe))
    (tmp_path / "plain.yaml").write_text(json.dumps(recipe | {"training": LORA["training"]}))
    first = {}
    for name in ("noisy", "plain"):
        done = cli(
            "train", "--config", f"{name}.yaml", "--set", f"output_dir={name}", "--set", "merge.at_end=false"
        )
        assert done.returncode == 0, done.stderr
        first[name] = losses(tmp_path / name)[0]
    assert first["noisy"] != first["plain"]


@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.slow
def test_adapter_over_4_bits_is_merged_into_the_weights_that_it_was_trained_on(
    cli: Cli, tmp_path: Path
) -> None:
    base, run = make_base(tmp_path / "base", hidden=64), RunDir(tmp_path / "run")
    (tmp_path / "qlora.yaml").write_text(json.dumps(LORA | {"quantization": {"load": "nf4"}}))
    trained = cli("train", "--config", "qlora.yaml", "--json")
    assert trained.returncode == 0, trained.stderr
    assert "14 linear layers in 4.5 bits a weight" in trained.stderr
    assert all(".lora_" in name for name in checkpoint_tensors(run.checkpoint(6)))

    in_4_bits, as_stored = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) for _ in range(2))
    names = json.loads(run.base_json.read_text())["nf4_weights"]
    assert len(names) == 14
    for name in names:
        weight = in_4_bits.get_parameter(name)
        weight.data = dequantise(*quantise(weight, torch.float32), torch.float32)
    wanted, other = (
        logits(PeftModel.from_pretrained(model, run.adapter)) for model in (in_4_bits, as_stored)
    )
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(run.merged)), wanted, atol=1e-5, rtol=0
    )
    assert json.loads((run.merged / "merge.json").read_text())["adapter"]["base_weights"] == "trained"

    assert (
        cli(
            "merge-checkpoint", "run", "--merged", "--base-weights", "original", "--output", "original"
        ).returncode
        == 0
    )
    original = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "original"))
    torch.testing.assert_close(original, other, atol=1e-5, rtol=0)
    assert (original - wanted).abs().max() > 0.01, "another model than the one that was trained"
    kept = cli("merge-checkpoint", "run", "--merged", "--dtype", "keep", "--output", "kept")
    assert (kept.returncode, "`--dtype bf16`" in kept.stderr) == (2, True), kept.stderr
    # The adapter's own directory knows too what it was trained on.
    assert cli("merge-checkpoint", "run/adapter", "--dtype", "fp32", "--output", "alone").returncode == 0
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "alone")), wanted, atol=1e-5, rtol=0
    )
    run.base_json.unlink()
    for written in (["--merged", "--output", "lost"], ["--adapter", "--output", "lost"]):
        lost = cli("merge-checkpoint", "run", *written)
        assert (lost.returncode, "does not name the weights that were trained in 4 bits" in lost.stderr) == (
            1,
            True,
        ), lost.stderr
    (run.adapter / "base.json").unlink()
    misplaced = cli("merge-checkpoint", "run/adapter", "--base-weights", "original", "--output", "kept")
    assert (misplaced.returncode, "leave the option out" in misplaced.stderr) == (2, True), misplaced.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_adapters_of_experts_are_trained_merged_and_read_by_peft(cli: Cli, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen3MoeConfig(vocab_size=328, head_dim=8, num_experts=4, num_experts_per_tok=2, **sizes)
    base, run = tmp_path / "base", RunDir(tmp_path / "run")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    recipe = LORA | {"lora": {"r": 4, "alpha": 8, **EXPERTS}}
    (tmp_path / "lora.yaml").write_text(json.dumps(recipe))
    trained = cli("train", "--config", "lora.yaml")
    assert trained.returncode == 0, trained.stderr
    assert "lora: adapters on 2 down_proj, 2 gate_up_proj, 2 q_proj" in trained.stdout
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), run.adapter
    )
    trained_tensors = checkpoint_tensors(run.checkpoint(6))
    live = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in adapted.named_parameters()
        if is_of_adapter(name)
    }
    assert live.keys() == trained_tensors.keys()
    assert all(torch.equal(tensor, trained_tensors[name]) for name, tensor in live.items())
    assert all(bool(tensor.any()) for name, tensor in live.items())
    assert not torch.allclose(
        logits(adapted), logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)), atol=1e-3
    )
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(run.merged)), logits(adapted), rtol=1e-5, atol=1e-5
    )
    continued = cli(
        "train", "--config", "lora.yaml", "--set", "output_dir=further", "--set", "lora.adapter=run/adapter"
    )
    assert continued.returncode == 0, continued.stderr
    assert losses(tmp_path / "further")[0] < losses(run.path)[0]
