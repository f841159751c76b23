"""Which lines are spikes, and which rows the event of one names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_tune.core.topology import Topology
from fsdp_tune.run.events import LossSpike
from fsdp_tune.worker.step_checks import CurveWatch
from tests.ranks import Ranks


def names(watch: CurveWatch, *values: tuple[float, float]) -> list[list[str]]:
    return [[kind.name for kind, _ in watch.watch(loss, norm)] for loss, norm in values]


STEADY = [(2.0 + 0.01 * (at % 3), 1.0 + 0.1 * (at % 2)) for at in range(12)]


def test_spikes_of_loss_and_norm_are_one_event() -> None:
    watch = CurveWatch(None)
    assert not any(names(watch, *STEADY))
    (kind, message), *others = watch.watch(4.0, 9.0)
    assert (kind, others) == (LossSpike, [])
    assert message.startswith(
        "the loss is 4.0000; the last 12 lines had 2.0100 ± 0.0082; the gradient norm is 9.0000, and "
    )
    assert names(CurveWatch(None), *STEADY, (2.0, 9.0))[-1] == ["gradient_spike"]
    assert names(CurveWatch(None), *STEADY, (2.0, 2.0))[-1] == [], "norms scatter"
    assert names(CurveWatch(None), *STEADY[:9], (9.0, 9.0))[-1] == [], "too few lines"


def test_line_that_is_not_finite_does_not_hide_later_spikes() -> None:
    assert names(CurveWatch(None), *STEADY, (float("nan"), float("inf")), (4.0, 1.0))[-2:] == [
        ["gradient_spike"],
        ["loss_spike"],
    ]


class Rows:
    """Row r is packed of the lines 10 r and 10 r + 1, or, in a stream of `long` rows, of 300 lines."""

    def __init__(self, long: bool) -> None:
        self.count = 300 if long else 2

    def examples_of(self, batch: Any) -> list[list[tuple[tuple[str, int], int]]]:
        return [[(("a.jsonl", 10 * row + at), 5) for at in range(self.count)] for row in batch.row_ids]


def named(
    topology: Topology,
    batches: dict[int, list[tuple[int, int, tuple[int, ...], float, int]]],
    step: int | None,
    long: bool,
) -> Any:
    """`batches` of each rank: (step, number, rows, loss sum, supervised tokens)."""
    import torch.distributed as dist

    from fsdp_tune.worker.rows.batches import Batch
    from fsdp_tune.worker.step_checks import RecentBatches

    rows: Any = Rows(long)
    recent = RecentBatches(rows, topology)
    for at, number, row_ids, loss, supervised in batches[dist.get_rank()]:
        recent.add(at, number, Batch({"x": torch.zeros(9)}, row_ids, 9, supervised), torch.tensor(loss))
    named, total = recent.rows_of(step)
    return {"rows": [row.as_dict() for row in named], "rows_total": total}


@pytest.mark.ranks
def test_rows_of_all_ranks_come_highest_loss_first(on_ranks: Ranks) -> None:
    batches = {
        0: [(7, 1, (1,), 4.0, 4), (8, 1, (2,), 8.0, 2)],
        1: [(7, 1, (3,), 30.0, 3), (8, 1, (), 0.0, 0)],
    }
    found, same = on_ranks.run(2, named, Topology(shard=2), batches, None, False)
    assert found == same
    assert [(row["row"], row["rank"], row["step"], row["loss"]) for row in found["rows"]] == [
        (30, 1, 7, 10.0),
        (31, 1, 7, 10.0),
        (20, 0, 8, 4.0),
        (21, 0, 8, 4.0),
        (10, 0, 7, 1.0),
        (11, 0, 7, 1.0),
    ]
    assert found["rows"][0] == {
        "file": "a.jsonl",
        "row": 30,
        "tokens": 5,
        "step": 7,
        "rank": 1,
        "micro_batch": 1,
        "sequence": 3,
        "loss": 10.0,
    }
    assert found["rows_total"] == 6
    (of_step, _) = on_ranks.run(2, named, Topology(shard=2), batches, 8, False)
    assert ([row["row"] for row in of_step["rows"]], of_step["rows_total"]) == ([20, 21], 2)


@pytest.mark.ranks
def test_ranks_that_share_a_row_add_their_losses(on_ranks: Ranks) -> None:
    batches = {0: [(1, 1, (1,), 3.0, 4)], 1: [(1, 1, (1,), 5.0, 4)]}
    found, _ = on_ranks.run(2, named, Topology(sequence=2), batches, None, False)
    assert [(row["row"], row["rank"], row["loss"]) for row in found["rows"]] == [(10, 0, 2.0), (11, 0, 2.0)]
    assert found["rows_total"] == 2


@pytest.mark.ranks
def test_event_names_200_rows_and_counts_all(on_ranks: Ranks) -> None:
    batches = {0: [(1, 1, (1,), 3.0, 4)], 1: [(1, 1, (2,), float("nan"), 4)]}
    found, _ = on_ranks.run(2, named, Topology(shard=2), batches, None, True)
    assert (len(found["rows"]), found["rows_total"], {row["rank"] for row in found["rows"]}) == (
        200,
        600,
        {1},
    )


def test_tensors_of_batches_are_not_kept() -> None:
    from fsdp_tune.worker.rows.batches import Batch
    from fsdp_tune.worker.step_checks import KEPT_BATCHES, RecentBatches

    recent = RecentBatches(SimpleNamespace(), Topology())  # type: ignore[arg-type]
    for number in range(KEPT_BATCHES + 5):
        recent.add(1, number, Batch({"x": torch.zeros(9)}, (1,), 9, 9), torch.tensor(1.0))
    kept = list(recent._batches)
    assert (len(kept), kept[0].number, kept[0].batch.tensors) == (KEPT_BATCHES, 5, {})
