"""`import`: what a file does not say is a question, at the terminal and in the document."""

from __future__ import annotations

from pathlib import Path

from tests.cli.in_process import answer, errors

SCRIPT = (
    "LR=${LR:-2e-4}\nswift sft --model m --train_type full --dataset a.jsonl --max_length 64 "
    "--learning_rate $LR --seed 7\n"
)
VERL = (
    "torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=m data.train_files=a.parquet "
    "optim.lr=1e-5\n"
)


def test_variable_with_a_default_is_a_question_without_a_value(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    found = answer("import", str(tmp_path / "run.sh"))
    (asked,) = [row for row in found["account"] if row["key"] == "learning_rate"]
    assert (asked["fate"], asked["to"], "2e-4" in asked["reason"]) == (
        "question",
        ["training.learning_rate"],
        True,
    )
    assert "  learning_rate:" not in str(found["recipe"])


def test_tool_without_an_importer_is_a_usage_error_with_counterparts(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL)
    (problem,) = errors("import", str(tmp_path / "run.sh"))
    assert problem["code"] == "unknown-foreign-file"
    assert "`optim.lr` → `training.learning_rate`" in problem["hint"]
