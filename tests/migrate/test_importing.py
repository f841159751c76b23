"""Configurations of other trainers as recipes: every key has one row of the account, and the text loads with
the values it should have."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.devices import Machine
from fsdp_tune.data.format.templates import resolve_template
from fsdp_tune.migrate.ledger import leaves
from fsdp_tune.recipe.key_paths import flattened
from fsdp_tune.recipe.outcome import Fate
from fsdp_tune.recipe.resolve import resolve
from tests.migrate.foreign_files import (
    ARGUMENTS_OF_UNSLOTH,
    AXOLOTL,
    DATASET_INFO,
    FILES,
    FMS_DATA,
    SOUP,
    TRL,
)
from tests.migrate.imports import from_text, imported, loaded, questions, row, values


def words_of(text: str) -> set[str]:
    """Return every option and variable of a command, found without the parser under test."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return {word.lstrip("-").partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_one_row_and_every_value_its_origin(name: str, tmp_path: Path) -> None:
    tool, file, text = FILES[name]
    result = imported(tmp_path, name)
    rows = result.rows
    assert result.tool == tool
    if file.endswith(".sh"):
        assert words_of(text) == {str(row.path[-1]) for row in rows if row.path[0] != "environment"}
    elif file.endswith(".py"):
        assert [row.key for row in rows] == ARGUMENTS_OF_UNSLOTH
    else:
        assert [
            leaf
            for leaf in leaves(yaml.safe_load(text))
            if len([row for row in rows if leaf[: len(row.path)] == row.path]) != 1
        ] == []

    assert [row.key for row in rows if row.fate in (Fate.DROPPED, Fate.QUESTION) and not row.reason] == []
    assert [
        row.key for row in rows if row.fate in (Fate.KEPT, Fate.CONVERTED, Fate.COMPUTED) and not row.targets
    ] == []
    assert sum(result.counts.values()) == len(rows)

    lines = result.text.splitlines()
    assert sum("# DECIDE: " in line for line in lines) == len(questions(result)) + len(result.decisions)
    assert [
        line
        for line in lines
        if not line.lstrip().startswith("#") and not line.rstrip().endswith(":") and "  # " not in line
    ] == []


def test_rows_have_the_line_of_the_key(tmp_path: Path) -> None:
    lines = {row.key: row.line for row in imported(tmp_path, "axolotl").rows}
    text = AXOLOTL.splitlines()
    assert text[lines["sequence_len"] - 1].startswith("sequence_len:")  # type: ignore[operator]
    assert text[lines["fsdp_config.fsdp_version"] - 1].strip().startswith("fsdp_version:")  # type: ignore[operator]


