"""Files of tools without an importer are named, with what their keys are in a recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.read.other_tools import COUNTERPARTS, other_tool
from fsdp_tune.recipe.schema.keys import all_keys
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owner_of
from tests.migrate.foreign_files import FILES
from tests.migrate.imports import from_text, questions, refusal, row, values
from tests.recipe.loading import problems

LITGPT = (
    "checkpoint_dir: checkpoints/m\nout_dir: out/lora\nlora_r: 32\nlora_query: true\ntrain: "
    "{global_batch_size: 16, epochs: 4}\n"
)
FOUNDRY = (
    "max_seq_len: 2048\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 8\nmax_duration: 2ep\n"
)
VERL = (
    "data: {train_files: a.parquet, prompt_key: q, max_length: 512}\nmodel: {partial_pretrain: "
    "Qwen/Q}\ntrainer: {total_epochs: 3}\n"
)
NANOTRON = (
    "tokens: {micro_batch_size: 2, sequence_length: 1024, train_steps: 20}\ndata_stages: [{name: "
    "a}]\ngeneral: {seed: 1}\n"
)
TITAN = (
    '[job]\ndump_folder = "out"\n[training]\nlocal_batch_size = 8\nseq_len = 2048\nsteps = '
    "10\n[optimizer]\nlr = 8e-4\n"
)
PRIME = (
    'max_steps = 10\n[ckpt]\ninterval = 5\n[model]\nname = "Qwen/Q"\n[data]\nseq_len = 1024\nbatch_size '
    "= 32\n[optim]\nlr = 1e-5\n"
)
INSTRUCT = (
    "model_name_or_path: m\ndataset_name: a/b\nuse_lora: true\nlora_rank: 64\nlora_alpha: "
    "16\nlora_dropout: 0.1\nlearning_rate: 1.0e-4\n"
    "use_slow_tokenizer: true\nmax_seq_length: 4096\nreport_to: [wandb]\n"
)
INSTRUCT_COMMAND = (
    "accelerate launch --num_processes 2 open_instruct/finetune.py --model_name_or_path m --use_lora "
    "--lora_rank 8 --add_bos"
)
VERL_COMMAND = (
    "torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet "
    "model.partial_pretrain=m optim.lr=1e-5"
)
EXAMPLES = [
    ("LitGPT", "a.yaml", LITGPT, ("`lora_r` → `lora.r`", "`train.epochs` → `training.num_train_epochs`")),
    (
        "LLM-Foundry",
        "a.yaml",
        FOUNDRY,
        ("`device_train_microbatch_size` → `training.per_device_train_batch_size`",),
    ),
    ("verl", "a.yaml", VERL, ("`model.partial_pretrain` → `model.name_or_path`",)),
    ("verl", "run.sh", VERL_COMMAND + "\n", ("`optim.lr` → `training.learning_rate`",)),
    ("nanotron", "a.yaml", NANOTRON, ("`tokens.train_steps` → `training.max_steps`",)),
    (
        "torchtitan",
        "a.toml",
        TITAN,
        ("`training.local_batch_size` → `training.per_device_train_batch_size`",),
    ),
    ("prime-rl", "a.toml", PRIME, ("`data.batch_size` → `training.global_batch_size`",)),
    ("open-instruct", "a.yaml", INSTRUCT, ("`lora_rank` → `lora.r`",)),
    ("open-instruct", "run.sh", INSTRUCT_COMMAND + "\n", ("`use_lora` → `lora`",)),
]


@pytest.mark.parametrize(("tool", "file", "text", "counterparts"), EXAMPLES)
def test_file_of_a_tool_without_an_importer_is_named(
    tmp_path: Path, tool: str, file: str, text: str, counterparts: tuple[str, ...]
) -> None:
    found = refusal(tmp_path, text, file)
    assert found.startswith(
        f"unknown-foreign-file: this is a configuration of {tool}, which has no importer; these keys "
        "have counterparts: "
    )
    assert [each for each in counterparts if each not in found] == []


@pytest.mark.parametrize("text", [VERL, LITGPT, INSTRUCT])
def test_file_of_another_tool_given_as_a_recipe_is_one_error(text: str) -> None:
    (problem,) = problems(text)
    assert (problem.code, "which has no importer" in problem.message) == ("foreign-configuration", True)


def test_toml_file_given_as_a_recipe_is_to_be_imported(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TITAN)
    with pytest.raises(FsdpTuneError) as caught:
        load_recipe(tmp_path / "a.toml")
    assert re.match(r"fsdp-tune import \S+a.toml", caught.value.problems[0].hint or "")


def test_every_counterpart_is_a_key_of_a_recipe() -> None:
    keys = {key.name for key in all_keys()} | {
        f"training.{field}" for field in TRAINING_FIELDS.fields if owner_of(field) is None
    }
    assert {here for found in COUNTERPARTS.values() for here in found.values()} - keys == set()
    assert {tool for tool, *_ in EXAMPLES} == set(COUNTERPARTS)


def test_files_of_tools_with_an_importer_are_theirs() -> None:
    mappings = {name: text for name, (_, file, text) in FILES.items() if file.endswith((".yaml", ".json"))}
    assert {name: other_tool(yaml.safe_load(text)) for name, text in mappings.items()} == dict.fromkeys(
        mappings
    )


@pytest.mark.parametrize("key", ["use_lora: true", "lora_rank: 8", "sequence_len: 64", "exp_name: a"])
def test_tool_is_not_named_for_a_file_that_it_refuses(tmp_path: Path, key: str) -> None:
    text = f"model_name_or_path: m\ndataset_name: a/b\nmax_seq_length: 64\npacking: true\n{key}\n"
    assert refusal(tmp_path, text).startswith("unknown-foreign-file: ")


ADAPTER = "lora_r: 16\nlora_alpha: 32\nlearning_rate: 1.0e-4\n"
ROWS = "base_model: m\nsequence_len: 64\ndatasets: [{path: a, type: completion}]\n"


@pytest.mark.parametrize(
    ("tool", "text", "switch", "trains"),
    [
        ("TRL", "model_name_or_path: m\ndataset_name: d\n", "", None),
        ("TRL", "model_name_or_path: m\ndataset_name: d\n", "use_peft: ${PEFT}\n", None),
        ("TRL", "model_name_or_path: m\ndataset_name: d\n", "use_peft: false\n", False),
        ("TRL", "model_name_or_path: m\ndataset_name: d\n", "use_peft: true\n", True),
        ("axolotl", ROWS, "", None),
        ("axolotl", ROWS, "adapter:\n", False),
        ("axolotl", ROWS, "adapter: lora\n", True),
        ("transformers examples", "model_name_or_path: m\ntrain_file: a.txt\n", "", None),
    ],
)
def test_keys_of_an_adapter_without_a_known_switch_are_questions(
    tmp_path: Path, tool: str, text: str, switch: str, trains: bool | None
) -> None:
    found = from_text(tmp_path, text + switch + ADAPTER, tool=tool)
    fates: dict[bool | None, Any] = {None: "question", True: "converted", False: "dropped"}
    assert row(found, "lora_r")[0] == fates[trains]
    assert (found.recipe.lora is not None) is bool(trains)
    assert ({"lora_r", "lora_alpha"} <= set(questions(found))) is (trains is None)


@pytest.mark.parametrize(
    ("tool", "text"),
    [("LLaMA-Factory", "stage: sft\nmodel_name_or_path: m\nfinetuning_type: ${TYPE}\nlora_rank: ${R}\n")],
)
def test_defaults_of_an_unknown_switch_are_to_be_decided(tmp_path: Path, tool: str, text: str) -> None:
    found = from_text(tmp_path, text, tool=tool)
    assert "precision.mixed_precision" in dict(found.decisions)
    assert found.recipe.lora is None
    assert "lora" not in yaml.safe_load(found.text)


def test_scale_of_an_unknown_rank_is_to_be_decided(tmp_path: Path) -> None:
    text = "stage: sft\nmodel_name_or_path: m\nfinetuning_type: lora\nlora_rank: ${R}\n"
    found = from_text(tmp_path, text, tool="LLaMA-Factory")
    assert "lora.lora_alpha" in dict(found.decisions)
    assert yaml.safe_load(found.text)["lora"].keys() == {"target_modules"}
    assert (
        values(from_text(tmp_path, text, tool="LLaMA-Factory", overrides=["lora.r=4"]))["lora.lora_alpha"]
        == 8.0
    )
