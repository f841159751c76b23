"""Commands of other trainers in shell scripts: options, launcher, variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.migrate.read.command_line import command_in, parse_command, starter
from fsdp_tune.migrate.read.shell_script import Unexpanded
from tests.migrate.imports import TORCHTUNE_STEP, from_text, row, values


def parsed(script: str) -> tuple[dict[str, Any], str | None]:
    command = command_in(script)
    assert command is not None
    return parse_command(command.words)


@pytest.mark.parametrize(
    ("script", "values", "tool"),
    [
        ("trl sft --model_name_or_path a/b --packing --lr=2e-5", {"model_name_or_path": "a/b", "packing": True, "lr": 2e-5}, "TRL"),
        ("python run_clm.py --do_train --seed -1", {"do_train": True, "seed": -1}, "transformers examples"),
        ("swift sft --dataset a#5 b --x true", {"dataset": ["a#5", "b"], "x": True}, "ms-swift"),
        ("llamafactory-cli train a.yaml lr=1e-5 --stage sft", {"config": "a.yaml", "lr": 1e-5, "stage": "sft"}, "LLaMA-Factory"),
        ("python swift/cli/sft.py --model a", {"model": "a"}, "ms-swift"),
        (
            "torchrun --nproc_per_node=2 --standalone sft.py --x 1",
            {"launcher": {"nproc_per_node": 2, "standalone": True}, "x": 1},
            "TRL",
        ),
        ("A=1 B='two words' trl sft --x $A --y ${C}", {"environment": {"A": 1, "B": "two words"}, "x": "$A", "y": "${C}"}, "TRL"),
        ("export N=4\ntrl sft --x $(expr 32 / $N) | tee log", {"environment": {"N": 4}, "x": 8}, "TRL"),
        ("# words\nset -e\npip install --upgrade trl\ntrl sft \\\n  --x 'a # b'  # not part of it\n", {"x": "a # b"}, "TRL"),
        ("export A=01 B=1e-5 C=false\ntrl sft --x 1", {"environment": {"A": "01", "B": "1e-5", "C": "false"}, "x": 1}, "TRL"),
        ("swift export --model a\nswift sft --model b", {"model": "b"}, "ms-swift"),
        ("env A=1 trl sft --x 1", {"environment": {"A": 1}, "x": 1}, "TRL"),
        (
            "A=1 srun --nodes 2 env B=2 C=3 trl sft --x 1",
            {"environment": {"A": 1, "B": 2, "C": 3}, "launcher": {"nodes": 2}, "x": 1},
            "TRL",
        ),
        ("A=1 nohup trl sft --x 1 > log &", {"environment": {"A": 1}, "x": 1}, "TRL"),
        ("bash -c 'trl sft --x 1'", {"x": 1}, "TRL"),
        ("trl sft --report_to true wandb --flags true false true", {"report_to": [True, "wandb"], "flags": [True, False, True]}, "TRL"),
        ("trl sft --lr -1E-5 --decay -1e+2", {"lr": -1e-5, "decay": -100.0}, "TRL"),
        ("llamafactory-cli train --stage sft -- x.yaml lr=1", {"stage": "sft", "config": "x.yaml", "lr": 1}, "LLaMA-Factory"),
        ("llamafactory-cli train info=x.json --stage sft", {"info": "x.json", "stage": "sft"}, "LLaMA-Factory"),
        ("uv run -- trl sft --x 1", {"x": 1}, "TRL"),
        ("uv run --with trl trl sft --model_name_or_path M", {"launcher": {"with": "trl"}, "model_name_or_path": "M"}, "TRL"),
        ("srun --job-name trl torchrun sft.py --x 1", {"launcher": {"job_name": "trl"}, "x": 1}, "TRL"),
        ("python run_clm.py --tags trl llama", {"tags": ["trl", "llama"]}, "transformers examples"),
        ("python run_clm.py --tags a trl llama", {"tags": ["a", "trl", "llama"]}, "transformers examples"),
        (
            "tune run lora_finetune_single_device --config x.yaml optimizer.lr=$LR lr=$LR",
            {"config": "x.yaml", "optimizer.lr": "$LR", "lr": "$LR"},
            "torchtune",
        ),
        (
            'export A=1 B=2\nX=3\nC=4 srun --nodes 2 bash -lc "B=5 torchrun --nnodes 2 sft.py --x $X"',
            {"environment": {"A": 1, "C": 4, "B": 5}, "launcher": {"nodes": 2, "nnodes": 2}, "x": 3},
            "TRL",
        ),
        (
            "tune run --nproc_per_node 4 lora_finetune_distributed --config c.yaml batch_size=8 optimizer.lr=3e-5",
            {"launcher": {"nproc_per_node": 4}, "config": "c.yaml", "batch_size": 8, "optimizer.lr": 3e-5},
            "torchtune",
        ),
    ],
)
def test_options_of_a_command(script: str, values: dict[str, Any], tool: str | None) -> None:
    assert parsed(script) == (values, tool)


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("trl sft --lr 1 --lr 2", "--lr"),
        ("llamafactory-cli train lr=1 lr=2", "lr"),
        ("llamafactory-cli train lr=1 --lr 2", "--lr"),
        ("llamafactory-cli train a.yaml b.yaml --x 1", "config"),
        ("tune run full_finetune_distributed --config c.yaml lr=1 lr=2", "lr"),
    ],
)
def test_option_that_is_given_twice_is_refused(script: str, option: str) -> None:
    with pytest.raises(FsdpTuneError, match=f"`{option}` is given twice"):
        parsed(script)


def test_text_without_a_command_has_none() -> None:
    assert command_in("base_model: gpt2\nlist:\n  - --x\n") is None


def test_variable_of_the_environment_inside_of_a_shell_is_not_known() -> None:
    command = command_in('srun bash -c "trl sft --x $X --y 1"')
    assert command is not None
    assert [(str(word), word.why) for word in command.words if isinstance(word, Unexpanded)] == [("$X", "`X` is of the environment")]


@pytest.mark.parametrize("recipe", ["lora_dpo_distributed", "knowledge_distillation_single_device", "dev/grpo_full_finetune_distributed"])
def test_recipe_of_torchtune_for_another_method_is_refused(recipe: str) -> None:
    with pytest.raises(FsdpTuneError, match="trains by"):
        command_in(f"tune run {recipe} --config c.yaml")


def test_overrides_of_a_torchtune_command_are_those_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        TORCHTUNE_STEP.format("torch.optim.AdamW", ", weight_decay: 0.1") + "batch_size: 2\nmax_steps_per_epoch: 3\n"
    )
    command = "tune run full_finetune_single_device --config c.yaml batch_size=8 optimizer.lr=3e-5 ~max_steps_per_epoch"
    imported = from_text(tmp_path, f"{command} optimizer=torch.optim.SGD\n", "run.sh")
    found = values(imported)
    assert found["training.per_device_train_batch_size"] == 8
    assert (found["training.learning_rate"], found["training.weight_decay"], found["training.optim"]) == (3e-5, 0.1, "sgd")
    assert "max_steps_per_epoch" not in [each.key for each in imported.rows]


@pytest.mark.parametrize(
    "script",
    [
        "trl sft --x 1 \\\n  # --y 2 \\\n  --z 3\n",
        "trl sft --x 1 \\ \n  --z 3\n",
        "trl sft --x 1\n  --z 3\n",
        "trl sft --x 1 ^\r\n  --z 3\r\n",
    ],
)
def test_command_whose_options_go_on_after_its_end_is_refused(script: str) -> None:
    with pytest.raises(FsdpTuneError, match=r"line [23]: the command ends before `--z`") as caught:
        command_in(script)
    assert caught.value.exit_code == 2


def test_negated_option_is_false_where_the_option_is_true_by_default(tmp_path: Path) -> None:
    found = from_text(tmp_path, "trl sft --model_name_or_path m --dataset_name d --no_gradient_checkpointing --no-packing\n", "run.sh")
    assert values(found)["fsdp.activation_checkpointing"] == "none"
    assert row(found, "no_packing")[0] == "question", "TRL has no such option: packing is off by default"


def test_unknown_value_of_an_option_that_is_always_dropped_is_no_question(tmp_path: Path) -> None:
    command = "torchrun --nnodes 2 --node_rank $RANK --nproc_per_node $GPUS sft.py --model_name_or_path m --dataset_name d --x $X\n"
    found = from_text(tmp_path, command, "run.sh")
    assert [row(found, f"launcher.{key}")[0] for key in ("node_rank", "nproc_per_node")] == ["dropped", "question"]
    assert row(found, "x")[0] == "question"


def test_recipe_of_a_makefile_is_a_command() -> None:
    assert parsed("train:\n\t@trl sft --x 1\n") == ({"x": 1}, "TRL")


def test_variables_of_a_file_of_trl_are_kept_for_the_ranks(tmp_path: Path) -> None:
    found = from_text(tmp_path, "model_name_or_path: m\ndataset_name: d\nenv: {NCCL_DEBUG: INFO, CUDA_VISIBLE_DEVICES: 0}\n", tool="TRL")
    assert values(found)["launch.env.NCCL_DEBUG"] == "INFO"
    assert row(found, "env.CUDA_VISIBLE_DEVICES")[0] == "dropped"


def test_name_of_a_tool_as_a_value_starts_nothing() -> None:
    assert starter(["srun", "--job-name", "trl", "python", "sft.py", "--x", "1"]) == "python"
    assert starter(["srun", "--unbuffered", "trl", "sft", "--x", "1"]) == "trl"