EXPECTED: dict[str, dict[str, Any]] = {
    "unsloth": {
        "model.name_or_path": "unsloth/Qwen2.5-7B",
        "model.frozen_dtype": "bf16",
        "data.max_length": 2048,
        "quantization.load": "nf4",
        "lora.r": 32,
        "lora.lora_alpha": 64.0,
        "lora.target_modules": ["q_proj", "v_proj"],
        "fsdp.activation_checkpointing": "full",
        "fsdp.activation_checkpointing_offload": True,
        "precision.mixed_precision": "bf16",
        "training.max_steps": 60,
        "training.warmup_steps": 0.1,
        "training.seed": 3407,
        "training.logging_steps": 10,
        "training.report_to": [],
    },
    "automodel": {
        "model.name_or_path": "meta-llama/Llama-3.2-1B",
        "data.max_length": 2048,
        "data.packing": False,
        "training.global_batch_size": 64,
        "training.per_device_train_batch_size": 8,
        "training.eval_steps": 10,
        "training.seed": 1111,
        "training.optim": "adamw_torch",
        "training.adam_beta2": 0.95,
        "training.lr_scheduler_type": "cosine_with_min_lr",
        "training.lr_scheduler_kwargs.min_lr": 1e-6,
        "training.report_to": ["wandb"],
        "lora.r": 8,
        "lora.target_modules": ".*_proj",
        "fsdp.version": 2,
        "fsdp.activation_checkpointing": "full",
    },
    "soup": {
        "model.name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
        "data.format": "alpaca",
        "data.eval.fraction": 0.1,
        "training.num_train_epochs": 3,
        "training.lr_scheduler_type": "cosine",
        "quantization.load": "nf4",
        "lora.r": 64,
        "lora.lora_alpha": 16.0,
    },
    "fms": {"data.max_length": 4096, "training.save_strategy": "epoch", "lora.r": 4, "lora.lora_alpha": 32.0},
    "fms-command": {
        "model.name_or_path": "bigscience/bloom-560m",
        "model.dtype": "bf16",
        "launch.num_processes": 8,
    },
    "axolotl": {
        "model.name_or_path": "Qwen/Qwen2.5-1.5B",
        "data.chat_template": "qwen2.5",
        "data.separator": "\n",
        "data.eval.fraction": 0.02,
        "data.packing": True,
        "data.eval_packing": False,
        "training.optim": "adamw_torch_8bit",
        "training.eval_steps": 0.083333,
        "training.save_strategy": "epoch",
        "training.lr_scheduler_type": "cosine_with_min_lr",
        "training.lr_scheduler_kwargs.min_lr_rate": 0.1,
        "training.warmup_steps": 0.05,
        "lora.r": 32,
        "lora.target_modules": "all-linear",
        "quantization.load": "nf4",
        "kernels.liger": True,
        "kernels.loss": "liger",
        "fsdp.activation_checkpointing": "full",
        "fsdp.activation_checkpointing_offload": True,
        "fsdp.transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
        "launch.env.WANDB_PROJECT": "support",
        "training.report_to": ["wandb"],
    },
    "trl": {
        "data.loss_on": "assistant",
        "model.tokens.eos": "<|im_end|>",
        "model.dtype": "fp32",
        "model.frozen_dtype": "bf16",
        "model.attn_implementation": "sdpa",
        "lora.lora_alpha": 32.0,
        "lora.lora_dropout": 0.05,
        "lora.target_modules": ["q_proj", "v_proj"],
        "training.report_to": [],
    },
    "trl-command": {
        "data.max_length": 1024,
        "training.global_batch_size": 128,
        "launch.num_processes": 2,
        "data.packing": True,
    },
    "llama-factory": {
        "fsdp.sharding_strategy": "FULL_SHARD",
        "fsdp.activation_checkpointing": "full",
        "lora.r": 8,
        "lora.lora_alpha": 16.0,
        "data.max_length": 2048,
        "data.eval.fraction": 0.1,
        "data.packing": True,
    },
    "llama-factory-json": {
        "precision.mixed_precision": "fp16",
        "data.loss_on": "all",
        "lora": None,
        "training.learning_rate": 5e-5,
        "training.per_device_train_batch_size": 8,
    },
    "accelerate": {
        "fsdp.reshard_after_forward": True,
        "fsdp.activation_checkpointing": "full",
        "launch.num_machines": 2,
        "launch.num_processes": 16,
        "launch.main_process_port": 29500,
        "precision.mixed_precision": "bf16",
    },
    "torchtune": {
        "model.name_or_path": "/models/llama/",
        "model.dtype": "bf16",
        "data.max_length": 8192,
        "lora.target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "lora.r": 8,
        "training.max_steps": 1000,
        "training.max_grad_norm": 0,
        "training.weight_decay": 0.01,
        "training.learning_rate": 3e-4,
        "training.lr_scheduler_type": "cosine",
        "launch.env.WANDB_PROJECT": "torchtune",
    },
    "ms-swift": {
        "fsdp.sharding_strategy": "SHARD_GRAD_OP",
        "model.attn_implementation": "flash_attention_2",
        "training.global_batch_size": 16,
        "training.weight_decay": 0.1,
        "lora.lora_alpha": 32.0,
        "launch.num_processes": 2,
    },
    "ms-swift-yaml": {
        "data.loss_on": "last_assistant",
        "lora": None,
        "quantization": None,
        "training.learning_rate": 1e-5,
    },
    "deepspeed": {
        "fsdp.sharding_strategy": "SHARD_GRAD_OP",
        "fsdp.offload_params": True,
        "training.global_batch_size": 64,
        "training.adam_beta2": 0.95,
        "training.max_steps": 1000,
        "training.warmup_steps": 100,
        "training.lr_scheduler_type": "linear",
    },
    "transformers": {
        "data.max_length": 512,
        "data.packing_strategy": "wrapped",
        "fsdp.sharding_strategy": "FULL_SHARD",
        "precision.mixed_precision": "fp16",
        "launch.num_processes": 8,
        "training.global_batch_size": 64,
    },
}
SOURCES: dict[str, list[dict[str, Any]]] = {
    "axolotl": [
        {"path": "acme/support-chats", "format": "sharegpt"},
        {"path": "data/answers.jsonl", "format": "alpaca", "chat_template": "none"},
    ],
    "trl": [{"path": "trl-lib/Capybara"}],
    "torchtune": [{"path": "yahma/alpaca-cleaned", "split": "train[:95%]", "loss_on": "all"}],
    "ms-swift": [
        {"path": "AI-ModelScope/alpaca-gpt4-data-en", "max_rows": 500},
        {"path": "acme/chats", "name": "en"},
    ],
    "transformers": [{"path": "train.txt"}],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_mean_the_same_here(name: str, tmp_path: Path) -> None:
    found = values(imported(tmp_path, name))
    assert {key: found.get(key) for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", SOURCES)
def test_data_sets_are_sources(name: str, tmp_path: Path) -> None:
    sources = values(imported(tmp_path, name))["data.train"]
    assert [
        {key: source[key] for key in wanted} for source, wanted in zip(sources, SOURCES[name], strict=True)
    ] == SOURCES[name]


DFT_FILES = {
    "LLaMA-Factory": "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: d\ntemplate: "
    "llama3\nuse_dft_loss: true\n",
    "ms-swift": "model: m\ntuner_type: full\ndataset: [a.jsonl]\nloss_scale: "
    "last_round\nenable_dft_loss: true\n",
    "TRL": "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\nloss_type: dft\n",
    "axolotl": "base_model: m\ndatasets: [{path: a.jsonl, type: alpaca}]\nmicro_batch_size: "
    "1\nuse_dft: true\n",
}


@pytest.mark.parametrize("tool", DFT_FILES)
def test_dynamic_fine_tuning_is_written(tool: str, tmp_path: Path) -> None:
    result = from_text(tmp_path, DFT_FILES[tool])
    assert result.tool == tool
    assert values(result)["training.loss"] == "dft"
    off = from_text(
        tmp_path,
        DFT_FILES[tool]
        .replace("loss: true", "loss: false")
        .replace("_dft: true", "_dft: false")
        .replace(": dft", ": nll"),
    )
    assert values(off)["training.loss"] == "cross_entropy"


def test_keys_may_replace_those_of_a_merge_as_yaml_has_it(tmp_path: Path) -> None:
    assert (
        values(from_text(tmp_path, f"<<: {{learning_rate: 1.0e-3}}\n{AXOLOTL}"))["training.learning_rate"]
        == 2e-4
    )


def test_exact_deduplication_of_axolotl_is_kept(tmp_path: Path) -> None:
    text = DFT_FILES["axolotl"].replace("use_dft", "dataset_exact_deduplication")
    assert values(from_text(tmp_path, text))["data.drop_duplicates"] is True


@pytest.mark.parametrize(
    "text",
    [
        DFT_FILES["axolotl"].replace("use_dft: true", "experts_implementation: NAME"),
        DFT_FILES["ms-swift"].replace("enable_dft_loss: true", "experts_impl: NAME"),
    ],
    ids=["axolotl", "ms-swift"],
)
def test_kernel_of_experts_is_kept_and_one_that_cannot_train_is_a_question(text: str, tmp_path: Path) -> None:
    key = "experts_implementation" if "experts_implementation" in text else "experts_impl"
    assert values(from_text(tmp_path, text.replace("NAME", "batched_mm")))["kernels.experts"] == "batched_mm"
    for name, why in (("deepgemm", "compute no gradients"), ("scattermoe", "does not have")):
        fate, words = row(from_text(tmp_path, text.replace("NAME", name)), key)
        assert fate == "question"
        assert why in words


def test_weights_of_ligers_loss_become_the_chunked_loss(tmp_path: Path) -> None:
    text = (
        DFT_FILES["axolotl"].replace("use_dft", "liger_use_token_scaling")
        + "liger_fused_linear_cross_entropy: true\n"
    )
    found = values(from_text(tmp_path, text))
    assert (found["training.loss"], found["kernels.loss"]) == ("dft", "chunked")


def test_split_test_of_trl_is_read_only_where_it_is_evaluated(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: m\ndataset_name: d\ndataset_config: en\nassistant_only_loss: "
        "true\neval_strategy: steps\neval_steps: 9\n"
    )
    (source,) = values(from_text(tmp_path, text))["data.eval"]
    assert (source["path"], source["split"], source["name"]) == ("d", "test", "en")
    result = from_text(
        tmp_path, text.replace("strategy: steps", 'strategy: "no"') + "dataset_test_split: dev\n"
    )
    assert values(result)["data.eval"] is None
    assert row(result, "dataset_test_split") == ("dropped", "`eval_strategy` evaluates nothing")
    assert row(result, "eval_steps") == ("dropped", "there are no rows to evaluate")


def test_entries_of_dataset_info_are_sources_and_have_rows_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(DATASET_INFO, encoding="utf-8")
    result = imported(tmp_path, "llama-factory")
    found = values(result)
    first, second = found["data.train"]
    assert (first["path"], first["rename_columns"], first["max_rows"]) == (
        str(tmp_path / "data" / "answers.json"),
        {"question": "instruction"},
        1000,
    )
    assert (second["path"], second["name"], second["format"]) == ("acme/chats", "en", "messages")
    assert found["data.roles.bot"] == "assistant"
    used = {name: entry for name, entry in json.loads(DATASET_INFO).items() if name != "unused"}
    assert {row.path for row in result.rows if row.path[0] == "dataset_info.json"} == {
        ("dataset_info.json", *leaf) for leaf in leaves(used)
    }


@pytest.mark.parametrize(
    ("more", "shuffle", "fate"),
    [
        ("", False, "converted"),
        ("val_size: 0.1\n", True, "question"),
        ("streaming: true\nmax_steps: 9\n", True, "question"),
    ],
)
def test_order_of_the_files_is_kept_where_llama_factory_keeps_it(
    more: str, shuffle: bool, fate: str, tmp_path: Path
) -> None:
    text = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: d\ntemplate: llama3\n"
    result = from_text(tmp_path, f"{text}disable_shuffling: true\n{more}")
    assert (values(result)["data.shuffle"], row(result, "disable_shuffling")[0]) == (shuffle, fate)
    off = from_text(tmp_path, f"{text}disable_shuffling: false\n{more}")
    assert (values(off)["data.shuffle"], row(off, "disable_shuffling")[0]) == (True, "dropped")


def test_without_dataset_info_the_data_set_is_a_question(tmp_path: Path) -> None:
    result = imported(tmp_path, "llama-factory")
    assert row(result, "dataset")[0] == "question"
    assert values(result)["data.train"][0]["path"] == "NAME"


def test_number_of_gpus_gives_the_global_batch(tmp_path: Path) -> None:
    without, with_gpus = imported(tmp_path, "axolotl"), imported(tmp_path, "axolotl", num_gpus=4)
    assert "training.global_batch_size" in dict(without.decisions)
    assert values(without)["training.gradient_accumulation_steps"] == 4
    assert values(with_gpus)["training.global_batch_size"] == 2 * 4 * 4
    assert row(with_gpus, "gradient_accumulation_steps") == ("computed", "2 × 4 × 4 ranks")
    assert "training.global_batch_size" not in dict(with_gpus.decisions)
    assert (values(without)["launch.num_processes"], values(with_gpus)["launch.num_processes"]) == ("auto", 4)
    assert "num_processes: 4  # --num-gpus 4\n" in with_gpus.text


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "asks"),
    [(8, [], False), (16, [], True), (16, ["launch.num_machines=2"], False)],
)
def test_more_gpus_than_a_machine_has_ask_for_the_machines(
    num_gpus: int, overrides: list[str], asks: bool, tmp_path: Path
) -> None:
    """Else the recipe starts 16 ranks on one machine of 8 GPUs."""
    found = imported(tmp_path, "axolotl", num_gpus=num_gpus, overrides=overrides)
    assert ("launch.num_machines" in dict(found.decisions)) == asks
    assert values(found)["launch.num_machines"] == (2 if overrides else 1)


