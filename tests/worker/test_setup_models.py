"""Models that differ from Llama in what the read-back and the units must allow for, on live ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import on_devices
from tests.model.families import FAMILIES
from tests.model.flash import FLASH_STAND_IN, flash_stand_in
from tests.model.test_fsdp_units import BERT
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.parity.compare import deviation
from tests.parity.store import VOCABULARY
from tests.worker.short_runs import COMPARED, trained

_LLAMA = {key: value for key, value in FAMILIES["llama"].items() if key != "model_type"}
ERNIE = {**_LLAMA, "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 0}
JAMBA = {
    **_LLAMA,
    "model_type": "jamba",
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 4,
}


BART = {
    "model_type": "bart",
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Its decoder has attention to an encoder, which gets no gradient without one."""


def run_of(bench: Bench, model: dict[str, Any], rows: int = 4, ranks: int = 1, **fsdp: Any) -> tuple[RunDir, list[dict[str, Any]]]:
    """Two steps with `rows` in a micro-batch, and every rank's outcome."""
    changes = {
        "model": {"from_config": model},
        "training": {"max_steps": 2, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 4 // rows, "eval_strategy": "no"},
        "data": {"eval": None},
        "fsdp": fsdp,
        "launch": {"num_processes": ranks},
    }
    run = bench.written_run(changes)
    return run, bench.on_ranks.run(ranks, runs.run_worker, str(run.path))


def finished(
    bench: Bench, model: dict[str, Any], rows: int = 4, ranks: int = 1, **fsdp: Any
) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """The read-back, and loss and gradient norm of each step."""
    run, outcomes = run_of(bench, model, rows, ranks, **fsdp)
    assert [outcome["exit_reason"] for outcome in outcomes] == ["finished"] * ranks, outcomes[0]["traceback"]
    return json.loads(run.readback_json.read_text()), [(line["loss"], line["grad_norm"]) for line in runs.loss_lines(run)]


@on_devices
@pytest.mark.ranks
def test_layers_of_several_classes_are_all_recomputed(bench: Bench) -> None:
    document, _ = finished(bench, JAMBA, activation_checkpointing="full")
    assert document["recomputed_layers"] == 4


@pytest.mark.slow  # tests/parity/test_matrix.py computes it for each example
@pytest.mark.ranks
def test_balance_loss_does_not_depend_on_wrapping(bench: Bench) -> None:
    model = FAMILIES["mixtral"] | {"output_router_logits": True}
    by_size, as_one = (finished(bench, model, ranks=2, auto_wrap_policy=policy)[1] for policy in ("SIZE_BASED_WRAP", "NO_WRAP"))
    assert by_size == [pytest.approx(step, rel=1e-5) for step in as_one]


@on_devices
@pytest.mark.ranks
def test_parameter_that_the_model_freezes_stays_frozen_and_is_listed(bench: Bench) -> None:
    document, _ = finished(bench, ERNIE)
    assert document["frozen_by_its_code"] == [f"model.layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias" for layer in (0, 1)]


@on_devices
@pytest.mark.ranks
def test_model_with_parameters_that_never_get_a_gradient_resumes(bench: Bench) -> None:
    run, _ = run_of(bench, BART, ranks=2)
    recipe = json.loads(run.recipe_json.read_text())
    recipe["training"]["max_steps"] = 3
    run.recipe_json.write_text(json.dumps(recipe))
    (run.path / "resume.json").write_text(json.dumps({"resume_from": str(run.checkpoint(2))}))
    runs.train(bench.on_ranks, run, 2)
    assert [line["step"] for line in runs.loss_lines(run)] == [1, 2, 3]


@pytest.mark.ranks
def test_loss_under_dynamic_rope_does_not_depend_on_the_micro_batch(bench: Bench) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = FAMILIES["llama"] | {"max_position_embeddings": 16, "rope_parameters": rope}
    together, apart = (finished(bench, model, rows)[1] for rows in (4, 1))
    assert together == [pytest.approx(step, rel=1e-5) for step in apart]


@on_devices
@pytest.mark.ranks
def test_tied_parameters_across_units_train_as_unsharded(bench: Bench) -> None:
    model = BERT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sharded, whole = (finished(bench, model, ranks=2, sharding_strategy=strategy)[1] for strategy in ("FULL_SHARD", "NO_SHARD"))
    assert sharded == [pytest.approx(step, rel=1e-5) for step in whole]


@on_devices
@pytest.mark.ranks
def test_noncausal_model_is_refused_before_first_step(bench: Bench) -> None:
    run, outcomes = run_of(bench, BERT | {"is_decoder": False})
    assert {outcome["exit_reason"] for outcome in outcomes} == {"failed"}
    assert outcomes[0]["problem"]["code"] == "model-not-causal"
    assert outcomes[0]["problem"]["message"].startswith("BertLMHeadModel sees later tokens")
    assert outcomes[0]["problem"]["hint"].startswith("--set model.config_overrides.is_decoder=true")
    assert runs.loss_lines(run) == []


def run_with_hub_kernel(path: str) -> dict[str, Any]:
    with flash_stand_in(in_place_of="flash_attention_2"):
        return runs.run_worker(path)


@pytest.mark.ranks
def test_hub_kernel_in_place_of_flash_attention_keeps_packed_examples_apart(bench: Bench) -> None:
    changes = runs.merged(COMPARED, {"model": {"attn_implementation": "flash_attention_2"}})
    run = trained(bench, Case(packed=True, ranks=1), changes, run_with_hub_kernel)
    document = json.loads(run.readback_json.read_text())
    assert document["attention"] == FLASH_STAND_IN
    assert "instead of flash_attention_2" in document["kernels"]["model.attn_implementation"]["reason"]
    assert document["packing_deviation"] <= 1e-5
    found = deviation(run, bench.reference("llama", packed=True, steps=6))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


def adapted(bench: Bench, model: dict[str, Any]) -> tuple[RunDir, list[dict[str, Any]]]:
    """Two steps with adapters on every linear layer of a model, and every rank's outcome."""
    base = bench.new_folder()
    config = AutoConfig.for_model(**model)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    changes = {"max_steps": 2, "per_device_train_batch_size": 4, "eval_strategy": "no", "warmup_steps": 0}
    sections = {"model": {"name_or_path": str(base)}, "lora": {"r": 2}, "training": changes, "data": {"eval": None}}
    run = bench.written_run({**sections, "launch": {"num_processes": 1}})
    return run, bench.on_ranks.run(1, runs.run_worker, str(run.path))


@pytest.mark.ranks
def test_adapters_of_modules_that_the_model_never_calls_stop_the_run(bench: Bench) -> None:
    """Jamba multiplies by the weight of `dt_proj` and does not call it; PEFT's layer would not be run."""
    _, outcomes = adapted(bench, JAMBA)
    assert [outcome["exit_code"] for outcome in outcomes] == [2]
    problem = outcomes[0]["problem"]
    assert (problem["code"], "`dt_proj`" in problem["message"]) == ("lora-target", True)
    assert "in_proj" in problem["hint"]
    assert "dt_proj" not in problem["hint"]


@pytest.mark.ranks
def test_adapters_without_gradient_in_some_layers_are_a_warning(bench: Bench) -> None:
    run, outcomes = adapted(bench, BART)
    assert [outcome["exit_reason"] for outcome in outcomes] == ["finished"], outcomes[0]["traceback"]
    (warning,) = json.loads(run.readback_json.read_text())["warnings"]
    counts = ", ".join(f"2 of 4 {name}" for name in ("k_proj", "v_proj", "q_proj", "out_proj"))
    assert f"without a gradient in the first step: {counts}, such as that of `model.decoder.layers.0.encoder_attn.k_proj`" in warning


@pytest.mark.ranks
def test_trained_parameters_without_gradient_are_a_warning(bench: Bench) -> None:
    """A decoder alone calls no attention to an encoder."""
    run, outcomes = run_of(bench, BART)
    assert [outcome["exit_reason"] for outcome in outcomes] == ["finished"] * len(outcomes), outcomes[0]["traceback"]
    (warning,) = json.loads(run.readback_json.read_text())["warnings"]
    assert "trained parameters have no gradient in the first step, such as `model.decoder.layers.0.encoder_attn.k_proj.weight`" in warning
