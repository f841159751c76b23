"""Examples to evaluate are the first rows of a set, however they are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.answer.examples import read_examples
from tests.data.support import prepared, write_jsonl


@pytest.mark.parametrize(
    "packing", [{"eval_packing": True}, {"packing": True}, {"packing": True, "packing_strategy": "wrapped"}]
)
def test_first_rows_are_the_same_packed_or_not(tmp_path: Path, packing: dict[str, Any]) -> None:
    rows = [{"text": "x" * (1 + number * 17 % 60) + str(number)} for number in range(90)]
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", part)
        for name, part in (("train", rows[:9]), ("b", rows[:40]), ("a", rows[40:]))
    ]
    evals = [{"path": str(files[1]), "label": "eval"}]
    plain, packed = (
        prepared(tmp_path, files[0], eval=evals, **options) for options in ({"eval_packing": False}, packing)
    )
    for most in (1, 12, 39, None):
        expected = read_examples(plain.store(plain.evals["eval"]), most=most)
        found = read_examples(packed.store(packed.evals["eval"]), most=most)
        assert [each.where.line for each in expected] == list(range(1, 1 + (most or 40)))
        assert list(dict.fromkeys(each.where.line for each in found)) == [
            each.where.line for each in expected
        ]
        ids = [number for each in found for number in each.row.input_ids.tolist()]
        assert ids == [number for each in expected for number in each.row.input_ids.tolist()]