def test_keys_of_adapters_have_no_effect_without_one(tmp_path: Path) -> None:
    result = from_text(tmp_path, AXOLOTL.replace("adapter: qlora", "adapter:"))
    found = values(result)
    assert (found["lora"], found["quantization"]) == (None, None)
    assert row(result, "lora_r") == ("dropped", "no effect: the file trains no adapter")
    soup = values(
        from_text(tmp_path, SOUP.replace("r: 64", "r: 0").replace("quantization: 4bit", "quantization: none"))
    )
    assert (soup["lora"], soup["quantization"]) == (None, None)


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}</s>/{% endfor %}"
    + "{# long #}" * 500
)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            {
                "model_name_or_path": "gpt2",
                "dataset_name": "a/b",
                "max_length": 64,
                "assistant_only_loss": True,
                "chat_template": TEMPLATE,
            },
            "data",
        ),
        (
            {
                "base_model": "gpt2",
                "datasets": [{"path": "a/b"}],
                "chat_template": "jinja",
                "chat_template_jinja": TEMPLATE,
            },
            "data",
        ),
        (
            {
                "base_model": "gpt2",
                "datasets": [{"path": "a/b", "type": "chat_template", "chat_template_jinja": TEMPLATE}],
            },
            "data.train[0]",
        ),
    ],
)
def test_chat_template_as_text_is_kept_and_is_no_path(tmp_path: Path, text: dict[str, Any], key: str) -> None:
    """Alignment-handbook's configurations have it; a validation then took the text for a file's name."""
    result = from_text(tmp_path, yaml.safe_dump(text))
    written = loaded(result)
    source = written.data if key == "data" else written.data.train[0]
    assert source.chat_template == TEMPLATE
    kept = resolve(written, Machine("cuda", 4, 64, "H100"), cwd=tmp_path).recipe.data
    assert (kept if key == "data" else kept.train[0]).chat_template == TEMPLATE
    assert resolve_template(TEMPLATE) == TEMPLATE


