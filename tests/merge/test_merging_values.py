"""From a checkpoint on disk to a model directory: the main job, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fsdp_tune.core.errors import FailedError, FsdpTuneError
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Merge
from tests.merge.checkpoints import SHARDS, finish_checkpoint, make_run, merged_tensors, same_bits, save_dcp

transformers.utils.logging.disable_progress_bar()


def small_gpt2(*, tied: bool = True) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=2,
            vocab_size=61,
            n_positions=16,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=tied,
        )
    )


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=61,
        )
    )


def model_directory(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """What RUN/model holds: config, generation config, tokenizer files, no weights."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_merged_run_equals_save_pretrained(make, tmp_path, merge):
    model = make()
    run = make_run(tmp_path / "run", {10: model.state_dict()}, model=model_directory(model, tmp_path / "m"))
    result = merge(run, output=None, dtype="keep")
    model.save_pretrained(tmp_path / "reference")

    ours, theirs = merged_tensors(run / "merged"), merged_tensors(tmp_path / "reference")
    assert result.output == run / "merged"
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (run / "merged" / name).read_bytes() == (run / "model" / name).read_bytes()
    config, reference = (
        json.loads((folder / "config.json").read_text())
        for folder in (run / "merged", tmp_path / "reference")
    )
    assert config | {"architectures": None} == reference | {
        "architectures": None,
        "torch_dtype": reference["dtype"],
    }

    loaded, report = AutoModelForCausalLM.from_pretrained(run / "merged", output_loading_info=True)
    assert not any(report.values())
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_run_and_checkpoint_and_shards_give_the_same_weights(tmp_path, merge):
    model = small_gpt2()
    run = make_run(tmp_path / "run", {3: model.state_dict()}, model=model_directory(model, tmp_path / "m"))
    for number, source in enumerate((run, run / "checkpoint-3", run / "checkpoint-3" / SHARDS)):
        merge(source, output=tmp_path / f"out{number}", dtype="keep")
    first = merged_tensors(tmp_path / "out0")
    for number in (1, 2):
        other = merged_tensors(tmp_path / f"out{number}")
        assert first.keys() == other.keys()
        assert all(same_bits(first[name], other[name]) for name in first)


def test_newest_complete_checkpoint_is_selected_with_reason(tmp_path, merge):
    run = make_run(tmp_path / "run", {step: {"w": torch.full((4,), float(step))} for step in (9, 10, 11)})
    (run / "checkpoint-11" / "manifest.json").unlink()
    result = merge(run)
    assert result.step == 10
    assert "newest of 2 complete" in result.reason
    assert any("checkpoint-11 is not used" in notice.message for notice in result.notices)
    assert merged_tensors(result.output)["w"][0] == 10


def test_step_option_selects_checkpoint(tmp_path, merge):
    run = make_run(tmp_path / "run", {step: {"w": torch.full((4,), float(step))} for step in (1, 2)})
    assert merged_tensors(merge(run, step=1).output)["w"][0] == 1
    with pytest.raises(FsdpTuneError, match="no checkpoint of step 7") as caught:
        merge(run, step=7)
    assert caught.value.exit_code == 2


def test_best_selects_lowest_eval_loss_of_saved_steps(tmp_path, merge):
    run = make_run(tmp_path / "run", {step: {"w": torch.full((4,), float(step))} for step in (1, 2, 3)})
    lines = [
        {"step": 1, "eval_loss": 2.0},
        {"step": 2, "eval_loss": 1.5},
        {"step": 3, "eval_loss": 1.75},
        {"step": 4, "eval_loss": 0.1},
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "eval_'
    )
    result = merge(run, best=True)
    assert result.step == 2
    assert "1.5" in result.reason


