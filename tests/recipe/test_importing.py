"""Configurations of other trainers as recipes: every key has one row of the account, and the text loads with the values it should have."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.format.templates import resolve_template
from fsdp_tune.recipe.read.foreign.importing import ImportedRecipe, import_file
from fsdp_tune.recipe.read.foreign.ledger import Fate, flattened, leaves
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.read.tools import foreign_tool
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.keys import values_by_key
from tests.recipe.foreign_files import ACCELERATE, AUTOMODEL, AXOLOTL, DATASET_INFO, FILES, FMS_DATA, SOUP, TRL, UNSLOTH

TEMPLATES = ("chatml", "qwen2.5", "llama3")


def write(directory: Path, name: str) -> Path:
    _, file, text = FILES[name]
    (directory / file).write_text(text, encoding="utf-8")
    return directory / file


def imported(directory: Path, name: str, **options: Any) -> ImportedRecipe:
    return import_file(write(directory, name), templates=TEMPLATES, **options)


def from_text(directory: Path, text: str, file: str = "config.yaml", **options: Any) -> ImportedRecipe:
    (directory / file).write_text(text, encoding="utf-8")
    return import_file(directory / file, templates=TEMPLATES, **options)


def values(result: ImportedRecipe) -> dict[str, Any]:
    """The recipe as it loads, by key."""
    return values_by_key(parse_recipe(result.text, Path("recipe.yaml")).recipe)


def row(result: ImportedRecipe, key: str) -> tuple[str, str]:
    """What became of a key, and why."""
    (found,) = [row for row in result.rows if row.key == key]
    return found.fate.value, found.reason


def words_of(path: Path) -> set[str]:
    """Every option and variable of a command, found without the parser under test."""
    words = shlex.split(path.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    return {word.lstrip("-").partition("=")[0] for word in words if word.startswith("--")}


ARGUMENTS_OF_UNSLOTH = [
    *(f"from_pretrained.{name}" for name in ("model_name", "max_seq_length", "dtype", "load_in_4bit")),
    *(f"get_peft_model.{name}" for name in ("r", "target_modules", "lora_alpha", "lora_dropout", "bias", "use_gradient_checkpointing")),
    *("get_peft_model.random_state", "get_peft_model.loftq_config", "load_dataset[0].path", "load_dataset[0].split"),
    *(f"SFTTrainer.{name}" for name in ("model", "tokenizer", "train_dataset", "args")),
    *(f"SFTConfig.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "learning_rate")),
    *(f"SFTConfig.{name}" for name in ("fp16", "bf16", "logging_steps", "output_dir", "report_to")),
]

# ---- The account


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_is_in_exactly_one_row(name: str, tmp_path: Path) -> None:
    result = imported(tmp_path, name)
    path = tmp_path / FILES[name][1]
    if path.suffix == ".sh":
        assert words_of(path) == {str(row.path[-1]) for row in result.rows if row.path[0] != "environment"}
        return
    if path.suffix == ".py":
        assert [row.key for row in result.rows] == ARGUMENTS_OF_UNSLOTH
        return
    for leaf in leaves(yaml.safe_load(path.read_text(encoding="utf-8"))):
        assert len([row for row in result.rows if leaf[: len(row.path)] == row.path]) == 1, leaf


@pytest.mark.parametrize("name", FILES)
def test_tool_is_recognised_and_every_dropped_key_has_its_reason(name: str, tmp_path: Path) -> None:
    result = imported(tmp_path, name)
    assert result.tool == FILES[name][0]
    assert [row.key for row in result.rows if row.fate in (Fate.DROPPED, Fate.QUESTION) and not row.reason] == []
    assert [row.key for row in result.rows if row.fate in (Fate.KEPT, Fate.CONVERTED, Fate.COMPUTED) and not row.targets] == []
    assert sum(result.counts.values()) == len(result.rows)


@pytest.mark.parametrize("name", FILES)
def test_every_question_is_a_comment_of_the_recipe_and_every_value_has_its_origin(name: str, tmp_path: Path) -> None:
    result = imported(tmp_path, name)
    asked = [row.key for row in result.rows if row.fate is Fate.QUESTION] + [key for key, _ in result.decisions]
    lines = [line.strip() for line in result.text.splitlines() if "# DECIDE: " in line]
    assert len(lines) == len(asked)
    for line in result.text.splitlines():
        if not line.lstrip().startswith("#") and not line.rstrip().endswith(":"):
            assert "  # " in line, line


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_loads(name: str, tmp_path: Path) -> None:
    parse_recipe(imported(tmp_path, name).text, Path("recipe.yaml"))


def test_unknown_and_nested_keys_are_questions(tmp_path: Path) -> None:
    result = from_text(tmp_path, "base_model: gpt2\nsequence_len: 8\nnested:\n  deep: [{x: 1}, {y: {z: 2}}]\n  flat: []\n")
    assert [row.key for row in result.rows if row.fate is Fate.QUESTION] == ["nested.deep[0].x", "nested.deep[1].y.z", "nested.flat"]


def test_rows_have_the_line_of_the_key(tmp_path: Path) -> None:
    lines = {row.key: row.line for row in imported(tmp_path, "axolotl").rows}
    text = AXOLOTL.splitlines()
    assert text[lines["sequence_len"] - 1].startswith("sequence_len:")  # type: ignore[operator]
    assert text[lines["fsdp_config.fsdp_version"] - 1].strip().startswith("fsdp_version:")  # type: ignore[operator]


# ---- Values by tool

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
    "fms-command": {"model.name_or_path": "bigscience/bloom-560m", "model.dtype": "bf16", "launch.num_processes": 8},
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
    "trl-command": {"data.max_length": 1024, "training.global_batch_size": 128, "launch.num_processes": 2, "data.packing": True},
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
    "ms-swift-yaml": {"data.loss_on": "last_assistant", "lora": None, "quantization": None, "training.learning_rate": 1e-5},
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
    "ms-swift": [{"path": "AI-ModelScope/alpaca-gpt4-data-en", "max_rows": 500}, {"path": "acme/chats", "name": "en"}],
    "transformers": [{"path": "train.txt"}],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_mean_the_same_here(name: str, tmp_path: Path) -> None:
    found = values(imported(tmp_path, name))
    assert {key: found.get(key) for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", SOURCES)
def test_data_sets_are_sources(name: str, tmp_path: Path) -> None:
    sources = values(imported(tmp_path, name))["data.train"]
    assert [{key: source[key] for key in wanted} for source, wanted in zip(sources, SOURCES[name], strict=True)] == SOURCES[name]


def test_held_out_split_is_read_only_where_it_is_evaluated(tmp_path: Path) -> None:
    assert values(imported(tmp_path, "trl"))["data.eval"][0]["split"] == "test"
    result = from_text(tmp_path, TRL.replace("eval_strategy: steps", 'eval_strategy: "no"'))
    assert values(result)["data.eval"] is None
    assert row(result, "eval_steps") == ("dropped", "there are no rows to evaluate")


# ---- Other files


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


def test_without_dataset_info_the_data_set_is_a_question(tmp_path: Path) -> None:
    result = imported(tmp_path, "llama-factory")
    assert row(result, "dataset")[0] == "question"
    assert values(result)["data.train"][0]["path"] == "NAME"


def test_file_of_the_launcher_is_read_and_the_command_comes_first(tmp_path: Path) -> None:
    (tmp_path / "fsdp2.yaml").write_text(ACCELERATE, encoding="utf-8")
    result = imported(tmp_path, "trl-command")
    found = values(result)
    assert (found["fsdp.activation_checkpointing"], found["launch.num_processes"]) == ("full", 2)
    fate, reason = row(result, "launcher.config_file.num_processes")
    assert fate == "dropped"
    assert "comes first" in reason


def test_missing_file_of_the_launcher_is_a_question(tmp_path: Path) -> None:
    fate, reason = row(imported(tmp_path, "trl-command"), "launcher.config_file")
    assert fate == "question"
    assert "fsdp-tune import fsdp2.yaml" in reason


# ---- Batch, adapters, comments


def test_number_of_gpus_gives_the_global_batch(tmp_path: Path) -> None:
    without, with_gpus = imported(tmp_path, "axolotl"), imported(tmp_path, "axolotl", num_gpus=4)
    assert "training.global_batch_size" in dict(without.decisions)
    assert values(without)["training.gradient_accumulation_steps"] == 4
    assert values(with_gpus)["training.global_batch_size"] == 2 * 4 * 4
    assert row(with_gpus, "gradient_accumulation_steps") == ("computed", "2 × 4 × 4 ranks")
    assert "training.global_batch_size" not in dict(with_gpus.decisions)
    assert (values(without)["launch.num_processes"], values(with_gpus)["launch.num_processes"]) == ("auto", 4)
    assert "num_processes: 4  # --num-gpus 4\n" in with_gpus.text


def test_number_of_gpus_that_the_file_contradicts_is_a_question(tmp_path: Path) -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\nnum_machines: 1\nfsdp_config: {fsdp_version: 2}\n"
    result = from_text(tmp_path, text, num_gpus=4)
    assert values(result)["launch.num_processes"] == 8
    assert dict(result.decisions)["launch.num_processes"] == "the file says 8 GPUs, and `--num-gpus` 4"


def test_keys_of_adapters_have_no_effect_without_one(tmp_path: Path) -> None:
    result = from_text(tmp_path, AXOLOTL.replace("adapter: qlora", "adapter:"))
    found = values(result)
    assert (found["lora"], found["quantization"]) == (None, None)
    assert row(result, "lora_r") == ("dropped", "no effect: the file trains no adapter")


TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}</s>/{% endfor %}" + "{# long #}" * 500


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            {"model_name_or_path": "gpt2", "dataset_name": "a/b", "max_length": 64, "assistant_only_loss": True, "chat_template": TEMPLATE},
            "data",
        ),
        ({"base_model": "gpt2", "datasets": [{"path": "a/b"}], "chat_template": "jinja", "chat_template_jinja": TEMPLATE}, "data"),
        ({"base_model": "gpt2", "datasets": [{"path": "a/b", "type": "chat_template", "chat_template_jinja": TEMPLATE}]}, "data.train[0]"),
    ],
)
def test_chat_template_as_text_is_kept_and_is_no_path(tmp_path: Path, text: dict[str, Any], key: str) -> None:
    """Alignment-handbook's configurations have it; a validation then took the text for a file's name."""
    result = from_text(tmp_path, yaml.safe_dump(text))
    loaded = parse_recipe(result.text, tmp_path / "made.yaml")
    source = loaded.recipe.data if key == "data" else loaded.recipe.data.train[0]
    assert source.chat_template == TEMPLATE
    kept = resolve(loaded.recipe, Machine("cuda", 4, 64, "H100"), cwd=tmp_path).recipe.data
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
    recipe = parse_recipe(result.text, tmp_path / "made.yaml").recipe
    assert [(each.path, each.name, each.split) for each in recipe.data.train] == [
        ("org/chats", "all", "train_sft"),
        ("org/more", "SFT", "think"),
    ]
    assert (values(result)["data.eval.rows"], values(result)["data.packing_strategy"]) == (1000, "bfd")
    questions = [each.key for each in result.rows if each.fate is Fate.QUESTION]
    assert questions == ["dataset_mixture.datasets[1].weight"]
    assert values(from_text(tmp_path, HANDBOOK.replace("1000", "0.02")))["data.eval.fraction"] == 0.02


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HANDBOOK.replace("packing_strategy: ffd", "beta: 0.1"), "`beta` of TRL: this release has no preference tuning"),
        ("model_name_or_path: a\ndo_eval: true\nmax_prompt_length: 9\nbeta: 1\n", "`beta` of TRL: this release has no preference tuning"),
        ("step_scheduler: {num_epochs: 1}\nflow_matching: {adapter_type: simple}\n", "`flow_matching` of NeMo Automodel"),
    ],
)
def test_other_training_is_refused_by_its_own_keys(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FsdpTuneError, match=re.escape(words)) as caught:
        from_text(tmp_path, text)
    assert caught.value.problems[0].code == "no-counterpart"


def test_llama_factory_trains_an_adapter_unless_it_says_otherwise(tmp_path: Path) -> None:
    text = "model_name_or_path: gpt2\nstage: sft\ncutoff_len: 64\ntemplate: llama3\n"
    found = values(from_text(tmp_path, text))
    assert (found["lora.r"], found["lora.lora_alpha"], found["data.chat_template"]) == (8, 16.0, "llama3")


def test_comments_of_the_file_are_kept(tmp_path: Path) -> None:
    text = imported(tmp_path, "axolotl").text
    assert (
        "  # LoRA of a small model on two data sets\n  name_or_path: Qwen/Qwen2.5-1.5B  # from base_model; the base, not Instruct\n" in text
    )
    assert "learning_rate: 0.0002  # from learning_rate; higher than in the paper\n" in text


def test_value_that_a_recipe_refuses_is_a_question_with_the_reason(tmp_path: Path) -> None:
    result = from_text(tmp_path, AXOLOTL.replace("paged_adamw_8bit", "lion_8bit"))
    fate, reason = row(result, "optimizer")
    assert fate == "question"
    assert "lion_8bit" in reason
    assert values(result).get("training.optim") is None


def test_two_keys_with_different_values_for_one_key_are_a_question(tmp_path: Path) -> None:
    result = from_text(tmp_path, "base_model: gpt2\nsequence_len: 8\nmax_seq_length: 16\n")
    assert values(result)["data.max_length"] == 8
    assert row(result, "max_seq_length") == ("question", "`data.max_length` has another value from `sequence_len`; keep one")


def test_yaml_1_1_of_other_tools_is_read_as_they_read_it(tmp_path: Path) -> None:
    found = values(from_text(tmp_path, "base_model: gpt2\nsequence_len: 1_024\nsample_packing: yes\nlearning_rate: 1e-5\n"))
    assert (found["data.max_length"], found["data.packing"], found["training.learning_rate"]) == (1024, True, 1e-5)


def test_secrets_are_neither_written_nor_shown(tmp_path: Path) -> None:
    secret = "hf_" + "a1B2" * 8
    result = from_text(tmp_path, TRL + f"hub_token: {secret}\nhub_model_id: {secret}\n")
    assert secret not in result.text + json.dumps([row.as_dict() for row in result.rows])
    assert row(result, "hub_token")[0] == "dropped"


# ---- Errors


def refusal(directory: Path, text: str, file: str = "config.yaml", **options: Any) -> str:
    with pytest.raises(FsdpTuneError) as caught:
        from_text(directory, text, file, **options)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2
    return f"{problem.code}: {problem.message}; {problem.hint}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base_model: gpt2\nsequence_len: 8\nrl: dpo\n", "`rl: dpo` of axolotl: this release has no preference tuning"),
        ("model_name_or_path: gpt2\nstage: dpo\ntemplate: x\n", "`stage: dpo` of LLaMA-Factory"),
        (
            "checkpointer: {_component_: a.B}\nteacher_model: {_component_: a.C}\n",
            "`teacher_model` of torchtune: this release has no distillation",
        ),
    ],
)
def test_other_training_is_refused(text: str, words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, text)


def test_unknown_file_says_what_was_tried(tmp_path: Path) -> None:
    found = refusal(tmp_path, "a: 1\nsequence_len: 3\n")
    assert found.startswith("unknown-foreign-file: ")
    assert "axolotl 1, LLaMA-Factory 0, TRL 0" in found
    assert "`--from`" in found
    assert from_text(tmp_path, "a: 1\nsequence_len: 3\n", tool="axolotl").tool == "axolotl"


@pytest.mark.parametrize(
    ("text", "file"), [("- 1\n", "a.yaml"), ("[1]", "a.json"), ("{", "a.json"), ("", "a.yaml"), ("# nothing\n", "a.sh")]
)
def test_file_without_keys_is_one_error(text: str, file: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, text, file).partition(":")[0] in {"not-a-mapping", "yaml-syntax"}


@pytest.mark.parametrize(
    "script",
    [
        "trl dpo --model_name_or_path a",
        "swift rlhf --rlhf_type dpo",
        "accelerate launch --num_processes 8 examples/scripts/ppo/ppo.py --x 1",
        "python run_mlm.py --model_name_or_path a",
        "NPROC_PER_NODE=2 megatron sft --model a",
    ],
)
def test_command_of_another_method_is_refused(script: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, script, "a.sh").startswith("no-counterpart: the command trains by ")


def test_script_with_two_trainings_is_one_error(tmp_path: Path) -> None:
    found = refusal(tmp_path, "trl sft --model_name_or_path a\ntrl sft --model_name_or_path b\n", "a.sh")
    assert "starts 2 programs" in found


# ---- Scripts and notebooks, of which nothing is run


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells], "nbformat": 4})


def test_notebook_is_read_as_its_script(tmp_path: Path) -> None:
    first, _, rest = UNSLOTH.partition("model = FastLanguageModel.get_peft_model(")
    cells = ("%%capture\n!pip install unsloth", first, "model = FastLanguageModel.get_peft_model(" + rest, "this is no Python")
    found = from_text(tmp_path, notebook(*cells), "Qwen.ipynb")
    assert [row.key for row in found.rows] == ARGUMENTS_OF_UNSLOTH
    assert values(found)["lora.lora_alpha"] == 64.0, "a name of another cell"
    assert {row.line for row in found.rows} == {None}


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\nr = (lambda: 8)()\n" + UNSLOTH.replace("lora_rank = 32", "lora_rank = r")
    found = from_text(tmp_path, text, "train.py")
    assert not (tmp_path / "ran").exists()
    assert row(found, "get_peft_model.r") == ("question", "the script computes it: write its value")
    assert row(found, "get_peft_model.lora_alpha")[0] == "question"


def test_plain_training_arguments_keep_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Unsloth replaces the defaults of SFTConfig; a script that passes TrainingArguments gets those of transformers."""
    before, _, after = UNSLOTH.partition("SFTConfig(\n")
    _, _, rest = after.partition("max_steps = 60,\n        learning_rate = 2e-4,\n")
    text = f"{before}TrainingArguments(\n        max_steps = 60,\n{rest}"
    found = from_text(tmp_path, text, "train.py")
    written = yaml.safe_load(found.text)["training"]
    assert (written["learning_rate"], written["per_device_train_batch_size"]) == (5e-5, 8)
    assert not {"weight_decay", "warmup_steps", "seed", "optim", "gradient_accumulation_steps"} & written.keys()
    assert "learning_rate: 5.0e-05  # default of TrainingArguments" in found.text
    loaded = values(found)
    assert (loaded["training.seed"], loaded["data.max_length"], loaded["lora.r"], loaded["quantization.load"]) == (42, 2048, 32, "nf4")
    assert row(found, "TrainingArguments.max_steps")[0] == "kept"
    own = values(from_text(tmp_path, text.replace("TrainingArguments(", "SFTConfig("), "train.py"))
    assert (own["training.seed"], own["training.warmup_steps"]) == (3407, 0.1)