HANDBOOK = """\
model_name_or_path: org/base
dataset_mixture:
  datasets:
    - {id: org/chats, config: all, split: train_sft, columns: [messages], weight: 1.0}
    - {id: org/more, config: SFT, split: think, columns: [messages, chat_template_kwargs], weight: 0.3}
  test_split_size: 1000
  seed: 0
assistant_only_loss: true
packing: true
packing_strategy: ffd
max_length: 2048
"""


def test_mixture_of_the_alignment_handbook(tmp_path: Path) -> None:
    """Its recipes, and those of SmolLM3, had up to 128 questions."""
    result = from_text(tmp_path, HANDBOOK)
    recipe = loaded(result)
    assert [(each.path, each.name, each.split) for each in recipe.data.train] == [
        ("org/chats", "all", "train_sft"),
        ("org/more", "SFT", "think"),
    ]
    assert (values(result)["data.eval.rows"], values(result)["data.packing_strategy"]) == (1000, "bfd")
    assert questions(result) == ["dataset_mixture.datasets[1].weight"]
    assert values(from_text(tmp_path, HANDBOOK.replace("1000", "0.02")))["data.eval.fraction"] == 0.02
    older = from_text(
        tmp_path,
        "model_name_or_path: g\ndataset_mixer: {org/a: 1.0, org/b: 0.5}\ndataset_splits: [train_sft, "
        "test_sft]\n",
    )
    assert (older.tool, [each.path for each in loaded(older).data.train]) == ("TRL", ["org/a", "org/b"])
    assert questions(older) == ["dataset_mixer.org/b", "dataset_splits"]


