"""Scripts, notebooks and commands of other trainers: their options are read, and nothing is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.migrate.foreign_files import ACCELERATE, ARGUMENTS_OF_UNSLOTH, AUTOMODEL, SOUP, UNSLOTH
from tests.migrate.imports import from_text, imported, refusal, row, values
from tests.migrate.test_importing import HANDBOOK, INFO_OF_TEXTS


def notebook(*cells: str) -> str:
    return json.dumps(
        {
            "cells": [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells],
            "nbformat": 4,
        }
    )


def test_notebook_is_read_as_its_script(tmp_path: Path) -> None:
    first, _, rest = UNSLOTH.partition("model = FastLanguageModel.get_peft_model(")
    cells = (
        "%%capture\n!pip install unsloth",
        first,
        "model = FastLanguageModel.get_peft_model(" + rest,
        "this is no Python",
    )
    found = from_text(tmp_path, notebook(*cells), "Qwen.ipynb")
    assert [row.key for row in found.rows] == ARGUMENTS_OF_UNSLOTH
    assert values(found)["lora.lora_alpha"] == 64.0, "a name of another cell"
    assert {row.line for row in found.rows} == {None}


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\nr = (lambda: 8)()\n" + UNSLOTH.replace(
        "lora_rank = 32", "lora_rank = r"
    )
    found = from_text(tmp_path, text, "train.py")
    assert not (tmp_path / "ran").exists()
    assert row(found, "get_peft_model.r") == ("question", "the script computes it: write its value")
    assert row(found, "get_peft_model.lora_alpha")[0] == "question"


def test_plain_training_arguments_keep_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Unsloth replaces the defaults of SFTConfig; a script that passes TrainingArguments gets those of
    transformers."""
    before, _, after = UNSLOTH.partition("SFTConfig(\n")
    _, _, rest = after.partition("max_steps = 60,\n        learning_rate = 2e-4,\n")
    text = f"{before}TrainingArguments(\n        max_steps = 60,\n{rest}"
    found = from_text(tmp_path, text, "train.py")
    written = yaml.safe_load(found.text)["training"]
    assert (written["learning_rate"], written["per_device_train_batch_size"]) == (5e-5, 8)
    assert (
        not {"weight_decay", "warmup_steps", "seed", "optim", "gradient_accumulation_steps"} & written.keys()
    )
    assert "learning_rate: 5.0e-05  # default of TrainingArguments" in found.text
    loaded = values(found)
    assert (
        loaded["training.seed"],
        loaded["data.max_length"],
        loaded["lora.r"],
        loaded["quantization.load"],
    ) == (42, 2048, 32, "nf4")
    assert row(found, "TrainingArguments.max_steps")[0] == "kept"
    own = values(from_text(tmp_path, text.replace("TrainingArguments(", "SFTConfig("), "train.py"))
    assert (own["training.seed"], own["training.warmup_steps"]) == (3407, 0.1)


def test_script_in_a_function_with_rows_made_by_code(tmp_path: Path) -> None:
    text = UNSLOTH.replace("True,\n)", "False,\n)", 1)
    body = text.replace(
        "trainer = ", "dataset = dataset.map(format_rows, batched = True)\ntrainer = "
    ).replace("True,\n)", "False,\n)", 1)
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


PRETRAINING = (
    "swift pt --model m --dataset a.jsonl --loss_scale default --use_chat_template true --template qwen2_5\n"
)


@pytest.mark.parametrize("command", [PRETRAINING, PRETRAINING.replace("swift pt", "python swift/cli/pt.py")])
def test_pretraining_of_swift_trains_every_token_without_a_template(tmp_path: Path, command: str) -> None:
    found = from_text(tmp_path, command, "run.sh")
    assert found.recipe.data.loss_on == "all"
    assert row(found, "command") == ("converted", "`swift pt` trains every token")
    assert {row(found, key)[0] for key in ("loss_scale", "use_chat_template", "template")} == {"dropped"}
    assert "data.chat_template" in dict(found.decisions)
    tuning = from_text(
        tmp_path, command.replace("swift pt", "swift sft").replace("pt.py", "sft.py"), "run.sh"
    )
    assert tuning.recipe.data.loss_on == "auto", "the default of ms-swift, written out"
    assert "command" not in {each.key for each in tuning.rows}


def test_file_that_a_command_names_is_read_beside_its_options(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO_OF_TEXTS))
    text = "model_name_or_path: m\nstage: pt\ndataset: texts\ncutoff_len: 64\nlearning_rate: 1.0e-4\n"
    (tmp_path / "pt.yaml").write_text(text)
    for command in (
        "llamafactory-cli train pt.yaml --learning_rate 3e-4",
        "accelerate launch --num_processes 2 src/train.py pt.yaml",
    ):
        found = from_text(tmp_path, f"NPROC_PER_NODE=2 {command}\n", "run.sh")
        assert found.tool == "LLaMA-Factory"
        assert (found.recipe.data.train[0].format, found.recipe.data.train[0].path) == (
            "text",
            str(tmp_path / "c4.jsonl"),
        )
        assert found.recipe.training.learning_rate == (3e-4 if "--learning_rate" in command else 1e-4)
    (tmp_path / "dpo.yaml").write_text(text.replace("stage: pt", "stage: dpo"))
    assert "preference tuning" in refusal(tmp_path, "llamafactory-cli train dpo.yaml\n", "run.sh")


def test_option_of_the_command_hides_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model_name_or_path: m\nstage: sft\ndataset: a\nlearning_rate: 1.0e-4\n")
    found = from_text(tmp_path, "llamafactory-cli train a.yaml --learning_rate 3e-4\n", "run.sh")
    assert row(found, "config.learning_rate") == ("dropped", "the command gives it too, and comes first")