def test_script_in_a_function_with_rows_made_by_code(tmp_path: Path) -> None:
    text = UNSLOTH.replace("True,\n)", "False,\n)", 1)
    body = text.replace("trainer = ", "dataset = dataset.map(format_rows, batched = True)\ntrainer = ").replace("True,\n)", "False,\n)", 1)
    text = "def main(argv):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    found = from_text(tmp_path, text, "train.py")
    assert row(found, "map")[0] == "question"
    assert (values(found)["lora.r"], values(found)["quantization"]) == (32, None)


def test_answers_and_template_of_a_script(tmp_path: Path) -> None:
    text = UNSLOTH + "tokenizer = get_chat_template(tokenizer, 'qwen-2.5', mapping = {'role': 'from'})\n"
    text += "trainer = train_on_responses_only(trainer, instruction_part = 'a', response_part = 'b')\n"
    found = values(from_text(tmp_path, text, "train.py"))
    assert (found["data.chat_template"], found["data.loss_on"]) == ("qwen2.5", "assistant")


def test_call_and_cell_that_are_not_read_are_decisions(tmp_path: Path) -> None:
    other = 'FastLanguageModel.from_pretrained("other")\n'
    found = from_text(tmp_path, notebook(other, UNSLOTH, "x = load_dataset(\n"), "a.ipynb")
    assert [words for key, words in found.decisions if not key] == [
        "`from_pretrained` is called more than once before the trainer is made: the first call is read",
        "cell 3 is not Python that can be read: '(' was never closed (<unknown>, line 1)",
    ]
    assert values(found)["model.name_or_path"] == "other"