def test_comments_of_the_file_are_kept(tmp_path: Path) -> None:
    text = imported(tmp_path, "axolotl").text
    assert (
        "  # LoRA of a small model on two data sets\n  name_or_path: Qwen/Qwen2.5-1.5B  # from "
        "base_model; the base, not Instruct\n" in text
    )
    assert "learning_rate: 0.0002  # from learning_rate; higher than in the paper\n" in text


def test_comment_without_a_value_here_names_its_place(tmp_path: Path) -> None:
    text = from_text(tmp_path, AXOLOTL + "# of the log\nwandb_log_model: checkpoint\n# the last words\n").text
    assert text.endswith(
        "# `wandb_log_model` of config.yaml: of the log\n# at the end of config.yaml: the last words\n"
    )


def test_value_that_a_recipe_refuses_is_a_question_with_the_reason(tmp_path: Path) -> None:
    result = from_text(tmp_path, AXOLOTL.replace("paged_adamw_8bit", "lion_8bit"))
    fate, reason = row(result, "optimizer")
    assert fate == "question"
    assert "lion_8bit" in reason
    assert values(result).get("training.optim") is None


def test_secrets_are_neither_written_nor_shown(tmp_path: Path) -> None:
    secret = "hf_" + "a1B2" * 8
    result = from_text(tmp_path, TRL + f"hub_token: {secret}\nhub_model_id: {secret}\n")
    assert secret not in result.text + json.dumps([row.as_dict() for row in result.rows])
    assert row(result, "hub_token")[0] == "dropped"