@pytest.mark.parametrize(
    "command",
    [
        "axolotl train ax.yaml",
        "accelerate launch -m axolotl.cli.train ax.yaml",
        "axolotl train ax.yaml --launcher torchrun",
    ],
)
def test_command_of_axolotl_is_read_with_its_file(tmp_path: Path, command: str) -> None:
    (tmp_path / "ax.yaml").write_text(
        "base_model: m\ndatasets: [{path: a, type: completion}]\nmicro_batch_size: 3\n"
    )
    found = from_text(tmp_path, command + "\n", "run.sh")
    assert (found.tool, found.recipe.training.per_device_train_batch_size) == ("axolotl", 3)


def test_number_of_rows_of_swift_is_a_question(tmp_path: Path) -> None:
    found = from_text(tmp_path, "swift sft --model m --dataset 'a/b#500' c.jsonl --max_length 8\n", "run.sh")
    assert found.recipe.data.train[0].max_rows == 500
    assert [key for key, words in found.decisions if "repeats those of a smaller set" in words] == [
        "data.train[0].max_rows"
    ]


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


NO_PREFERENCES = "no-counterpart: `{} of {}: this release has no preference tuning"
OTHER_METHOD = "no-counterpart: the command trains by "
NO_TRAINING = "the command does not train, but runs `{}`"


@pytest.mark.parametrize(
    ("text", "file", "words"),
    [
        (
            "base_model: gpt2\nsequence_len: 8\nrl: dpo\n",
            "a.yaml",
            NO_PREFERENCES.format("rl: dpo`", "axolotl"),
        ),
        ("model_name_or_path: gpt2\nstage: dpo\ntemplate: x\n", "a.yaml", "`stage: dpo` of LLaMA-Factory"),
        (
            HANDBOOK.replace("packing_strategy: ffd", "beta: 0.1"),
            "a.yaml",
            NO_PREFERENCES.format("beta`", "TRL"),
        ),
        (
            "model_name_or_path: a\ndo_eval: true\nmax_prompt_length: 9\nbeta: 1\n",
            "a.yaml",
            NO_PREFERENCES.format("beta`", "TRL"),
        ),
        (
            "step_scheduler: {num_epochs: 1}\nflow_matching: {adapter_type: simple}\n",
            "a.yaml",
            "`flow_matching` of NeMo Automodel",
        ),
        (
            "checkpointer: {_component_: a.B}\nteacher_model: {_component_: a.C}\n",
            "a.yaml",
            "`teacher_model` of torchtune: this release has no distillation",
        ),
        (SOUP.replace("task: sft", "task: dpo"), "a.yaml", "no-counterpart: "),
        (AUTOMODEL.replace("TrainFinetune", "Benchmarking"), "a.yaml", "no-counterpart: "),
        (UNSLOTH + "DPOTrainer(model)\n", "a.py", "no-counterpart: "),
        (UNSLOTH.replace("FastLanguageModel", "FastVisionModel"), "a.py", "no-counterpart: "),
        ("from trl import SFTTrainer\nSFTTrainer('gpt2')\n", "a.py", "unknown-foreign-file: "),
        ("def f(:\n", "a.py", "yaml-syntax: "),
        ("not a notebook", "a.ipynb", "yaml-syntax: "),
        ('{"cells": 3}', "a.ipynb", "yaml-syntax: "),
        ("{", "a.json", "yaml-syntax: "),
        ("[1]", "a.json", "not-a-mapping: "),
        ("- 1\n", "a.yaml", "not-a-mapping: "),
        ("", "a.yaml", "not-a-mapping: "),
        ("# nothing\n", "a.sh", "not-a-mapping: "),
        ("trl dpo --model_name_or_path a", "a.sh", OTHER_METHOD),
        ("swift rlhf --rlhf_type dpo", "a.sh", OTHER_METHOD),
        ("accelerate launch --num_processes 8 examples/scripts/ppo/ppo.py --x 1", "a.sh", OTHER_METHOD),
        ("python run_mlm.py --model_name_or_path a", "a.sh", OTHER_METHOD),
        ("NPROC_PER_NODE=2 megatron sft --model a", "a.sh", OTHER_METHOD),
        ("trl sft --model_name_or_path a\ntrl sft --model_name_or_path b\n", "a.sh", "starts 2 programs"),
        (
            "CUDA_VISIBLE_DEVICES=0 swift infer --model m --max_new_tokens 4\n",
            "a.sh",
            NO_TRAINING.format("infer"),
        ),
        ("llamafactory-cli export --model_name_or_path m\n", "a.sh", NO_TRAINING.format("export")),
        ("python swift/cli/deploy.py --model m\n", "a.sh", NO_TRAINING.format("deploy")),
        ("python -m swift.cli.eval --model m\n", "a.sh", NO_TRAINING.format("eval")),
        ("axolotl inference a.yaml --gradio\n", "a.sh", NO_TRAINING.format("inference")),
        ("trl vllm-serve --model m\n", "a.sh", NO_TRAINING.format("vllm-serve")),
    ],
)
def test_file_that_no_recipe_can_be_made_of_is_one_error(
    text: str, file: str, words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, text, file)


def test_error_of_an_unknown_file_names_the_tools_and_the_option(tmp_path: Path) -> None:
    found = refusal(tmp_path, "a: 1\nsequence_len: 3\n")
    assert found.startswith("unknown-foreign-file: ")
    assert "axolotl 1, LLaMA-Factory 0, TRL 0" in found
    assert "`--from`" in found
    assert from_text(tmp_path, "a: 1\nsequence_len: 3\n", tool="axolotl").tool == "axolotl"
