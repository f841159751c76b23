"""Failures, values and stop requests of one rank reach all ranks."""

from __future__ import annotations

import pytest

from fsdp_tune.core.errors import Problem, failed_error
from fsdp_tune.worker.agreement import RemoteError, StopVote, all_or_none, from_rank0, gather
from tests.ranks import Ranks


def act_failing_on(bad: int | None, kind: str) -> tuple[str, str]:
    import torch.distributed as dist

    rank = dist.get_rank()

    def act() -> str:
        if rank == bad:
            raise failed_error("disk-full", "no room left") if kind == "ours" else ValueError("plain")
        return f"value of {rank}"

    try:
        return "value", all_or_none(act, "writing")
    except RemoteError as error:
        return "remote", f"{error.problems[0].code}: {error.problems[0].message}"
    except Exception as error:  # noqa: BLE001  the kind is the answer
        return type(error).__name__, str(error)


@pytest.mark.ranks
def test_action_on_all_ranks_returns_or_raises_everywhere(on_ranks: Ranks) -> None:
    assert on_ranks.run(3, act_failing_on, None, "") == [("value", f"value of {rank}") for rank in range(3)]
    remote = ("remote", "disk-full: writing failed on rank 1: no room left")
    assert on_ranks.run(3, act_failing_on, 1, "ours") == [remote, ("FailedError", "no room left"), remote]
    remote = ("remote", "failed: writing failed on rank 2: ValueError: plain")
    assert on_ranks.run(3, act_failing_on, 2, "plain") == [remote, remote, ("ValueError", "plain")]


def decide(fails: bool) -> object:
    import torch.distributed as dist

    def act() -> dict[str, int]:
        assert dist.get_rank() == 0, "only rank 0 acts"
        if fails:
            raise failed_error("code", "rank 0 could not")
        return {"chosen": 7}

    try:
        return from_rank0(act, "choosing")
    except Exception as error:  # noqa: BLE001
        problem: Problem = error.problems[0]  # type: ignore[attr-defined]
        return problem.code


@pytest.mark.ranks
def test_rank_0_result_or_failure_is_broadcast(on_ranks: Ranks) -> None:
    assert on_ranks.run(2, decide, False) == [{"chosen": 7}, {"chosen": 7}]
    assert on_ranks.run(2, decide, True) == ["code", "code"]


def gather_ranks() -> list[str]:
    import torch.distributed as dist

    return gather("x" * dist.get_rank())


@pytest.mark.ranks
def test_gathered_values_are_in_the_order_of_ranks(on_ranks: Ranks) -> None:
    assert on_ranks.run(3, gather_ranks) == [["", "x", "xx"]] * 3


def vote(requests: dict[int, list[int]]) -> list[int]:
    import torch.distributed as dist

    box = StopVote()
    answers = [box.exchange(request) for request in requests[dist.get_rank()]]
    box.finish()
    return answers


@pytest.mark.ranks
def test_all_ranks_read_the_largest_stop_code_at_the_next_step(on_ranks: Ranks) -> None:
    requests = {0: [0, 0, 0, 1, 1], 1: [0, 2, 2, 2, 2], 2: [0, 0, 3, 3, 3]}
    assert on_ranks.run(3, vote, requests) == [[0, 0, 2, 3, 3]] * 3