@pytest.mark.parametrize(
    ("text", "file", "code"),
    [
        ("from trl import SFTTrainer\nSFTTrainer('gpt2')\n", "a.py", "unknown-foreign-file"),
        (UNSLOTH + "DPOTrainer(model)\n", "a.py", "no-counterpart"),
        (UNSLOTH.replace("FastLanguageModel", "FastVisionModel"), "a.py", "no-counterpart"),
        ("def f(:\n", "a.py", "yaml-syntax"),
        ("not a notebook", "a.ipynb", "yaml-syntax"),
        ('{"cells": 3}', "a.ipynb", "yaml-syntax"),
        (SOUP.replace("task: sft", "task: dpo"), "a.yaml", "no-counterpart"),
        (AUTOMODEL.replace("TrainFinetune", "Benchmarking"), "a.yaml", "no-counterpart"),
    ],
)
def test_file_that_no_recipe_can_be_made_of_is_one_error(text: str, file: str, code: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, text, file).startswith(f"{code}: ")


# ---- Sections that have the names of a recipe's


@pytest.mark.parametrize("name", ["automodel", "soup", "fms"])
def test_foreign_file_with_sections_of_a_recipe_is_recognised(name: str) -> None:
    tool, _, text = FILES[name]
    assert foreign_tool(yaml.safe_load(text)) == tool


