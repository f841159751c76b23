"""The ranks that tests run functions on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.ranks import Ranks, RanksFailed, shared_ranks

pytestmark = pytest.mark.ranks


def who(greeting: str) -> tuple[str, int, int]:
    import torch.distributed as dist

    return greeting, dist.get_rank(), dist.get_world_size()


def fail_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError("no sooner said")
    dist.barrier()


def die_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        time.sleep(600)


def leave_traces() -> None:
    import torch

    os.environ["FSDP_VERSION"] = "7"
    torch.set_default_dtype(torch.float64)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def traces() -> tuple[bool, str, bool]:
    import torch

    return (
        "FSDP_VERSION" in os.environ,
        str(torch.get_default_dtype()),
        signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
    )


@pytest.fixture
def on_ranks() -> Ranks:
    return shared_ranks()


def test_every_world_size_gets_its_own_group(on_ranks: Ranks) -> None:
    for world_size in (4, 1, 2, 3):
        assert on_ranks.run(world_size, who, "hello") == [
            ("hello", rank, world_size) for rank in range(world_size)
        ]


def test_failure_names_the_rank_and_later_calls_work(on_ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1: (?s:.*)no sooner said"):
        on_ranks.run(2, fail_on, 1)
    assert on_ranks.run(2, who, "again")[1] == ("again", 1, 2)


def test_worlds_do_not_share_state(on_ranks: Ranks) -> None:
    on_ranks.run(2, leave_traces)
    assert on_ranks.run(2, traces) == [(False, "torch.float32", False)] * 2


def test_dead_and_hanging_ranks_are_reported_and_leave_no_process(on_ranks: Ranks) -> None:
    pids = on_ranks.run(2, os.getpid)
    with pytest.raises(RanksFailed, match="rank 1: the process ended with -9"):
        on_ranks.run(2, die_on, 1)
    with pytest.raises(RanksFailed, match=r"rank 1: no end in time\n(?s:.*)hang_on"):
        on_ranks.run(2, hang_on, 1, limit_seconds=2)
    assert not any(_is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
