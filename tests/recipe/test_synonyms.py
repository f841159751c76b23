"""Names of other trainers: each with a value, through the message, to the value that its hint proposes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.schema.keys import all_keys
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owner_of
from fsdp_tune.recipe.synonyms import OF_A_SOURCE, SYNONYMS, Synonym, synonym_hint
from tests.recipe.loading import MINIMAL, load, one_problem, problems, problems_with

LEFT_OUT = "leave it out"
QUESTION = "?"
"""The value needs a number or a file that is not in the recipe: the hint has no line to paste."""


def _each(names: tuple[str, ...], samples: list[tuple[Any, Any]]) -> dict[str, list[tuple[Any, Any]]]:
    return {name: list(samples) for name in names}


ANY: dict[str, Any] = {  # a value in the other tool for a key here, where nothing is converted
    "model.name_or_path": "gpt2",
    "model.tokenizer": "gpt2",
    "model.revision": "abc",
    "model.attn_implementation": "sdpa",
    "model.dtype": "bfloat16",
    "model.config_overrides": {"n_layer": 2},
    "model.resize_embeddings": True,
    "model.tokens.eos": "</s>",
    "model.tokens.pad": "<pad>",
    "data.chat_template": "t.jinja",
    "data.packing": True,
    "data.eval_packing": False,
    "data.cache_dir": "cache",
    "training.optim": "adamw_torch",
    "training.lr_scheduler_type": "cosine",
    "training.learning_rate": 2e-5,
    "training.max_grad_norm": 0.5,
    "training.warmup_steps": 0.1,
    "fsdp.offload_params": True,
    "fsdp.reshard_after_forward": False,
    "kernels.liger": False,
    "lora.init_lora_weights": True,
    "lora.use_dora": True,
    "lora.use_rslora": True,
    "lora.adapter": "runs/a/adapter",
    "lora.layers_to_transform": [0, 1],
    "lora.loraplus_lr_ratio": 16.0,
    "launch.main_process_ip": "10.0.0.1",
    "output_dir": "runs/x",
    "name": "trial",
}
NUMBER = 3
CONVERTED: dict[str, list[tuple[Any, Any]]] = {  # (value there, the tree here)
    "val_set_size": [
        (0.1, {"data": {"eval": {"fraction": 0.1}}}),
        (200, {"data": {"eval": {"rows": 200}}}),
        (200.0, {"data": {"eval": {"rows": 200}}}),
        (0, LEFT_OUT),
    ],
    "val_size": [(0.1, {"data": {"eval": {"fraction": 0.1}}}), (200, {"data": {"eval": {"rows": 200}}})],
    "test_size": [(0.1, {"data": {"eval": {"fraction": 0.1}}})],
    "test_datasets": [([{"path": "a.jsonl", "type": "alpaca"}], {"data": {"eval": [{"path": "a.jsonl"}]}})],
    "train_on_inputs": [(True, {"data": {"loss_on": "all"}}), (False, {"data": {"loss_on": "completion"}})],
    "train_on_prompt": [(True, {"data": {"loss_on": "all"}}), (False, {"data": {"loss_on": "completion"}})],
    "mask_history": [(True, {"data": {"loss_on": "last_assistant"}}), (False, LEFT_OUT)],
    "completion_only_loss": [
        (True, {"data": {"loss_on": "completion"}}),
        (False, {"data": {"loss_on": "all"}}),
    ],
    "assistant_only_loss": [
        (True, {"data": {"loss_on": "assistant"}}),
        (False, {"data": {"loss_on": "all"}}),
    ],
    "roles_to_train": [
        (["assistant"], {"data": {"loss_on": "assistant"}}),
        (["user", "assistant"], {"data": {"loss_on": "all"}}),
    ],
    "datasets": [
        (
            [{"path": "a/b", "split": "train", "type": "alpaca"}],
            {"data": {"train": [{"path": "a/b", "split": "train"}]}},
        ),
        (["a.jsonl", "b.jsonl"], {"data": {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}}),
    ],
    "dataset_name": [("a/b", {"data": {"train": [{"path": "a/b"}]}})],
    "dataset_config": [("main", {"data": {"train": [{"path": "NAME", "name": "main"}]}})],
    "dataset_train_split": [("train_sft", {"data": {"train": [{"path": "NAME", "split": "train_sft"}]}})],
    "dataset_test_split": [("dev", {"data": {"eval": [{"path": "NAME", "split": "dev"}]}})],
    "dataset_text_field": [
        ("body", {"data": {"train": [{"path": "NAME", "rename_columns": {"body": "text"}}]}})
    ],
    "max_samples": [(100, {"data": {"train": [{"path": "NAME", "max_rows": 100}]}})],
    "dataset": [("alpaca_en_demo", QUESTION)],
    "template": [("llama3", QUESTION)],
    "eval_dataset": [("x", {"data": {"eval": [{"path": "NAME"}]}})],
    "special_tokens": [({"pad_token": "<pad>"}, {"model": {"tokens": {"pad": "…", "eos": "…"}}})],
    "mix_strategy": [
        ("concat", LEFT_OUT),
        ("interleave_under", {"data": {"mixture": {"stopping_strategy": "first_exhausted"}}}),
        ("interleave_over", {"data": {"mixture": {"stopping_strategy": "all_exhausted"}}}),
    ],
    "flash_attention": [(True, {"model": {"attn_implementation": "flash_attention_2"}}), (False, LEFT_OUT)],
    "flash_attn": [
        ("fa2", {"model": {"attn_implementation": "flash_attention_2"}}),
        ("auto", LEFT_OUT),
        ("sdpa", {"model": {"attn_implementation": "sdpa"}}),
        ("disabled", {"model": {"attn_implementation": "eager"}}),
    ],
    "sdp_attention": [(True, {"model": {"attn_implementation": "sdpa"}}), (False, LEFT_OUT)],
    "tiled_mlp": [(True, {"kernels": {"mlp_slice_tokens": 16384}}), (False, LEFT_OUT)],
    "tiled_mlp_num_shards": [(4, QUESTION)],
    "evals_per_epoch": [
        (4, {"training": {"eval_steps": 0.25}}),
        (1, {"training": {"eval_strategy": "epoch"}}),
        (0, {"training": {"eval_strategy": "no"}}),
    ],
    "saves_per_epoch": [
        (2, {"training": {"save_steps": 0.5}}),
        (1, {"training": {"save_strategy": "epoch"}}),
        (0, LEFT_OUT),
    ],
    "max_steps_per_epoch": [(50, {"training": {"max_steps": 50}})],
    "adapter": [
        ("lora", {"lora": {"r": 16}}),
        ("qlora", {"lora": {"r": 16}, "quantization": {"load": "nf4"}}),
    ],
    "finetuning_type": [("lora", {"lora": {"r": 16}}), ("full", LEFT_OUT), ("freeze", QUESTION)],
    **_each(
        ("train_type", "tuner_type"),
        [("lora", {"lora": {"r": 16}}), ("full", LEFT_OUT), ("longlora", QUESTION)],
    ),
    "split_dataset_ratio": [(0.01, {"data": {"eval": {"fraction": 0.01}}}), (0, LEFT_OUT)],
    "val_dataset": [(["a.jsonl"], {"data": {"eval": [{"path": "a.jsonl"}]}})],
    "quant_bits": [(4, {"quantization": {"load": "nf4"}}), (8, {"quantization": {"load": "nf4"}})],
    "adapters": [(["runs/a"], {"lora": {"adapter": "runs/a"}})],
    "use_peft": [(True, {"lora": {"r": 16}}), (False, LEFT_OUT)],
    "lora_target": [
        ("all", {"lora": {"target_modules": "all-linear"}}),
        ("q_proj,v_proj", {"lora": {"target_modules": ["q_proj", "v_proj"]}}),
    ],
    "lora_target_modules": [
        (["q_proj"], {"lora": {"target_modules": ["q_proj"]}}),
        ("all-linear", {"lora": {"target_modules": "all-linear"}}),
    ],
    "lora_target_linear": [(True, {"lora": {"target_modules": "all-linear"}}), (False, LEFT_OUT)],
    "lora_attn_modules": [(["q_proj"], {"lora": {"target_modules": ["q_proj"]}})],
    "lora_target_parameters": [
        (["mlp.experts.gate_up_proj"], {"lora": {"target_parameters": ["mlp.experts.gate_up_proj"]}})
    ],
    "lora_modules_to_save": [(["lm_head"], {"lora": {"modules_to_save": ["lm_head"]}})],
    "additional_target": [
        ("embed_tokens,lm_head", {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}})
    ],
    "trainable_token_indices": [([5, 6], {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}})],
    "peft_trainable_token_indices": [([5, 6], {"lora": {"modules_to_save": ["embed_tokens", "lm_head"]}})],
    "apply_lora_to_mlp": [(True, {"lora": {"target_modules": "all-linear"}}), (False, LEFT_OUT)],
    "apply_lora_to_output": [
        (True, {"lora": {"target_modules": ["q_proj", "v_proj", "lm_head"]}}),
        (False, LEFT_OUT),
    ],
    "merge_lora": [(True, {"merge": {"adapter": "merged"}}), (False, {"merge": {"adapter": "adapter"}})],
    "save_adapter_weights_only": [
        (True, {"merge": {"adapter": "adapter"}}),
        (False, {"merge": {"adapter": "both"}}),
    ],
    "pissa_init": [(False, LEFT_OUT), (True, LEFT_OUT)],
    "load_in_4bit": [(True, {"quantization": {"load": "nf4"}}), (False, LEFT_OUT)],
    "quantize_base": [(True, {"quantization": {"load": "nf4"}}), (False, LEFT_OUT)],
    "quantization_bit": [(4, {"quantization": {"load": "nf4"}}), (8, {"quantization": {"load": "nf4"}})],
    "quantization_type": [("nf4", {"quantization": {"load": "nf4"}})],
    "bnb_4bit_quant_type": [
        ("nf4", {"quantization": {"load": "nf4"}}),
        ("fp4", {"quantization": {"load": "nf4"}}),
    ],
    "bnb_4bit_compute_dtype": [
        ("bfloat16", {"precision": {"mixed_precision": "bf16"}}),
        ("float16", {"precision": {"mixed_precision": "fp16"}}),
    ],
    **_each(
        ("use_bnb_nested_quant", "double_quantization", "bnb_4bit_use_double_quant"),
        [(True, {"quantization": {"load": "nf4", "scales": "bf16"}}), (False, LEFT_OUT)],
    ),
    "new_special_tokens": [("<a>,<b>", {"model": {"tokens": {"add": ["<a>", "<b>"]}}})],
    "disable_gradient_checkpointing": [
        (True, {"fsdp": {"activation_checkpointing": "none"}}),
        (False, {"fsdp": {"activation_checkpointing": "full"}}),
    ],
    "enable_activation_checkpointing": [
        (True, {"fsdp": {"activation_checkpointing": "full"}}),
        (False, LEFT_OUT),
    ],
    "devices": [(4, {"launch": {"num_processes": 4}}), ([0, 1, 2], {"launch": {"num_processes": 3}})],
    "nproc_per_node": [(8, QUESTION)],
    "group_by_length": [(True, LEFT_OUT)],
    **_each(
        tuple(name for name, synonym in SYNONYMS.items() if synonym.tool == "Accelerate"), [("x", LEFT_OUT)]
    ),
    **_each(
        ("train_file", "train_files", "train_data", "train_path", "data_path", "dataset_path"),
        [("a.jsonl", {"data": {"train": [{"path": "a.jsonl"}]}})],
    ),
    **_each(
        ("eval_file", "validation_file", "val_file"), [("a.jsonl", {"data": {"eval": [{"path": "a.jsonl"}]}})]
    ),
    **_each(
        ("rope_scaling", "rope_parameters"),
        [(2.0, {"model": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}})],
    ),
    **_each(
        ("mixed_precision_dtype", "amp"),
        [
            ("bf16", {"precision": {"mixed_precision": "bf16"}}),
            ("float32", {"precision": {"mixed_precision": "no"}}),
        ],
    ),
    **_each(
        ("zero_stage", "sharding"),
        [
            (3, {"fsdp": {"sharding_strategy": "FULL_SHARD"}}),
            (2, {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}),
            (1, QUESTION),
        ],
    ),
    "wandb": [(True, {"training": {"report_to": ["wandb"]}}), (False, LEFT_OUT)],
    **_each(("logger", "loggers", "tracker"), [("wandb", {"training": {"report_to": ["wandb"]}})]),
    "wandb_project": [("p", {"launch": {"env": {"WANDB_PROJECT": "p"}}})],
    "wandb_entity": [("p", {"launch": {"env": {"WANDB_ENTITY": "p"}}})],
    "wandb_mode": [("offline", {"launch": {"env": {"WANDB_MODE": "offline"}}})],
}
IN_A_SOURCE: dict[str, list[tuple[Any, Any]]] = {
    "type": [
        ("alpaca", {"format": "alpaca"}),
        ("chat_template", {"format": "messages"}),
        ("input_output", {"format": "segments"}),
        ("mine.py", LEFT_OUT),
    ],
    "ds_type": [("json", {"path": "json", "data_files": "FILE"})],
    "field_messages": [("conversation", {"rename_columns": {"conversation": "messages"}})],
    "field_instruction": [("q", {"rename_columns": {"q": "instruction"}})],
    "field_input": [("x", {"rename_columns": {"x": "input"}})],
    "field_output": [("a", {"rename_columns": {"a": "output"}})],
    "field": [("body", {"rename_columns": {"body": "text"}})],
    "subset": [("main", {"name": "main"})],
    "num_samples": [(100, {"max_rows": 100})],
    "file_name": [("a.json", {"path": "a.json"})],
    "hf_hub_url": [("a/b", {"path": "a/b"})],
}


def _tree(key: str, value: Any) -> Any:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def codes_of(tree: dict[str, Any]) -> set[str]:
    """Return the codes of the errors of a recipe, given as a tree."""
    try:
        load(yaml.safe_dump(tree))
    except FsdpTuneError as error:
        return {problem.code for problem in error.problems}
    return set()


def _samples(name: str, synonym: Synonym) -> list[tuple[Any, Any]]:
    if name in CONVERTED:
        return CONVERTED[name]
    value = ANY.get(synonym.key, NUMBER)
    return [(value, _tree(synonym.key, value))]


def _proposed(hint: str) -> dict[str, Any]:
    """Merge the lines of YAML that a hint says to write."""
    tree: dict[str, Any] = {}
    for line in re.findall(
        r"`([a-z_]+: [^`]+)`", hint.partition("write ")[2].partition(" for one epoch")[0] or hint
    ):
        tree |= yaml.safe_load(line)
    return tree


EVERY = [(name, value, tree) for name, synonym in SYNONYMS.items() for value, tree in _samples(name, synonym)]


@pytest.mark.parametrize(("name", "value", "tree"), EVERY)
def test_hint_has_the_value_here_and_is_read(name: str, value: Any, tree: Any) -> None:
    """Values for a whole recipe (a machine's address alone, an adapter that is absent) have their own checks,
    after the types."""
    line = (
        yaml.safe_dump({name: value}, default_flow_style=True, width=1000)
        .strip()
        .removeprefix("{")
        .removesuffix("}")
    )

    hint = one_problem(problems_with(f"{line}\n")).hint or ""

    if tree == LEFT_OUT:
        assert LEFT_OUT in hint, hint
    elif tree == QUESTION:
        assert (
            LEFT_OUT in hint
            or "N = " in hint
            or " it is one of " in hint
            or "write the file" in hint
            or "is not one of" in hint
        ), hint
    else:
        assert _proposed(hint) == _proposed(synonym_hint(name, value) or "") == tree, hint
        base = {"model": {"name_or_path": "gpt2"}, "data": {"train": [{"path": "some/set"}]}}
        recipe = base | {
            section: base.get(section, {}) | keys if isinstance(keys, dict) else keys
            for section, keys in tree.items()
        }
        assert codes_of(recipe).isdisjoint(
            {"unknown-key", "wrong-value", "no-value", "unknown-field", "owned-field"}
        ), recipe


@pytest.mark.parametrize(
    ("name", "value", "entry"), [(name, *each) for name, found in IN_A_SOURCE.items() for each in found]
)
def test_names_inside_of_a_source(name: str, value: Any, entry: Any) -> None:
    text = MINIMAL.replace("{path: some/set}", f"{{path: some/set, {name}: {value}}}")
    hint = one_problem(problems(text)).hint or ""
    if entry == LEFT_OUT:
        assert LEFT_OUT in hint
    else:
        (found,) = _proposed(hint)["data"]["train"]
        assert found == {"path": "NAME"} | entry, hint
        assert codes_of({"model": {"name_or_path": "gpt2"}, "data": {"train": [found]}}) == set()


def test_every_name_of_a_source_has_a_sample() -> None:
    assert set(IN_A_SOURCE) == set(OF_A_SOURCE)


def test_synonyms_map_to_recipe_keys() -> None:
    keys = {key.name for key in all_keys()} | {
        f"training.{field}" for field in TRAINING_FIELDS.fields if owner_of(field) is None
    }
    for name, synonym in (*SYNONYMS.items(), *OF_A_SOURCE.items()):
        assert synonym.key in keys, name
        assert name not in keys
        assert f"`{synonym.key}`" in (synonym_hint(name, in_source=name in OF_A_SOURCE) or ""), name


def test_field_of_the_trainer_belongs_under_training() -> None:
    """`weight_decay` is also a key of `parameter_groups`, which nobody means at the top."""
    assert one_problem(problems_with("weight_decay: 0.1")).hint == "belongs under `training:`"


def test_hint_about_a_template_of_llama_factory_names_the_list_of_bundled_ones() -> None:
    hint = synonym_hint("template", "qwen3")
    assert hint is not None
    assert "`fsdp-tune templates` lists" in hint
