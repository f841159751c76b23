"""Tokens of each source of prepared rows: of all ranks, and over a checkpoint on another number of them."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.data.report import InputAccount
from tests.ranks import Ranks

INPUTS = [
    InputAccount(set="train", label="a", files=2, tokens=8, repeats=2.0),
    InputAccount(set="train", label=None, files=1, tokens=12, repeats=1.0),
    InputAccount(set="eval", label="held", files=1, tokens=5, repeats=1.0),
]


class Store:
    """Row r has r tokens of file r % 3."""

    def files_of(self, rows: list[int]) -> Any:
        import numpy as np

        return np.array([row % 3 for row in rows]), np.array(rows)


def counted(rows: list[list[int]], checkpoints: list[Any]) -> tuple[Any, Any]:
    """Facts and state on a rank that is given `rows[rank]`, after what one of the `checkpoints` has, if there
    is one."""
    import torch.distributed as dist

    from fsdp_tune.worker.rows.training_rows import SourceTokens

    tokens = SourceTokens.of(INPUTS)
    for state in checkpoints:
        tokens.restore(state)
    tokens.add(Store(), rows[dist.get_rank()])  # type: ignore[arg-type]
    return tokens.facts(), tokens.state()


def facts(a: int, other: int) -> dict[str, float]:
    return {
        "source_a_tokens": a,
        "source_a_passes": a * (2 / 8),
        "source_1_tokens": other,
        "source_1_passes": other * (1 / 12),
    }


@pytest.mark.ranks
def test_tokens_of_sources_are_summed_over_ranks_and_restored_on_others(on_ranks: Ranks) -> None:
    assert on_ranks.run(2, counted, [[1, 3], [2, 4, 6]], []) == [(facts(14, 2), [14, 2])] * 2
    assert on_ranks.run(3, counted, [[5], [], []], [[14, 2]]) == [(facts(14, 7), [14, 7])] * 3


@pytest.mark.ranks
def test_counts_that_a_checkpoint_lacks_are_not_begun_in_the_middle(on_ranks: Ranks) -> None:
    assert on_ranks.run(2, counted, [[1], [2]], [None]) == [({}, None)] * 2


def test_state_of_a_stream_is_not_taken_for_counts() -> None:
    from fsdp_tune.worker.rows.training_rows import SourceTokens

    tokens = SourceTokens.of(INPUTS)
    tokens.restore({"version": 2, "lanes": {}, "tokens": [14, 2]})
    assert tokens.counts is None


@pytest.mark.parametrize(
    "state", [[14, 2], [14, 2, 0], [14, 2, 0, 0]], ids=["no eval set", "of an earlier version", "two of them"]
)
def test_counts_go_on_with_other_eval_sets_than_before(
    state: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp_tune.worker.rows import training_rows

    monkeypatch.setattr(training_rows.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(training_rows, "gather", lambda values: [values])
    for inputs in (INPUTS, INPUTS[:2]):
        tokens = training_rows.SourceTokens.of(inputs)
        tokens.restore(state)
        assert (tokens.facts(), tokens.state()) == (facts(14, 2), [14, 2])
