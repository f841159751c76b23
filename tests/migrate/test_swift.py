"""Options of ms-swift that mean something of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.migrate.imports import from_text, row

SWIFT = (
    "swift sft --model acme/m --dataset rows.jsonl --tuner_type full --template llama3 --learning_rate "
    "1e-4 {}\n"
)


@pytest.mark.parametrize(
    ("options", "computed"),
    [
        ("--torch_dtype float32", "fp16"),  # ms-swift switches fp16 on unless the command says something
        ("--torch_dtype float32 --fp16 false", "no"),
        ("--fp16 false --torch_dtype float32", "no"),
        ("--torch_dtype float32 --fp16 false --bf16 false", "no"),
        ("--torch_dtype float32 --bf16 false", "fp16"),
        ("--bf16 false --torch_dtype float16", "fp16"),
        ("--torch_dtype float32 --fp16 false --bf16 true", "bf16"),
        ("--torch_dtype bfloat16", "bf16"),
        ("--torch_dtype bfloat16 --bf16 false", "no"),
        ("--torch_dtype bfloat16 --fp16 false", "bf16"),
        ("--bf16 false", "no"),
        ("", "bf16"),
    ],
)
def test_ms_swift_computes_in_the_half_precision_of_the_weights_unless_it_is_off(
    options: str, computed: str, tmp_path: Path
) -> None:
    found = from_text(tmp_path, SWIFT.format(options), "train.sh")
    assert found.recipe.precision.mixed_precision == computed


@pytest.mark.parametrize(
    ("model", "is_id"),
    [
        ("acme/m", True),
        ("base", False),
        ("./base", False),
        ("/models/base", False),
        ("../a/b", False),
        ("a/b/c", False),
    ],
)
def test_id_of_modelscope_has_an_owner_and_a_name(model: str, is_id: bool, tmp_path: Path) -> None:
    found = from_text(tmp_path, SWIFT.format("").replace("acme/m", model), "train.sh")
    assert ("an id of ModelScope" in row(found, "model")[1]) == is_id


@pytest.mark.parametrize(("command", "is_said"), [("sft", True), ("pt", False)])
def test_account_says_how_instruction_and_input_are_joined(
    command: str, is_said: bool, tmp_path: Path
) -> None:
    text = SWIFT.format("--val_dataset eval.jsonl").replace("sft", command, 1)
    found = from_text(tmp_path, text, "train.sh")
    for key in ("dataset", "val_dataset"):
        assert ("after one line end there" in row(found, key)[1]) == is_said


def test_hub_before_the_name_of_a_data_set_is_no_part_of_it(tmp_path: Path) -> None:
    text = "model: acme/m\ntuner_type: full\ndataset: ['HF::org/a', 'HF::org/b:sub#50', 'MS::org/c#3']\n"
    found = from_text(tmp_path, text, tool="ms-swift")
    assert [(source.path, source.name, source.max_rows) for source in found.recipe.data.train] == [
        ("org/a", None, None),
        ("org/b", "sub", 50),
        ("org/c", None, 3),
    ]
