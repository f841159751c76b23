"""Commands of other trainers in shell scripts: options, launcher, variables."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.recipe.read.foreign.foreign_file import command_in, parse_command


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
    ],
)
def test_options_of_a_command(script: str, values: dict[str, Any], tool: str | None) -> None:
    assert parsed(script) == (values, tool)


def test_text_without_a_command_has_none() -> None:
    assert command_in("base_model: gpt2\nlist:\n  - --x\n") is None