def test_file_of_data_sets_of_fms_is_included(tmp_path: Path) -> None:
    (tmp_path / "data_config.yaml").write_text(FMS_DATA, encoding="utf-8")
    recipe = loaded(imported(tmp_path, "fms-command"))
    one, other = recipe.data.train
    assert (one.path, one.weight, one.loss_on, one.rename_columns) == (
        "a.jsonl",
        0.3,
        "completion",
        {"question": "prompt", "answer": "completion"},
    )
    assert (other.path, other.weight, other.format) == ("b.jsonl", 0.7, "messages")
    assert recipe.data.mixture.stopping_strategy == "first_exhausted"


@pytest.mark.parametrize(
    ("text", "row_key", "key"),
    [
        (
            "model_name_or_path: a\ndataset_name: b\npacking: true\nmax_length: null\n",
            "max_length",
            "data.max_length",
        ),
        ("base_model: gpt2\nmicro_batch_size: 1\nsequence_len:\n", "sequence_len", "data.max_length"),
        (
            "model_name_or_path: a\ndataset_name: b\npacking: true\nuse_peft: true\nlora_r: null\n",
            "lora_r",
            "lora.r",
        ),
        (
            "model_name_or_path: a\nstage: sft\ntemplate: x\nper_device_train_batch_size: null\n",
            "per_device_train_batch_size",
            "training.per_device_train_batch_size",
        ),
    ],
)
def test_null_is_a_question_and_never_the_default_of_a_key_left_out(
    tmp_path: Path, text: str, row_key: str, key: str
) -> None:
    """TRL truncates nothing with `max_length: null`, and at 1,024 without the key."""
    result = from_text(tmp_path, text)
    (found,) = [each for each in result.rows if each.key == row_key]
    assert (found.fate, found.targets) == (Fate.QUESTION, (tuple(key.split(".")),))
    section, _, name = key.partition(".")
    assert name not in (yaml.safe_load(result.text).get(section) or {})


@pytest.mark.parametrize(
    ("text", "asked", "path"),
    [
        (
            "base_model: g\nsequence_len: 8\ntest_datasets: [{path: e}]\nval_set_size: 0.1\n",
            "val_set_size",
            "e",
        ),
        (
            "base_model: g\nsequence_len: 8\nval_set_size: 0.1\ntest_datasets: [{path: e}]\n",
            "test_datasets[0].path",
            None,
        ),
    ],
)
def test_held_out_share_beside_rows_of_evaluation_is_a_question(
    tmp_path: Path, text: str, asked: str, path: str | None
) -> None:
    result = from_text(tmp_path, text)
    fate, words = row(result, asked)
    assert (fate, words.partition(" from ")[0]) == ("question", "`data.eval` has another value")
    evaluated = loaded(result).data.eval
    assert [each.path for each in evaluated] == [path] if isinstance(evaluated, list) else path is None


