from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.answer.model_requests import RowScore
from fsdp_tune.answer.score import _finite_scores
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Where


@pytest.mark.parametrize(("total", "count"), [(nan, 1.0), (inf, 1.0), (1.0, nan), (1.0, inf)])
def test_score_whose_total_or_count_is_no_number_is_refused_with_its_row(total: float, count: float) -> None:
    """A metric of the user that returns a count of NaN passed, and its value was NaN."""
    rows: list[Any] = [SimpleNamespace(where=Where("a.jsonl", line)) for line in (3, 4)]
    assert _finite_scores([7, 8], rows, [1.0, 2.0], [1, 1], "") == [RowScore(7, 1.0, 1), RowScore(8, 2.0, 1)]
    with pytest.raises(FsdpTuneError) as caught:
        _finite_scores([7, 8], rows, [1.0, total], [1.0, count], "see the metric")
    (problem,) = caught.value.problems
    assert (problem.where.line, problem.hint) == (4, "see the metric")
    assert caught.value.exit_code == ExitCode.NON_FINITE
