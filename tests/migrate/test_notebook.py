"""Notebooks whose cells run commands of another trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.migrate.imports import from_text, row, values

TRL = "trl sft --model_name_or_path m --dataset_name d"


def notebook(*cells: str) -> str:
    return json.dumps(
        {
            "cells": [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells],
            "nbformat": 4,
        }
    )


@pytest.mark.parametrize(
    "cells",
    [
        (f"!pip install -U trl\n!{TRL} --learning_rate 1e-5",),
        (f"!{TRL} \\\n  --learning_rate 1e-5",),
        (f"%%bash\nLR=1e-5\n{TRL} --learning_rate $LR",),
        ("%env LR=1e-5\n", f"!{TRL} --learning_rate $LR"),
        (
            "%%writefile c.yaml\nmodel_name_or_path: m\ndataset_name: d\nlearning_rate: 1e-5\n",
            "!trl sft --config c.yaml",
        ),
    ],
)
def test_command_of_a_notebook_is_read(tmp_path: Path, cells: tuple[str, ...]) -> None:
    found = values(from_text(tmp_path, notebook(*cells), "train.ipynb"))
    assert (found["model.name_or_path"], found["training.learning_rate"]) == ("m", 1e-5)


@pytest.mark.parametrize(
    "cells",
    [
        ("LR = 1e-5", f"!{TRL} --learning_rate {{LR}}"),
        ("LR = 1e-5", f"!{TRL} --learning_rate $LR"),
        ("!LR=1e-5", f"!{TRL} --learning_rate $LR"),
        ("%env LR=1e-5", "LR = 2e-5", f"!{TRL} --learning_rate $LR"),
        ("%env LR=$RATE", f"!{TRL} --learning_rate $LR"),
    ],
)
def test_value_that_python_or_another_shell_binds_is_a_question(
    tmp_path: Path, cells: tuple[str, ...]
) -> None:
    found = from_text(tmp_path, notebook(*cells), "train.ipynb")
    assert row(found, "learning_rate")[0] == "question"
