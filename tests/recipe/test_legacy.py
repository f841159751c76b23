"""Old spellings: each is translated with one notice, contradicted only by an error, or refused with the
replacement."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from pydantic import ValidationError

from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Lora
from tests.recipe.loading import load_with, one_problem, problems_with


@pytest.mark.parametrize(
    ("extra", "key", "value", "notice"),
    [
        (
            "fsdp: {fsdp_offload_params: true}",
            "fsdp.offload_params",
            True,
            "`fsdp.fsdp_offload_params` is now `fsdp.offload_params`",
        ),
        (
            "fsdp: {cpu_offload: true}",
            "fsdp.offload_params",
            True,
            "`fsdp.cpu_offload` is now `fsdp.offload_params: true`",
        ),
        (
            "fsdp: {sharding_strategy: 2}",
            "fsdp.sharding_strategy",
            "SHARD_GRAD_OP",
            "`fsdp.sharding_strategy: 2` is now",
        ),
        (
            'fsdp: {sharding_strategy: "4"}',
            "fsdp.sharding_strategy",
            "HYBRID_SHARD",
            "is now `fsdp.sharding_strategy: HYBRID_SHARD`",
        ),
        ("fsdp: {sharding_strategy: full_shard}", "fsdp.sharding_strategy", "FULL_SHARD", "is now"),
        (
            "fsdp: {reshard_after_forward: false}",
            "fsdp.sharding_strategy",
            "SHARD_GRAD_OP",
            "is `fsdp.sharding_strategy: SHARD_GRAD_OP`",
        ),
        (
            "fsdp: {reshard_after_forward: SHARD_GRAD_OP}",
            "fsdp.sharding_strategy",
            "SHARD_GRAD_OP",
            "is now `fsdp.sharding_strategy",
        ),
        (
            "fsdp: {reshard_after_forward: NO_RESHARD}",
            "fsdp.sharding_strategy",
            "SHARD_GRAD_OP",
            "is now `fsdp.sharding_strategy",
        ),
        ("fsdp: {use_orig_params: true}", "fsdp.version", 2, "`fsdp.use_orig_params` is removed"),
        (
            "fsdp: {sync_module_states: true}",
            "fsdp.cpu_ram_efficient_loading",
            True,
            "`fsdp.sync_module_states` is removed",
        ),
        (
            "fsdp: {sync_module_states: false}",
            "fsdp.cpu_ram_efficient_loading",
            False,
            "is now `fsdp.cpu_ram_efficient_loading: false`",
        ),
        ("fsdp: {limit_all_gathers: true}", "fsdp.version", 2, "`fsdp.limit_all_gathers` is removed"),
        ("fsdp: {min_num_params: 0}", "fsdp.min_num_params", "auto", "is now `auto`"),
        ("fsdp: {xla: false}", "fsdp.version", 2, "`fsdp.xla` is removed"),
        ("load_in_8bit: false", "training.seed", 42, "`load_in_8bit` is removed"),
        ("bnb_4bit_quant_storage: uint8", "training.seed", 42, "`bnb_4bit_quant_storage` is removed"),
        (
            "lora: {r: 4, lr_ratio: 8}",
            "lora.loraplus_lr_ratio",
            8,
            "`lora.lr_ratio` is now `lora.loraplus_lr_ratio: 8`",
        ),
        ("lora: {r: 4, task_type: CAUSAL_LM}", "lora.r", 4, "`lora.task_type` is removed"),
        (
            "fsdp: {state_dict_type: sharded_state_dict}",
            "fsdp.state_dict_type",
            "SHARDED_STATE_DICT",
            "is now",
        ),
        ("fsdp: full_shard", "fsdp.sharding_strategy", "FULL_SHARD", "`full_shard` in `fsdp` is now"),
        ("fsdp: [no_shard]", "fsdp.sharding_strategy", "NO_SHARD", "`no_shard` in `fsdp` is now"),
        (
            "training: {fsdp: true}",
            "fsdp.sharding_strategy",
            "FULL_SHARD",
            "`training.fsdp: true` is not needed",
        ),
        (
            "training: {gradient_checkpointing: true}",
            "fsdp.activation_checkpointing",
            "full",
            "is now `fsdp.activation_checkpointing: full`",
        ),
        ("training: {activation_checkpointing: false}", "fsdp.activation_checkpointing", "none", "is now"),
        (
            "training: {gradient_checkpointing_kwargs: {use_reentrant: false}}",
            "fsdp.version",
            2,
            "always non-reentrant",
        ),
        (
            "training: {gradient_checkpointing_kwargs: null}",
            "fsdp.version",
            2,
            "always non-reentrant",
        ),
        (
            "training: {evaluation_strategy: no}",
            "training.eval_strategy",
            "no",
            "is now `training.eval_strategy: no`",
        ),
        (
            "training: {warmup_ratio: 0.03}",
            "training.warmup_steps",
            0.03,
            "is now `training.warmup_steps: 0.03`",
        ),
        (
            "training: {group_by_length: true}",
            "training.seed",
            42,
            "`training.group_by_length` is removed: rows of similar length",
        ),
        ("training: {logging_dir: x}", "training.seed", 42, "`training.logging_dir` is removed"),
        ("training: {save_safetensors: true}", "training.seed", 42, "`training.save_safetensors` is removed"),
        ("training: {overwrite_output_dir: true}", "training.seed", 42, "`train --overwrite`"),
        ("overwrite_output_dir: true", "training.seed", 42, "`train --overwrite`"),
        ("training: {max_seq_length: 64}", "data.max_length", 64, "is now `data.max_length: 64`"),
        ("training: {torch_dtype: bfloat16}", "model.dtype", "bf16", "is now `model.dtype: bfloat16`"),
    ],
)
def test_old_spelling_is_translated_with_one_notice(extra: str, key: str, value: object, notice: str) -> None:
    loaded = load_with(extra)
    told = [each for each in loaded.notices if each.code == "old-spelling"]
    assert value_of(loaded.recipe, key) == value
    assert len(told) == 1
    assert notice in told[0].message
    assert told[0].where.line == 3
    assert not told[0].strict


def test_recipe_json_of_version_0_1_is_read_with_its_lora_plus_ratio() -> None:
    """Every such file of a LoRA run has the key, so without it no run of that version could be resumed or
    merged."""
    recipe = load_with("lora: {r: 4, loraplus_lr_ratio: 8}").recipe
    text = recipe.model_dump_json(by_alias=True)
    older = text.replace('"loraplus_lr_ratio"', '"lr_ratio"')
    assert older != text
    assert Recipe.model_validate_json(older) == recipe
    with pytest.raises(ValidationError):
        Recipe.model_validate_json(text.replace('"loraplus_lr_ratio"', '"lr_ratio":1,"loraplus_lr_ratio"'))


def test_lora_plus_ratio_has_the_name_that_peft_gives_it() -> None:
    peft = importlib.util.find_spec("peft")
    assert peft is not None
    assert peft.origin is not None
    source = Path(peft.origin).with_name("optimizers") / "loraplus.py"
    assert "loraplus_lr_ratio: float" in source.read_text(encoding="utf-8")
    assert "loraplus_lr_ratio" in Lora.model_fields


def test_optim_args_are_parsed_word_by_word() -> None:
    loaded = load_with('training: {fsdp: "shard_grad_op auto_wrap offload"}')
    assert (loaded.recipe.fsdp.sharding_strategy, loaded.recipe.fsdp.offload_params) == (
        "SHARD_GRAD_OP",
        True,
    )
    assert len(loaded.notices) == 3


ACCELERATE = """\
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
  fsdp_version: 1