def test_best_of_saved_steps_is_by_the_recipe_metric_if_the_best_step_has_no_checkpoint(tmp_path, merge):
    recipe = Recipe.model_validate(
        {"training": {"metric_for_best_model": "accuracy", "greater_is_better": True}}
    )
    run = make_run(
        tmp_path / "run", {step: {"w": torch.full((4,), float(step))} for step in (2, 4)}, recipe=recipe
    )
    (run / "checkpoint-4" / "manifest.json").unlink()
    (run / "checkpoint-4" / "trainer_state.json").write_text(
        json.dumps({"best_global_step": 3, "best_metric": 0.9})
    )
    finish_checkpoint(run / "checkpoint-4", 4)
    values = {2: (1.5, 0.4), 3: (1.4, 0.9), 4: (1.75, 0.8)}
    lines = [
        {"step": step, "eval_loss": loss, "eval_accuracy": accuracy}
        for step, (loss, accuracy) in values.items()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = merge(run, best=True)
    assert result.step == 4
    assert "the highest eval_accuracy (0.8)" in result.reason


def test_best_follows_metric_for_best_model(tmp_path, merge):
    run = make_run(tmp_path / "run", {step: {"w": torch.full((4,), float(step))} for step in (1, 2)})
    (run / "checkpoint-2" / "manifest.json").unlink()
    (run / "checkpoint-2" / "trainer_state.json").write_text(
        json.dumps({"best_global_step": 1, "best_metric": 0.9})
    )
    finish_checkpoint(run / "checkpoint-2", 2)
    assert merge(run, best=True).step == 1


def test_recipe_sets_dtype_and_shard_size_and_options_override(tmp_path, merge):
    recipe = Recipe(merge=Merge(dtype="bf16", max_shard_size="100B"))
    run = make_run(tmp_path / "run", {1: {"a": torch.randn(16), "b": torch.randn(16)}}, recipe=recipe)
    result = merge(run, output=None)
    assert result.dtype == "bfloat16"
    assert (run / "merged" / "model-00001-of-00001.safetensors").exists() is False
    assert (run / "merged" / "model.safetensors").exists()
    result = merge(run, dtype="fp32", max_shard_bytes=64)
    assert result.dtype == "float32"
    assert {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} <= set(result.files)


def test_foreign_checkpoint_needs_output_and_writes_weights_only(tmp_path, merge):
    save_dcp({"model": {"w": torch.ones(3)}}, tmp_path / "other" / SHARDS)
    with pytest.raises(FsdpTuneError, match="`--output` has no default"):
        merge(tmp_path / "other", output=None)
    result = merge(tmp_path / "other")
    assert any("config.json and the tokenizer" in notice.message for notice in result.notices)
    assert not (result.output / "config.json").exists()


def test_copied_run_checkpoint_is_still_verified(tmp_path, merge):
    run = make_run(tmp_path / "run", {1: {"w": torch.randn(1000)}})
    (run / "checkpoint-1").rename(tmp_path / "checkpoint-1")
    merge(tmp_path / "checkpoint-1")
    shard = next((tmp_path / "checkpoint-1" / SHARDS).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes().replace(b"PK", b"pk", 1))
    with pytest.raises(FailedError, match="digest"):
        merge(tmp_path / "checkpoint-1", output=tmp_path / "other")


def test_directory_of_foreign_checkpoints_is_refused_with_candidates(tmp_path, merge):
    for step in (9, 10):
        save_dcp({"model": {"w": torch.ones(3)}}, tmp_path / "trainer" / f"checkpoint-{step}" / SHARDS)
    with pytest.raises(FsdpTuneError) as caught:
        merge(tmp_path / "trainer")
    assert "checkpoint-10" in str(caught.value.problems[0].hint)
    assert merge(tmp_path / "trainer" / "checkpoint-10").step == 10


def test_foreign_directory_provides_config_and_tokenizer(tmp_path, merge):
    """Files that Trainer writes next to `pytorch_model_fsdp_0` are used without an option."""
    model = small_gpt2()
    save_dcp({"model": model.state_dict()}, model_directory(model, tmp_path / "checkpoint-7") / SHARDS)
    result = merge(tmp_path / "checkpoint-7", verify="none")
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(
        result.files
    )
