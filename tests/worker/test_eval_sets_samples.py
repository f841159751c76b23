"""Samples of the model in training: the texts that the trained weights give, and a training that does not
notice them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.model.generate import generate
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.rehearsal.parity.model_directories import checkpoint_tensors
from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import on_devices
from tests.model.families import FAMILIES
from tests.parity import runs
from tests.parity.bench import Bench

GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
"""With its dropout of 0.1."""
LLAMA = FAMILIES["llama"] | {"vocab_size": 384}
MIXTRAL = FAMILIES["mixtral"] | {"vocab_size": 384, "output_router_logits": True}
HYBRID = {
    "fsdp": {"sharding_strategy": "HYBRID_SHARD"},
    "parallelism": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "launch": {"num_processes": 4},
}
CHAT = [{"role": "user", "content": "one plus"}]
SAMPLE = {"every": 2, "prompts": ["one plus two is", "two", CHAT], "max_new_tokens": 6}


def run_of(bench: Bench, model: dict[str, Any], sample: dict[str, Any] | None, **sections: Any) -> RunDir:
    """Three steps on two ranks, or on those of `sections`."""
    ranks = sections.get("launch", {}).get("num_processes", 2)
    data_ranks = ranks // sections.get("parallelism", {}).get("sp_size", 1)
    training = {
        "max_steps": 3,
        "per_device_train_batch_size": 4 // data_ranks,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "no",
    }
    changes = {
        "model": {"from_config": model},
        "training": training | {"sample": sample},
        "data": {"eval": None},
    }
    run = bench.written_run(changes | {"launch": {"num_processes": ranks}} | sections, vocabulary=384)
    runs.train(bench.on_ranks, run, ranks)
    return run


@on_devices
@pytest.mark.slow
@pytest.mark.ranks
def test_adapters_with_dropout_continue_bitwise(bench: Bench) -> None:
    base = str(bench.model("llama", 384))
    training = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "no",
    }
    sections = {
        "model": {"name_or_path": base},
        "lora": {"r": 4, "lora_dropout": 0.1, "init_lora_weights": False},
        "data": {"eval": None},
    }
    found: list[list[float]] = []
    for sample in (None, SAMPLE):
        recipe = {**sections, "training": training | {"sample": sample}, "launch": {"num_processes": 2}}
        run = bench.written_run(recipe, vocabulary=384)
        runs.train(bench.on_ranks, run, 2)
        found.append([line["loss"] for line in runs.loss_lines(run)])
    assert found[0] == found[1]
    assert len(samples(run)) == 2


def samples(run: RunDir) -> list[tuple[int, list[str]]]:
    return [
        (line["step"], [each["text"] for each in line["samples"]])
        for line in runs.lines(run)
        if line.get("event") == "samples"
    ]


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "sections"),
    [
        (GPT2, {}),
        pytest.param(GPT2, {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}, marks=pytest.mark.slow),
        pytest.param(
            GPT2,
            {"fsdp": {"sharding_strategy": "NO_SHARD"}, "precision": {"mixed_precision": "bf16"}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LLAMA, {"fsdp": {"version": 1, "activation_checkpointing": "full"}}, marks=pytest.mark.slow
        ),
        pytest.param(MIXTRAL, {"kernels": {"loss": "chunked"}}, marks=pytest.mark.slow),
        pytest.param(LLAMA, {"parallelism": {"sp_size": 2}}, marks=pytest.mark.slow),
        pytest.param(GPT2, HYBRID, marks=pytest.mark.slow),
        pytest.param(
            GPT2,
            HYBRID | {"fsdp": {"sharding_strategy": "HYBRID_SHARD_ZERO2", "version": 1}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "full shard",
        "grad op",
        "ddp autocast",
        "fsdp1",
        "experts",
        "shared rows",
        "hybrid",
        "hybrid fsdp1",
    ],
)
def test_training_continues_bitwise_as_without_samples(
    bench: Bench, model: dict[str, Any], sections: dict[str, Any]
) -> None:
    plain, sampled = (run_of(bench, model, sample, **sections) for sample in (None, SAMPLE))
    both = [[(line["loss"], line["grad_norm"]) for line in runs.loss_lines(run)] for run in (plain, sampled)]
    assert both[0] == both[1]
    weights = [checkpoint_tensors(run.checkpoint(3)) for run in (plain, sampled)]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    assert [step for step, _ in samples(sampled)] == [2, 3]
    assert all(len(texts) == 3 for _, texts in samples(sampled))
    if not sections:
        expect_texts_of_the_trained_weights(sampled, model)


def expect_texts_of_the_trained_weights(run: RunDir, config: dict[str, Any]) -> None:
    recipe = Recipe.model_validate_json(run.recipe_json.read_bytes())
    encoder = load_encoder(recipe)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    model.load_state_dict(checkpoint_tensors(run.checkpoint(3)), strict=False)
    assert encoder.chat_template is not None
    chat = encoder.render(CHAT, encoder.chat_template, tools=None, generation_prompt=True)
    prompts = encoder.encode(["one plus two is", "two", chat])
    with torch.no_grad():
        options = {
            "max_new_tokens": 6,
            "end_ids": {encoder.eos_id},
            "pad_id": encoder.pad_id,
            "device": torch.device("cpu"),
        }
        new = [generate(model, [prompt], **options)[0] for prompt in prompts]
    (line,) = [line for line in runs.lines(run) if line.get("event") == "samples" and line["step"] == 3]
    assert [each["prompt"] for each in line["samples"]] == [encoder.decode(prompt) for prompt in prompts]
    assert [each["text"] for each in line["samples"]] == [
        encoder.decode([token for token in ids if token != encoder.eos_id]) for ids in new
    ]


@on_devices
@pytest.mark.slow
@pytest.mark.ranks
def test_compiled_layers_run_uncompiled_while_sampling(bench: Bench) -> None:
    changes = {
        "model": {"from_config": LLAMA},
        "data": {"eval": None},
        "launch": {"num_processes": 2},
        "kernels": {"compile": True},
    }
    training = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "no",
    }
    graphs: list[int] = []
    for sample in (None, SAMPLE | {"every": 1}):
        recipe = {**changes, "training": training | {"sample": sample}}
        run = bench.written_run(recipe, vocabulary=384)
        runs.train(bench.on_ranks, run, 2, runs.run_with_kernels)
        graphs.append(max(line["graphs"] for line in runs.lines(run) if line.get("event") == "compiled"))
    assert graphs[0] == graphs[1]