def test_full_training_of_soup_has_no_adapter(tmp_path: Path) -> None:
    text = SOUP.replace("r: 64", "r: 0").replace("quantization: 4bit", "quantization: none")
    found = values(from_text(tmp_path, text))
    assert (found["lora"], found["quantization"]) == (None, None)


def test_file_of_data_sets_of_fms_is_included(tmp_path: Path) -> None:
    (tmp_path / "data_config.yaml").write_text(FMS_DATA, encoding="utf-8")
    recipe = parse_recipe(imported(tmp_path, "fms-command").text, Path("recipe.yaml")).recipe
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
    ("line", "key", "value"),
    [
        ("bf16: true", "model.dtype", "bf16"),
        ("bf16: auto", "model.dtype", "bf16"),
        ("bf16: false", "model.dtype", "fp32"),
        ("bf16: true\nadapter: lora", "model.dtype", "fp32"),
        ("warmup_steps: 1", "training.warmup_steps", 2),
        ("warmup_steps: 3", "training.warmup_steps", 3),
        ("debug: false", "data.overlong", "drop"),
        ("excess_length_strategy: truncate", "data.overlong", "truncate"),
        ("excess_length_strategy: raise", "data.overlong", "error"),
    ],
)
def test_axolotl_loads_warms_up_and_drops_as_its_trainer_does(tmp_path: Path, line: str, key: str, value: object) -> None:
    """Each was a difference between axolotl's own trainer and the imported recipe."""
    found = from_text(tmp_path, f"base_model: gpt2\nsequence_len: 8\nmicro_batch_size: 1\n{line}\n")
    assert values(found)[key] == value


def test_axolotl_splits_texts(tmp_path: Path) -> None:
    found = from_text(tmp_path, "base_model: gpt2\nsequence_len: 8\ndatasets: [{path: rows.jsonl, type: completion}]\n")
    assert values(found)["data.overlong"] == "auto"


def test_strategy_of_axolotl_that_is_not_known_is_a_question(tmp_path: Path) -> None:
    found = from_text(tmp_path, "base_model: gpt2\nsequence_len: 8\nexcess_length_strategy: wrap\n")
    assert row(found, "excess_length_strategy")[0] == "question"


def test_decay_of_adam_is_a_question(tmp_path: Path) -> None:
    found = from_text(tmp_path, AUTOMODEL.replace("weight_decay: 0", "weight_decay: 0.1"))
    assert row(found, "optimizer._target_")[0] == "question"


def test_variable_of_the_shell_in_place_of_a_model_is_a_question(tmp_path: Path) -> None:
    found = from_text(tmp_path, "trl sft --model_name_or_path $MODEL --dataset_name $ROWS --learning_rate 1e-5\n", "a.sh")
    assert row(found, "model_name_or_path")[0] == "question"
    assert values(found)["model.name_or_path"] == "MODEL"


# ---- Null, rows to evaluate, order, long rows, secrets


@pytest.mark.parametrize(
    ("text", "row_key", "key"),
    [
        ("model_name_or_path: a\ndataset_name: b\npacking: true\nmax_length: null\n", "max_length", "data.max_length"),
        ("base_model: gpt2\nmicro_batch_size: 1\nsequence_len:\n", "sequence_len", "data.max_length"),
        ("model_name_or_path: a\ndataset_name: b\npacking: true\nuse_peft: true\nlora_r: null\n", "lora_r", "lora.r"),
        (
            "model_name_or_path: a\nstage: sft\ntemplate: x\nper_device_train_batch_size: null\n",
            "per_device_train_batch_size",
            "training.per_device_train_batch_size",
        ),
    ],
)
def test_null_is_a_question_and_never_the_default_of_a_key_left_out(tmp_path: Path, text: str, row_key: str, key: str) -> None:
    """TRL truncates nothing with `max_length: null`, and at 1,024 without the key."""
    result = from_text(tmp_path, text)
    (found,) = [each for each in result.rows if each.key == row_key]
    assert (found.fate, found.targets) == (Fate.QUESTION, (tuple(key.split(".")),))
    section, _, name = key.partition(".")
    assert name not in (yaml.safe_load(result.text).get(section) or {})


def test_null_that_is_the_default_of_the_tool_is_no_question(tmp_path: Path) -> None:
    text = "base_model: gpt2\nsequence_len: 8\nwarmup_steps:\nlr_scheduler:\nexcess_length_strategy:\n"
    result = from_text(tmp_path, text)
    assert row(result, "lr_scheduler") == ("dropped", "no value")
    assert (values(result)["training.warmup_steps"], values(result)["data.overlong"]) == (0.03, "drop")


@pytest.mark.parametrize(
    ("text", "asked", "path"),
    [
        ("base_model: g\nsequence_len: 8\ntest_datasets: [{path: e}]\nval_set_size: 0.1\n", "val_set_size", "e"),
        ("base_model: g\nsequence_len: 8\nval_set_size: 0.1\ntest_datasets: [{path: e}]\n", "test_datasets[0].path", None),
    ],
)
def test_held_out_share_beside_rows_of_evaluation_is_a_question(tmp_path: Path, text: str, asked: str, path: str | None) -> None:
    result = from_text(tmp_path, text)
    fate, words = row(result, asked)
    assert (fate, words.partition(" from ")[0]) == ("question", "`data.eval` has another value")
    evaluated = parse_recipe(result.text, Path("r.yaml")).recipe.data.eval
    assert [each.path for each in evaluated] == [path] if isinstance(evaluated, list) else path is None


def test_trl_holds_out_rows_of_a_mixture_alone(tmp_path: Path) -> None:
    """`get_dataset` of TRL splits a mixture; the single data set has its own split."""
    text = "model_name_or_path: g\ndataset_name: a\npacking: true\neval_strategy: steps\ndataset_test_split: test\ntest_split_size: 0.1\n"
    single, mixed = from_text(tmp_path, text), from_text(tmp_path, text + "datasets: [{path: b}, {path: c}]\n", tool="TRL")
    assert row(single, "test_split_size")[0] == row(mixed, "dataset_test_split")[0] == "dropped"
    recipe = parse_recipe(single.text, Path("r.yaml")).recipe
    assert [(each.path, each.split) for each in recipe.data.eval] == [("a", "test")]  # type: ignore[union-attr]
    assert (values(mixed)["data.eval.fraction"], [each["path"] for each in values(mixed)["data.train"]]) == (0.1, ["b", "c"])
    assert row(mixed, "dataset_name") == ("dropped", "the mixture is read, and not the single data set")


