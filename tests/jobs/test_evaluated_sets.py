"""Intervals of a set are over rows of files, however many pieces a long row has."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.answer.examples import AnswerReader
from fsdp_tune.answer.model_requests import RowScore
from fsdp_tune.jobs.evaluated_sets import PreparedSet
from fsdp_tune.jobs.options import EvaluateOptions
from tests.data.support import ByteEncoder, prepared, write_jsonl


def scored_set(folder: Path, texts: list[str]) -> PreparedSet:
    """A set whose tokens have the loss of their row: 1 in the first, 2 in the second …"""
    data = prepared(folder, write_jsonl(folder / "rows.jsonl", [{"text": text} for text in texts]))
    scored = PreparedSet("rows", data.store(), EvaluateOptions(), AnswerReader(ByteEncoder(), None))
    for index, example in enumerate(scored.examples):
        assert example.where.line is not None
        scored.add(0, [RowScore(index, float(example.where.line * example.targets), example.targets)])
    return scored


def test_pieces_of_a_long_row_are_resampled_together(tmp_path: Path) -> None:
    scored = scored_set(tmp_path, ["x" * 640, "y" * 640])
    assert len(scored.examples) == 20
    found = scored.result()
    assert found.loss is not None
    assert (found.rows, found.cut_rows) == (2, 2)
    assert (found.loss.low, found.loss.high) == (1.0, 2.0), "half of the resamples have one row twice"


def test_few_rows_with_many_pieces_are_reported(tmp_path: Path) -> None:
    (notice,) = scored_set(tmp_path, ["x" * 640, "y" * 640]).few_rows
    assert "a bootstrap of 2 rows" in notice.message