"""


def test_accelerate_config_is_translated() -> None:
    fsdp = load_with(ACCELERATE).recipe.fsdp
    assert (fsdp.version, fsdp.sharding_strategy, fsdp.offload_params, fsdp.activation_checkpointing) == (
        1,
        "FULL_SHARD",
        True,
        "full",
    )
    assert fsdp.transformer_layer_cls_to_wrap == "LlamaDecoderLayer"


def test_trainer_fsdp_config_is_translated() -> None:
    loaded = load_with(
        "training: {fsdp_config: {cpu_offload: true, min_num_params: 0, version: 2, "
        "reshard_after_forward: true}}"
    )
    assert loaded.recipe.fsdp.offload_params is True
    assert loaded.recipe.fsdp.sharding_strategy == "FULL_SHARD"


def test_accelerate_prefetch_flag_is_not_a_depth() -> None:
    assert (
        load_with("fsdp: {fsdp_backward_prefetch: 2, version: 1}").recipe.fsdp.backward_prefetch
        == "BACKWARD_POST"
    )
    assert load_with("fsdp: {backward_prefetch: 2}").recipe.fsdp.backward_prefetch == 2


@pytest.mark.parametrize(
    "extra",
    [
        "fsdp: {offload_params: true, cpu_offload: false}",
        "fsdp: {fsdp_offload_params: true, offload_params: false}",
        "fsdp: {activation_checkpointing: none}\ntraining: {gradient_checkpointing: true}",
        "training: {warmup_ratio: 0.1, warmup_steps: 5}",
        "training: {fsdp: shard_grad_op}\nfsdp: {sharding_strategy: FULL_SHARD}",
        "fsdp: {sharding_strategy: FULL_SHARD, reshard_after_forward: SHARD_GRAD_OP}",
    ],
)
def test_old_and_a_new_spelling_that_disagree_are_an_error(extra: str) -> None:
    assert one_problem(problems_with(extra)).code == "two-spellings"


def test_old_and_a_new_spelling_that_agree_are_fine() -> None:
    assert load_with("fsdp: {offload_params: true, cpu_offload: true}").recipe.fsdp.offload_params is True


@pytest.mark.parametrize(
    ("extra", "words", "hint"),
    [
        ("load_in_8bit: true", "`load_in_8bit: true` has no equivalent", "remove the line"),
        (
            "bnb_4bit_quant_storage: bfloat16",
            "`bnb_4bit_quant_storage: bfloat16` has no equivalent",
            "remove the line",
        ),
        ("fsdp: {state_dict_type: LOCAL_STATE_DICT}", "`LOCAL_STATE_DICT` is removed", "SHARDED_STATE_DICT"),
        ("fsdp: {use_orig_params: false}", "no equivalent", "remove the line"),
        ("fsdp: {limit_all_gathers: false}", "no equivalent", "remove the line"),
        ("fsdp: {xla: true}", "there is no XLA path", "remove the line"),
        ("fsdp: {sync_module_states: false, cpu_ram_efficient_loading: true}", "contradicts", ""),
        ("training: {save_safetensors: false}", "never as pickles", "remove the line"),
        ("training: {fsdp: full_shrad}", "`full_shrad` is not an option", "full_shard"),
        ("training: {fsdp: false}", "takes keys", "NO_SHARD"),
        ("training: {fsdp_config: fsdp.json}", "not as a file", "copy its keys"),
        ("training: {warmup_ratio: 3}", "a share of all steps", ""),
    ],
)
def test_keys_without_a_counterpart_are_refused_with_the_alternative(
    extra: str, words: str, hint: str
) -> None:
    problem = one_problem(problems_with(extra))
    assert words in problem.message
    assert hint in (problem.hint or "")


def test_override_by_an_old_name_wins_over_the_file() -> None:
    loaded = load_with(
        "fsdp: {offload_params: false, sharding_strategy: FULL_SHARD}",
        "training.gradient_checkpointing=true",
        "fsdp.fsdp_offload_params=true",
    )
    assert (loaded.recipe.fsdp.offload_params, loaded.recipe.fsdp.activation_checkpointing) == (True, "full")


def test_contradicting_override_is_not_an_alias() -> None:
    problem = one_problem(
        problems_with("fsdp: {sharding_strategy: FULL_SHARD}", "fsdp.reshard_after_forward=false")
    )
    assert problem.code == "contradiction"
    assert "line 3" in problem.message