def test_mixture_of_the_older_alignment_handbook(tmp_path: Path) -> None:
    text = "model_name_or_path: g\ndataset_mixer: {org/a: 1.0, org/b: 0.5}\ndataset_splits: [train_sft, test_sft]\n"
    result = from_text(tmp_path, text)
    assert result.tool == "TRL"
    assert [each["path"] for each in values(result)["data.train"]] == ["org/a", "org/b"]
    assert [each.key for each in result.rows if each.fate is Fate.QUESTION] == ["dataset_mixer.org/b", "dataset_splits"]


def test_mixture_alone_tells_the_tool_of_the_file() -> None:
    assert foreign_tool({"model_name_or_path": "a", "dataset_mixture": {"datasets": []}}) == "TRL"


AXOLOTL_ROWS = "base_model: g\nsequence_len: 8\ndatasets: [{path: a, type: completion}, {path: b, type: chat_template}]\n"


@pytest.mark.parametrize(
    ("lines", "shuffle", "asked"),
    [
        ("shuffle_merged_datasets: false\n", True, []),
        ("shuffle_merged_datasets: true\n", True, []),
        ("curriculum_sampling: false\n", True, []),
        ("curriculum_sampling: true\n", True, ["curriculum_sampling"]),
        ("curriculum_sampling: true\nshuffle_merged_datasets: false\n", False, []),
        ("curriculum_sampling: true\nsample_packing: true\nshuffle_merged_datasets: false\n", False, []),
    ],
)
def test_only_the_sequential_sampler_of_axolotl_keeps_the_order(tmp_path: Path, lines: str, shuffle: bool, asked: list[str]) -> None:
    result = from_text(tmp_path, AXOLOTL_ROWS + lines)
    assert values(result)["data.shuffle"] is shuffle
    assert [each.key for each in result.rows if each.fate is Fate.QUESTION] == asked


def test_sampler_of_one_data_set_and_stream_of_axolotl(tmp_path: Path) -> None:
    one = "base_model: g\nsequence_len: 8\ndatasets: [{path: a}]\ncurriculum_sampling: true\n"
    stream = "base_model: g\nsequence_len: 8\npretraining_dataset: [{path: a}]\nmax_steps: 5\nshuffle_merged_datasets: false\n"
    assert [values(from_text(tmp_path, text))["data.shuffle"] for text in (one, stream)] == [False, False]


@pytest.mark.parametrize(
    ("text", "strategy", "fate"),
    [
        ("base_model: g\nsequence_len: 8\ndatasets: [{path: a, type: completion}]\n", "drop", "dropped"),
        ("base_model: g\nsequence_len: 8\ndatasets: [{path: a, type: completion}]\n", "raise", "dropped"),
        (AXOLOTL_ROWS, "truncate", "dropped"),
        (AXOLOTL_ROWS, "drop", "question"),
        (AXOLOTL_ROWS, "raise", "question"),
    ],
)
def test_axolotl_cuts_texts_into_pieces_before_its_strategy(tmp_path: Path, text: str, strategy: str, fate: str) -> None:
    result = from_text(tmp_path, text + f"excess_length_strategy: {strategy}\n")
    assert (values(result)["data.overlong"], row(result, "excess_length_strategy")[0]) == ("auto", fate)


def test_default_for_long_rows_of_axolotl_is_a_question_beside_texts(tmp_path: Path) -> None:
    assert "data.overlong" in dict(from_text(tmp_path, AXOLOTL_ROWS).decisions)


def test_alpaca_rows_of_axolotl_have_no_chat_template(tmp_path: Path) -> None:
    rows = "base_model: g\nsequence_len: 8\nchat_template: chatml\ndatasets: [{path: a, type: chat_template}, {path: b, type: alpaca}]\n"
    result = from_text(tmp_path, rows)
    data = parse_recipe(result.text, Path("r.yaml")).recipe.data
    assert (data.chat_template, [each.chat_template for each in data.train]) == ("chatml", [None, "none"])
    assert "chat_template: none  # default of axolotl: by the prompts of Stanford Alpaca" in result.text


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


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("wandb_api_key", "set WANDB_API_KEY, or log in with `wandb login`"),
        ("hub_token", "set HF_TOKEN, or log in with `hf auth login`"),
        ("api_key", "set the variable that its reader takes"),
    ],
)
def test_reason_names_the_variable_of_the_secret(tmp_path: Path, key: str, words: str) -> None:
    assert row(from_text(tmp_path, TRL + f"{key}: abcdefgh\n"), key) == ("dropped", f"a recipe never contains a secret: {words}")


# ---- Values of another kind than the tool has there


KINDS: tuple[Any, ...] = (1, "x", None, [], {}, [1], {"a": 1}, [{"a": 1}], ["x", ["y"]], 1.5, True)


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, name)
        yield from places(inner, (*path, name))


@pytest.mark.parametrize("name", [name for name, (_, file, _) in FILES.items() if file.endswith((".yaml", ".json"))])
def test_value_of_another_kind_is_a_question_or_refused(tmp_path: Path, name: str) -> None:
    """A random thirtieth of all places and kinds, another one for each tool; 3,879 were tried once."""
    tool, file, text = FILES[name]
    values = yaml.safe_load(text)
    chosen = random.Random(name).sample([(place, kind) for place in places(values) for kind in KINDS], 25)
    for place, kind in [*chosen, *OTHER_KINDS.get(name, ())]:
        changed = copy.deepcopy(values)
        holder: Any = changed
        for part in place[:-1]:
            holder = holder[part]
        holder[place[-1]] = kind
        (tmp_path / file).write_text(json.dumps(changed) if file.endswith(".json") else yaml.safe_dump(changed))
        with contextlib.suppress(FsdpTuneError):
            import_file(tmp_path / file, tool=tool)


OTHER_KINDS: dict[str, list[tuple[tuple[str | int, ...], Any]]] = {
    "axolotl": [(("base_model",), ["x", ["y"]]), (("datasets", 0), {})],
    "trl": [(("lora_target_modules", 0), [{"a": 1}])],
    "accelerate": [(("mixed_precision",), [])],
    "torchtune": [(("dataset",), 1), (("dataset",), [1]), (("epochs",), [{"a": 1}]), (("max_steps_per_epoch",), {})],
    "llama-factory": [(("lora_rank",), "x")],
    "automodel": [(("distributed", "strategy"), {}), (("lr_scheduler", "lr_decay_style"), [])],
    "soup": [(("training",), "x"), (("data", "format"), {})],
    "ms-swift-yaml": [(("loss_scale",), [])],
}
"""Those that ended with a traceback."""


# ---- What a tool does where its file says nothing


PRETRAINING = "swift pt --model m --dataset a.jsonl --loss_scale default --use_chat_template true --template qwen2_5\n"