def test_trl_holds_out_rows_of_a_mixture_alone(tmp_path: Path) -> None:
    """`get_dataset` of TRL splits a mixture; the single data set has its own split."""
    text = (
        "model_name_or_path: g\ndataset_name: a\npacking: true\neval_strategy: "
        "steps\ndataset_test_split: test\ntest_split_size: 0.1\n"
    )
    single, mixed = (
        from_text(tmp_path, text),
        from_text(tmp_path, text + "datasets: [{path: b}, {path: c}]\n", tool="TRL"),
    )
    assert row(single, "test_split_size")[0] == row(mixed, "dataset_test_split")[0] == "dropped"
    recipe = loaded(single)
    assert [(each.path, each.split) for each in recipe.data.eval] == [("a", "test")]  # type: ignore[union-attr]
    assert (values(mixed)["data.eval.fraction"], [each["path"] for each in values(mixed)["data.train"]]) == (
        0.1,
        ["b", "c"],
    )
    assert row(mixed, "dataset_name") == ("dropped", "the mixture is read, and not the single data set")


def test_alpaca_rows_of_axolotl_have_no_chat_template(tmp_path: Path) -> None:
    rows = (
        "base_model: g\nsequence_len: 8\nchat_template: chatml\ndatasets: [{path: a, type: "
        "chat_template}, {path: b, type: alpaca}]\n"
    )
    result = from_text(tmp_path, rows)
    data = loaded(result).data
    assert (data.chat_template, [each.chat_template for each in data.train]) == ("chatml", [None, "none"])
    assert "chat_template: none  # default of axolotl: by the prompts of Stanford Alpaca" in result.text


@pytest.mark.parametrize("variant", ["alpaca:chat", "alpaca.load_no_prompt", "completion:text"])
def test_variant_of_a_prompt_strategy_of_axolotl_is_a_question(tmp_path: Path, variant: str) -> None:
    """axolotl/utils/data: a style after a colon and a function after a dot have other prompts than the plain
    name."""
    head = "base_model: g\nsequence_len: 8\nchat_template: chatml\n"
    result = from_text(tmp_path, f"{head}datasets: [{{path: a, type: '{variant}'}}]\n")
    assert row(result, "datasets[0].type")[0] == "question"
    assert not [key for key in ("format:", "separator:") if key in result.text], result.text
    assert row(result, "chat_template")[0] == "dropped"


SECRETS = {
    "my_password": "hunter2secretvalue",
    "tracker_api_key": "abcd1234efgh5678ijkl",
    "env": {"FOO_SECRET": "xyzzy-plugh-1234", "FOO_PASSWORD": 98765432},
    "dataset_kwargs": {"storage_options": {"key": "not-of-a-known-shape", "secret": "wJalrXUtnFEMIK7MDENG"}},
    "unknown": {"deep": [{"url": "https://user:pa55word-of-it@host/x"}]},
}


def test_secrets_in_questions_and_comments_are_masked(tmp_path: Path) -> None:
    text = TRL + yaml.safe_dump(SECRETS) + "seed: 7  # token=abcdef0123456789\n"
    result = from_text(tmp_path, text)
    shown = result.text + json.dumps([each.as_dict() for each in result.rows])
    written = [str(value) for path, value in flattened(SECRETS) if path[-1] != "url"]
    assert len(written) == 6
    assert [each for each in (*written, "pa55word", "abcdef0123456789") if each in shown] == []
    assert "`my_password: '***'`" in result.text


