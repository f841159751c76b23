"""The rank for which the others wait is named, with what it is slow with, and no other."""

from __future__ import annotations

import random
import time
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_tune.launch.run_status import run_status
from fsdp_tune.worker.observe.stragglers import (
    COST_SHARE,
    SUSTAINED_SECONDS,
    OwnTimes,
    Slowest,
    Sustained,
    slowest,
)
from fsdp_tune.worker.step_observer import RankTimes
from tests.cuda.devices import on_devices
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.worker.short_runs import trained


def times(data: float = 0.01, computing: float = 0.8, saving: float = 0.0, step: float = 1.0) -> OwnTimes:
    return OwnTimes(step, data, computing, saving)


@pytest.mark.parametrize(
    ("slow", "part", "share"),
    [
        (times(data=0.11), "data", 0.1),
        (times(computing=1.0), "computing", 0.2),
        (times(saving=0.3), "saving", 0.3),
        (times(data=0.05, computing=0.95), "computing", 0.19),
    ],
)
def test_slowest_is_compared_with_the_median_of_the_others(slow: OwnTimes, part: str, share: float) -> None:
    found = slowest([times(), slow, times(), times(computing=0.7)])
    assert (found.rank, found.part) == (1, part)
    assert found.share == pytest.approx(share)
    assert found.behind_seconds == pytest.approx(share)
    assert found.is_costly


def test_equal_ranks_cost_nothing() -> None:
    assert not slowest([times()] * 3).is_costly
    assert not slowest([times(step=0.0, data=0.0, computing=0.0)] * 2).is_costly


def test_milliseconds_of_short_steps_are_noise() -> None:
    assert not Slowest(1, "computing", behind_seconds=0.004, share=0.3).is_costly
    assert Slowest(1, "computing", behind_seconds=0.03, share=0.06).is_costly


SLOW, OTHER = Slowest(1, "data", 0.2, 0.2), Slowest(3, "computing", 0.2, 0.1)
NONE = Slowest(1, "data", 0.0, 0.0)


def named(*found: Slowest, seconds: float = 20.0) -> list[int | None]:
    """The rank that is named after each comparison."""
    sustained = Sustained()
    after: list[int | None] = []
    for each in found:
        before = sustained.named
        changed = sustained.add(each, seconds)
        after.append(sustained.named.rank if sustained.named else None)
        assert changed == (after[-1] != (before.rank if before else None))
    return after


def test_rank_is_named_after_a_minute_and_not_before() -> None:
    assert named(SLOW, SLOW, SLOW, SLOW) == [None, None, 1, 1]
    assert named(SLOW, seconds=70.0) == [1]


def test_rank_that_recovers_is_not_named_any_more() -> None:
    assert named(SLOW, SLOW, SLOW, NONE, SLOW) == [None, None, 1, None, None]


def test_ranks_that_take_turns_are_not_named() -> None:
    assert named(*[SLOW, SLOW, OTHER, OTHER] * 4) == [None] * 16
    assert named(SLOW, SLOW, SLOW, OTHER, OTHER, OTHER) == [None, None, 1, None, None, 3]


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_no_rank_is_named_in_clean_runs(ranks: int) -> None:
    """Twenty runs of an hour, in which the mean of a window's own times scatters by 2 % from rank to rank."""
    draws = random.Random(0)
    for _ in range(20):
        windows = int(3600 / 20)
        found = [
            slowest([times(computing=draws.gauss(0.8, 0.016)) for _ in range(ranks)]) for _ in range(windows)
        ]
        assert set(named(*found)) == {None}


def test_slow_rank_is_named_in_the_same_scatter() -> None:
    draws = random.Random(0)
    found = [
        slowest(
            [
                times(computing=draws.gauss(0.8, 0.016) + (2.5 * COST_SHARE if rank == 5 else 0.0))
                for rank in range(8)
            ]
        )
        for _ in range(6)
    ]
    assert named(*found)[-1] == 5


def test_times_count_waits_in_steps_only() -> None:
    spent = RankTimes()
    with spent.waiting():
        time.sleep(0.01)
    assert spent.waited == 0.0
    spent.begin_step()
    before = spent.copy()
    with spent.waiting():
        time.sleep(0.01)
    spent.end_step()
    spent.end_step()
    assert 0.01 <= spent.since(before).waited <= spent.since(before).in_steps


def _shorter() -> Any:
    """Shorten the limits, so that a run of seconds names a rank."""
    from fsdp_tune.worker.observe import stragglers

    return patch.multiple(stragglers, WINDOW_SECONDS=0.5, SUSTAINED_SECONDS=1.0)


def run_with_a_slow_rank(path: str) -> dict[str, Any]:
    """Rank 1 takes 0.3 s longer for each of its micro-batches: more than a busy machine takes from the
    other."""
    import torch.distributed as dist

    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer.training_step

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.3)
        return original(self, *arguments, **options)

    with patch.object(FsdpTrainer, "training_step", slow), _shorter():
        return runs.run_worker(path)


def run_with_a_slow_loader(path: str) -> dict[str, Any]:
    import torch.distributed as dist

    from fsdp_tune.worker.rows.batches import Rows

    original = Rows.__getitem__

    def slow(self: Any, index: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(0.1)
        return original(self, index)

    with patch.object(Rows, "__getitem__", slow), _shorter():
        return runs.run_worker(path)


def run_with_a_slow_disk(path: str) -> dict[str, Any]:
    import torch.distributed as dist

    from fsdp_tune.worker.checkpoint.storage import HashingStream

    original = HashingStream.close

    def slow(self: Any) -> None:
        if dist.get_rank() == 1 and not self.closed:
            time.sleep(0.3)
        original(self)

    with patch.object(HashingStream, "close", slow), _shorter():
        return runs.run_worker(path)


def _events(run: Any) -> list[dict[str, Any]]:
    return [line for line in runs.lines(run) if line.get("event") == "slow_rank"]


@pytest.mark.ranks
@pytest.mark.e2e
@on_devices
def test_slow_rank_is_named(bench: Bench) -> None:
    run = trained(bench, Case(), {"training": {"max_steps": 8, "save_steps": 8}}, run_with_a_slow_rank)
    events = _events(run)
    assert {(event["rank"], event["part"]) for event in events} == {(1, "computing")}
    assert events[0]["share"] > 0.1
    assert events[0]["behind_seconds"] == pytest.approx(0.3, rel=0.5)
    assert events[0]["message"].startswith("rank 1 costs ")
    last = runs.loss_lines(run)[-1]
    assert (last["slow_rank"], last["slow_rank_part"]) == (1, "computing")
    status = run_status(run)
    assert status.slow_rank is not None
    assert (status.slow_rank.rank, status.slow_rank.part) == (1, "computing")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.e2e
def test_slow_loader_is_named(bench: Bench) -> None:
    assert {
        (event["rank"], event["part"]) for event in _events(bench.fresh_run(Case(), run_with_a_slow_loader))
    } == {(0, "data")}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.e2e
def test_slow_disk_is_named(bench: Bench) -> None:
    run = bench.written_run(
        runs.merged(
            Case().recipe(str(bench.model("llama"))),
            {
                "training": {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "logging_steps": 1},
                "checkpoint": {"async": False},
            },
        )
    )
    runs.train(bench.on_ranks, run, 2, run_with_a_slow_disk)
    assert {(event["rank"], event["part"]) for event in _events(run)} == {(1, "saving")}


def test_limits_are_those_of_the_documentation() -> None:
    assert (COST_SHARE, SUSTAINED_SECONDS) == (0.05, 60.0)