@pytest.mark.parametrize("command", [PRETRAINING, PRETRAINING.replace("swift pt", "python swift/cli/pt.py")])
def test_pretraining_of_swift_trains_every_token_without_a_template(tmp_path: Path, command: str) -> None:
    found = from_text(tmp_path, command, "run.sh")
    assert found.recipe.data.loss_on == "all"
    assert row(found, "command") == ("converted", "`swift pt` trains every token")
    assert {row(found, key)[0] for key in ("loss_scale", "use_chat_template", "template")} == {"dropped"}
    assert "data.chat_template" in dict(found.decisions)
    tuning = from_text(tmp_path, command.replace("swift pt", "swift sft").replace("pt.py", "sft.py"), "run.sh")
    assert tuning.recipe.data.loss_on == "assistant"
    assert "command" not in {each.key for each in tuning.rows}


@pytest.mark.parametrize(
    ("more", "packing"),
    [
        ("stage: pt\n", (True, "wrapped")),
        ("stage: pt\npacking: false\n", (False, "bfd")),
        ("stage: pt\npacking: true\n", (True, "wrapped")),
    ],
)
def test_pretraining_of_llama_factory_packs_joined_texts(tmp_path: Path, more: str, packing: tuple[bool, str]) -> None:
    data = from_text(
        tmp_path, "model_name_or_path: m\ndataset: a\ntemplate: default\ncutoff_len: 64\nfinetuning_type: full\n" + more
    ).recipe.data
    assert (data.packing, data.packing_strategy, data.loss_on) == (*packing, "all")


TORCHTUNE_STEP = """\
checkpointer: {{checkpoint_dir: m}}
dataset: {{_component_: torchtune.datasets.alpaca_dataset}}
model: {{_component_: torchtune.models.llama3_2.llama3_2_1b}}
optimizer: {{_component_: {}, lr: 1.0e-5{}}}
"""
AUTOMODEL_STEP = """\
step_scheduler: {{max_steps: 4}}
model: {{_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: m}}
optimizer: {{_target_: {}, lr: 1.0e-5{}}}
"""


@pytest.mark.parametrize("text", [TORCHTUNE_STEP, AUTOMODEL_STEP])
@pytest.mark.parametrize(("kind", "decay"), [("torch.optim.Adam", 0.0), ("torch.optim.AdamW", 0.01), ("torch.optim.SGD", 0.0)])
def test_weight_decay_is_that_of_the_class(tmp_path: Path, text: str, kind: str, decay: float) -> None:
    found = values_by_key(from_text(tmp_path, text.format(kind, "")).recipe)
    assert (found.get("training.weight_decay") or 0.0) == decay


@pytest.mark.parametrize("text", [TORCHTUNE_STEP, AUTOMODEL_STEP])
def test_decay_of_adam_asks_for_the_optimizer(tmp_path: Path, text: str) -> None:
    rows = from_text(tmp_path, text.format("torch.optim.Adam", ", weight_decay: 0.1")).rows
    asked = [each for each in rows if each.fate is Fate.QUESTION]
    assert [each.targets for each in asked if "Adam adds the decay" in each.reason] == [(("training", "optim"),)]


DEEPSPEED_SCHEDULE = '{{"zero_optimization": {{"stage": 3}}, "scheduler": {{"type": "WarmupLR", "params": {{"warmup_max_lr": 1e-4{}}}}}}}'


@pytest.mark.parametrize(
    ("more", "steps", "is_asked"),
    [
        ("", 1000, True),
        (', "warmup_num_steps": 10', 10, True),
        (', "warmup_num_steps": 10, "warmup_type": "linear"', 10, False),
        (', "warmup_num_steps": 10, "warmup_type": "log"', 10, False),
    ],
)
def test_warmup_of_deepspeed_is_logarithmic_unless_it_says_linear(tmp_path: Path, more: str, steps: int, is_asked: bool) -> None:
    found = from_text(tmp_path, DEEPSPEED_SCHEDULE.format(more), "ds.json", tool="DeepSpeed")
    assert found.recipe.training.warmup_steps == steps
    assert ("training.warmup_steps" in dict(found.decisions)) is is_asked
    asked = {each.key for each in found.rows if each.fate is Fate.QUESTION}
    assert ("scheduler.params.warmup_type" in asked) is ("log" in more)


@pytest.mark.parametrize(
    ("value", "fates"),
    [
        ("{split_batches: true, dispatch_batches: false}", {"question", "dropped"}),
        ("{split_batches: false, even_batches: true}", {"dropped"}),
        ("{gradient_accumulation_kwargs: {num_steps: 4}}", {"question"}),
        ("{}", {"dropped"}),
        ("accelerator.json", {"question"}),
    ],
)
def test_settings_of_accelerate_that_change_a_step_are_questions(tmp_path: Path, value: str, fates: set[str]) -> None:
    found = from_text(tmp_path, TRL + f"accelerator_config: {value}\n")
    assert {each.fate.value for each in found.rows if each.path[0] == "accelerator_config"} == fates


SWIFT_COMMAND = "NPROC_PER_NODE={} swift sft --model m --dataset a.jsonl --max_length 64 --per_device_train_batch_size 2{}\n"


@pytest.mark.parametrize(
    ("ranks", "more", "rows"),
    [(4, "", 16), (16, "", 32), (1, " --gradient_accumulation_steps 4", 8), (3, "", 18)],
)
def test_batch_of_swift_is_sixteen_where_its_file_says_nothing(tmp_path: Path, ranks: int, more: str, rows: int) -> None:
    found = from_text(tmp_path, SWIFT_COMMAND.format(ranks, more), "run.sh")
    assert found.recipe.training.global_batch_size == rows
    without_ranks = from_text(tmp_path, SWIFT_COMMAND.format("", more).replace("NPROC_PER_NODE= ", ""), "run.sh")
    assert without_ranks.recipe.training.global_batch_size == (None if more else 16)


def test_longer_rows_of_swift_are_dropped_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    assert from_text(tmp_path, SWIFT_COMMAND.format(1, ""), "run.sh").recipe.data.overlong == "drop"
    cut = from_text(tmp_path, SWIFT_COMMAND.format(1, " --truncation_strategy right"), "run.sh")
    assert cut.recipe.data.overlong == "truncate"


@pytest.mark.parametrize(
    ("more", "model", "computed", "is_asked"),
    [
        (" --tuner_type full", "fp32", "bf16", True),
        (" --tuner_type full --torch_dtype bfloat16", "bf16", "bf16", False),
        (" --tuner_type full --torch_dtype float32", "fp32", "fp16", False),
        (" --tuner_type full --torch_dtype float32 --bf16 true", "fp32", "bf16", False),
        ("", "fp32", "bf16", False),
    ],
)
def test_dtypes_of_swift(tmp_path: Path, more: str, model: str, computed: str, is_asked: bool) -> None:
    found = from_text(tmp_path, SWIFT_COMMAND.format(1, more), "run.sh")
    assert (found.recipe.model.dtype, found.recipe.precision.mixed_precision) == (model, computed)
    assert ("model.dtype" in dict(found.decisions)) is is_asked