INFO_OF_TEXTS = {
    "texts": {"file_name": "c4.jsonl", "columns": {"prompt": "content"}},
    "plain": {"file_name": "p.jsonl", "columns": {"prompt": "text"}},
    "alpaca": {"file_name": "a.json"},
    "chats": {"file_name": "s.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
}


def test_pretraining_of_llama_factory_reads_texts(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO_OF_TEXTS))
    text = (
        "model_name_or_path: m\nstage: pt\ndataset: texts,plain,alpaca,chats\ntemplate: "
        "llama3\nneat_packing: false\n"
    )
    found = from_text(tmp_path, text)
    sources = found.recipe.data.train
    assert [source.format for source in sources] == ["text"] * 4
    assert [source.rename_columns for source in sources] == [
        {"content": "text"},
        {},
        {"instruction": "text"},
        {},
    ]
    assert [key for key, words in found.decisions if "the first message" in words] == ["data.train[3]"]
    assert found.recipe.data.packing
    assert row(found, "template")[0] == "dropped"


@pytest.mark.parametrize(
    ("own", "params", "is_asked"),
    [
        (
            "warmup_steps: 100\nlr_scheduler_type: linear\n",
            {"type": "WarmupCosineLR", "params": {"warmup_type": "linear"}},
            True,
        ),
        ("warmup_steps: 100\n", {"type": "WarmupLR", "params": {"warmup_type": "linear"}}, True),
        (
            "warmup_steps: 100\nlr_scheduler_type: cosine\n",
            {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto"}},
            False,
        ),
        ("", {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7, "warmup_type": "linear"}}, False),
    ],
)
def test_schedule_of_deepspeed_comes_before_that_of_the_trainer(
    tmp_path: Path, own: str, params: dict[str, Any], is_asked: bool
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "scheduler": params}))
    text = "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\ndeepspeed: ds.json\n"
    found = from_text(tmp_path, text + own)
    asked = [
        each
        for each in found.rows
        if each.fate is Fate.QUESTION and "DeepSpeed's own schedule" in each.reason
    ]
    assert bool(asked) is is_asked
    if not own:
        assert (values(found)["training.lr_scheduler_type"], found.recipe.training.warmup_steps) == (
            "cosine",
            7,
        )


@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "fate", "steps"),
    [
        ("num_train_epochs: 2\n", "", Fate.DROPPED, None),
        ("", "max_steps: -1\n", Fate.DROPPED, -1),
        ("max_steps: 500\n", "", Fate.QUESTION, 500),
        ("", "max_steps: 500\n", Fate.QUESTION, 500),
        ("max_steps: 1000\n", "", Fate.DROPPED, 1000),
        ("", "max_steps: 1000\n", Fate.DROPPED, 1000),
    ],
)
def test_length_of_deepspeeds_schedule_is_not_that_of_the_training(
    before: str, after: str, fate: Fate, steps: int | None, is_inline: bool, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(SCHEDULE))
    named = f"deepspeed: {json.dumps(SCHEDULE) if is_inline else 'ds.json'}\n"
    text = "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\n"
    found = from_text(tmp_path, text + before + named + after)
    [row] = [each for each in found.rows if each.key.endswith("total_num_steps")]
    assert (row.fate, values(found).get("training.max_steps")) == (fate, steps)


SCHEDULE: dict[str, Any] = {
    "zero_optimization": {"stage": 3},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 7, "warmup_type": "linear", "total_num_steps": 1000},
    },
}


@pytest.mark.parametrize("is_alone", [True, False])
def test_schedule_without_a_trainer(is_alone: bool, tmp_path: Path) -> None:
    text = (
        json.dumps(SCHEDULE) if is_alone else f"distributed_type: DEEPSPEED\ndeepspeed_config: {SCHEDULE}\n"
    )
    found = from_text(tmp_path, text)
    [row] = [each for each in found.rows if each.key.endswith("total_num_steps")]
    assert (row.fate, values(found).get("training.max_steps")) == (
        (Fate.CONVERTED, 1000) if is_alone else (Fate.QUESTION, None)
    )


def test_targets_of_a_dtype_beside_adapters_are_all_in_the_account(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: default\npure_bf16: true\n"
    (found,) = [each for each in from_text(tmp_path, text).rows if each.key == "pure_bf16"]
    assert set(found.targets) == {("model", "frozen_dtype"), ("precision", "mixed_precision")}