@pytest.mark.parametrize(
    ("more", "computed"),
    [("finetuning_type: full\n", "no"), ("", "bf16"), ("finetuning_type: full\nbf16: true\n", "bf16"), ("pure_bf16: true\n", "bf16")],
)
def test_llama_factory_computes_in_fp32_without_adapters_and_bf16(tmp_path: Path, more: str, computed: str) -> None:
    text = "model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: default\ncutoff_len: 64\n" + more
    assert from_text(tmp_path, text).recipe.precision.mixed_precision == computed


def test_weights_of_fms_are_loaded_in_bf16(tmp_path: Path) -> None:
    command = "python -m tuning.sft_trainer --model_name_or_path m --training_data_path a.jsonl --output_dir o{}\n"
    full = from_text(tmp_path, command.format(""), "run.sh").recipe.model
    adapters = from_text(tmp_path, command.format(" --peft_method lora"), "run.sh").recipe.model
    assert (full.dtype, adapters.dtype, adapters.frozen_dtype) == ("bf16", "fp32", "auto")


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ("", "bf16"),
        ("bf16: auto\n", "bf16"),
        ("bf16: false\n", "fp32"),
        ("float32: true\n", "fp32"),
        ("adapter: lora\nlora_r: 8\n", "fp32"),
    ],
)
def test_weights_of_axolotl_are_loaded_in_bf16_unless_its_file_says_otherwise(tmp_path: Path, more: str, dtype: str) -> None:
    text = "base_model: m\ndatasets: [{path: rows.jsonl, type: completion}]\nmicro_batch_size: 1\n"
    assert from_text(tmp_path, text + more).recipe.model.dtype == dtype


def test_dtype_of_run_clm_is_that_of_the_files(tmp_path: Path) -> None:
    command = "python run_clm.py --model_name_or_path m --train_file a.txt{}\n"
    assert "model.dtype" in dict(from_text(tmp_path, command.format(""), "run.sh").decisions)
    said = from_text(tmp_path, command.format(" --torch_dtype float32"), "run.sh")
    assert (said.recipe.model.dtype, "model.dtype" in dict(said.decisions)) == ("fp32", False)


INFO_OF_TEXTS = {
    "texts": {"file_name": "c4.jsonl", "columns": {"prompt": "content"}},
    "plain": {"file_name": "p.jsonl", "columns": {"prompt": "text"}},
    "alpaca": {"file_name": "a.json"},
    "chats": {"file_name": "s.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
}


def test_pretraining_of_llama_factory_reads_texts(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO_OF_TEXTS))
    text = "model_name_or_path: m\nstage: pt\ndataset: texts,plain,alpaca,chats\ntemplate: llama3\nneat_packing: false\n"
    found = from_text(tmp_path, text)
    sources = found.recipe.data.train
    assert [source.format for source in sources] == ["text"] * 4
    assert [source.rename_columns for source in sources] == [{"content": "text"}, {}, {"instruction": "text"}, {}]
    assert [key for key, words in found.decisions if "the first message" in words] == ["data.train[3]"]
    assert found.recipe.data.packing
    assert row(found, "template")[0] == "dropped"


@pytest.mark.parametrize(
    ("more", "fate"), [("batch_size: 2\n", "question"), ("batch_size: 8\ngradient_accumulation_steps: 8\n", "dropped")]
)
def test_batch_size_of_axolotl_is_never_the_accumulation(tmp_path: Path, more: str, fate: str) -> None:
    found = from_text(tmp_path, "base_model: m\ndatasets: [{path: a, type: completion}]\nmicro_batch_size: 1\n" + more, num_gpus=1)
    assert row(found, "batch_size")[0] == fate
    assert found.recipe.training.global_batch_size == (8 if fate == "dropped" else 1)


@pytest.mark.parametrize(("epochs", "strategy"), [(0.25, "epoch"), (0.5, "epoch"), (1, "steps")])
def test_one_save_of_all_epochs_is_at_their_end(tmp_path: Path, epochs: float, strategy: str) -> None:
    text = f"base_model: m\ndatasets: [{{path: a, type: completion}}]\nmicro_batch_size: 1\nnum_epochs: {epochs}\nsaves_per_epoch: 2\n"
    found = values(from_text(tmp_path, text))
    assert found["training.save_strategy"] == strategy
    assert found["training.save_steps"] == (0.5 if strategy == "steps" else 500)


def test_axolotl_takes_the_dtype_from_bf16(tmp_path: Path) -> None:
    text = "base_model: m\ndatasets: [{path: a, type: completion}]\nmicro_batch_size: 1\nbf16: true\ntorch_dtype: float32\n"
    found = from_text(tmp_path, text)
    assert (found.recipe.model.dtype, row(found, "torch_dtype")[0]) == ("bf16", "dropped")


@pytest.mark.parametrize(("steps", "warmup"), [(1000, 0.03), (8000, 100)])
def test_default_warmup_of_axolotl_is_at_most_a_hundred_steps(tmp_path: Path, steps: int, warmup: float) -> None:
    text = f"base_model: m\ndatasets: [{{path: a, type: completion}}]\nmicro_batch_size: 1\nmax_steps: {steps}\n"
    assert from_text(tmp_path, text).recipe.training.warmup_steps == warmup


def test_command_of_a_module_of_swift_is_pretraining(tmp_path: Path) -> None:
    found = from_text(tmp_path, "torchrun --nproc_per_node 2 -m swift.cli.pt --model m --dataset a.jsonl --max_length 64\n", "run.sh")
    assert (found.recipe.data.loss_on, found.recipe.launch.num_processes) == ("all", 2)


@pytest.mark.parametrize(
    ("own", "params", "is_asked"),
    [
        ("warmup_steps: 100\nlr_scheduler_type: linear\n", {"type": "WarmupCosineLR", "params": {"warmup_type": "linear"}}, True),
        ("warmup_steps: 100\n", {"type": "WarmupLR", "params": {"warmup_type": "linear"}}, True),
        ("warmup_steps: 100\nlr_scheduler_type: cosine\n", {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto"}}, False),
        ("", {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7, "warmup_type": "linear"}}, False),
    ],
)
def test_schedule_of_deepspeed_comes_before_that_of_the_trainer(tmp_path: Path, own: str, params: dict[str, Any], is_asked: bool) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "scheduler": params}))
    text = "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\ndeepspeed: ds.json\n"
    found = from_text(tmp_path, text + own)
    asked = [each for each in found.rows if each.fate is Fate.QUESTION and "DeepSpeed's own schedule" in each.reason]
    assert bool(asked) is is_asked
    if not own:
        assert (values(found)["training.lr_scheduler_type"], found.recipe.training.warmup_steps) == ("cosine", 7)


def test_targets_of_a_dtype_beside_adapters_are_all_in_the_account(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: default\npure_bf16: true\n"
    (found,) = [each for each in from_text(tmp_path, text).rows if each.key == "pure_bf16"]
    assert set(found.targets) == {("model", "frozen_dtype"), ("precision", "mixed_precision")}


# ---- Files of options that a command names


def test_file_that_a_command_names_is_read_beside_its_options(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO_OF_TEXTS))
    text = "model_name_or_path: m\nstage: pt\ndataset: texts\ncutoff_len: 64\nlearning_rate: 1.0e-4\n"
    (tmp_path / "pt.yaml").write_text(text)
    for command in ("llamafactory-cli train pt.yaml --learning_rate 3e-4", "accelerate launch --num_processes 2 src/train.py pt.yaml"):
        found = from_text(tmp_path, f"NPROC_PER_NODE=2 {command}\n", "run.sh")
        assert found.tool == "LLaMA-Factory"
        assert (found.recipe.data.train[0].format, found.recipe.data.train[0].path) == ("text", str(tmp_path / "c4.jsonl"))
        assert found.recipe.training.learning_rate == (3e-4 if "--learning_rate" in command else 1e-4)
    (tmp_path / "dpo.yaml").write_text(text.replace("stage: pt", "stage: dpo"))
    assert "preference tuning" in refusal(tmp_path, "llamafactory-cli train dpo.yaml\n", "run.sh")


def test_option_of_the_command_hides_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: m\nstage: sft\ndataset: a\nlearning_rate: 1.0e-4\n")
    found = from_text(tmp_path, "llamafactory-cli train a.yaml --learning_rate 3e-4\n", "run.sh")
    assert row(found, "config.learning_rate") == ("dropped", "the command gives it too, and comes first")


@pytest.mark.parametrize(
    "command", ["axolotl train ax.yaml", "accelerate launch -m axolotl.cli.train ax.yaml", "axolotl train ax.yaml --launcher torchrun"]
)
def test_command_of_axolotl_is_read_with_its_file(tmp_path: Path, command: str) -> None:
    (tmp_path / "ax.yaml").write_text("base_model: m\ndatasets: [{path: a, type: completion}]\nmicro_batch_size: 3\n")
    found = from_text(tmp_path, command + "\n", "run.sh")
    assert (found.tool, found.recipe.training.per_device_train_batch_size) == ("axolotl", 3)


def test_quotients_of_a_script_are_computed(tmp_path: Path) -> None:
    command = "n=2\nm=2\nswift sft --model m --dataset a.jsonl --max_length 8 --gradient_accumulation_steps $(expr 32 / $n / $m)\n"
    assert from_text(tmp_path, command, "run.sh").recipe.training.gradient_accumulation_steps == 8


# ---- Weights that the tools keep in fp32, templates of their own, rows that they repeat


OF_TRL = "model_name_or_path: m\ndataset_name: d\nassistant_only_loss: true\ndtype: bfloat16\n"
OF_AXOLOTL = "base_model: m\ndatasets: [{path: a, type: completion}]\nmicro_batch_size: 1\n"
SHARDED = "deepspeed: zero3.json\n"


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (OF_TRL, "bf16"),
        (OF_TRL + SHARDED, "fp32"),
        (OF_TRL + "bf16: false\n" + SHARDED, "bf16"),
        (OF_AXOLOTL + "bf16: true\n" + SHARDED, "fp32"),
        (OF_AXOLOTL + SHARDED, "fp32"),
        (OF_AXOLOTL + "fsdp_version: 2\nfsdp_config: {offload_params: true}\n", "bf16"),
    ],
)
def test_trained_weights_of_a_sharded_run_are_fp32(tmp_path: Path, text: str, dtype: str) -> None:
    found = from_text(tmp_path, text)
    assert (found.recipe.model.dtype, "model.dtype" in dict(found.decisions)) == (dtype, False)


def test_dtype_of_a_sharded_run_of_swift_asks_nothing(tmp_path: Path) -> None:
    command = SWIFT_COMMAND.format(2, " --tuner_type full --deepspeed zero3 --torch_dtype {}")
    for dtype in ("bfloat16", ""):
        found = from_text(tmp_path, command.format(dtype).replace(" --torch_dtype \n", "\n"), "run.sh")
        assert (found.recipe.model.dtype, found.recipe.precision.mixed_precision) == ("fp32", "bf16")
        assert "model.dtype" not in dict(found.decisions)


def test_batch_of_swift_without_a_micro_batch(tmp_path: Path) -> None:
    found = from_text(tmp_path, "swift sft --model m --dataset a.jsonl --max_length 8\n", "run.sh", num_gpus=4)
    assert found.recipe.training.global_batch_size == 16


def test_number_of_rows_of_swift_is_a_question(tmp_path: Path) -> None:
    found = from_text(tmp_path, "swift sft --model m --dataset 'a/b#500' c.jsonl --max_length 8\n", "run.sh")
    assert found.recipe.data.train[0].max_rows == 500
    assert [key for key, words in found.decisions if "repeats those of a smaller set" in words] == ["data.train[0].max_rows"]


def test_tokens_in_a_file_are_a_question(tmp_path: Path) -> None:
    command = "swift sft --model m --dataset a.jsonl --max_length 8 --new_special_tokens {}\n"
    assert row(from_text(tmp_path, command.format("tokens.txt"), "run.sh"), "new_special_tokens")[0] == "question"
    assert from_text(tmp_path, command.format("'<a>' '<b>'"), "run.sh").recipe.model.tokens.add == ["<a>", "<b>"]


@pytest.mark.parametrize(
    ("name", "fate"), [("default", "question"), ("qwen2.5", "question"), ("chatml", "converted"), ("llama3", "converted")]
)
def test_template_of_llama_factory_is_kept_where_it_renders_the_same(tmp_path: Path, name: str, fate: str) -> None:
    text = f"model_name_or_path: m\nstage: sft\ndataset: a\ntemplate: {name}\n"
    assert row(from_text(tmp_path, text), "template")[0] == fate


def test_evaluation_of_trl_is_of_the_split_test(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\ndataset_config: en\nassistant_only_loss: true\neval_strategy: steps\n"
    (source,) = values(from_text(tmp_path, text))["data.eval"]
    assert (source["path"], source["split"], source["name"]) == ("d", "test", "en")
    assert not from_text(tmp_path, text.replace("steps", "'no'")).recipe.data.eval


def test_resized_vocabulary_of_llama_factory_is_trained_beside_adapters(tmp_path: Path) -> None:
    lora = from_text(tmp_path, "model_name_or_path: m\nstage: sft\ndataset: a\nresize_vocab: true\n").recipe.lora
    assert lora is not None
    assert lora.modules_to_save == ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("command", "verb"),
    [
        ("swift infer --model m --max_new_tokens 4", "infer"),
        ("llamafactory-cli export --model_name_or_path m", "export"),
        ("python swift/cli/deploy.py --model m", "deploy"),
        ("python -m swift.cli.eval --model m", "eval"),
        ("axolotl inference a.yaml --gradio", "inference"),
        ("trl vllm-serve --model m", "vllm-serve"),
    ],
)
def test_command_that_does_not_train_is_refused(tmp_path: Path, command: str, verb: str) -> None:
    assert f"the command does not train, but runs `{verb}`" in refusal(tmp_path, f"CUDA_VISIBLE_DEVICES=0 {command}\n", "run.sh")
