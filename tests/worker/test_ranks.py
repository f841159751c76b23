"""The rank pool that tests share."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import RankPool, RanksFailed


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

    return "FSDP_VERSION" in os.environ, str(torch.get_default_dtype()), signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


@pytest.mark.ranks
def test_every_world_size_gets_its_own_group(pool: RankPool) -> None:
    for world_size in (4, 1, 2, 3):
        assert pool.run(world_size, who, "hello") == [("hello", rank, world_size) for rank in range(world_size)]


@pytest.mark.ranks
def test_failure_names_the_rank_and_the_pool_stays_usable(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1\n(?s:.*)no sooner said"):
        pool.run(2, fail_on, 1)
    assert pool.run(2, who, "again")[1] == ("again", 1, 2)


@pytest.mark.ranks
def test_test_cases_do_not_share_state(pool: RankPool) -> None:
    pool.run(2, leave_traces)
    assert pool.run(2, traces) == [(False, "torch.float32", False)] * 2


@pytest.mark.ranks
@pytest.mark.slow  # starts a pool of its own, twice
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_dead_and_hanging_ranks_are_reported_and_replaced(tmp_path: Path) -> None:
    pool = RankPool(tmp_path, size=2)
    try:
        with pytest.raises(RanksFailed, match="the process ended with -9"):
            pool.run(2, die_on, 1)
        with pytest.raises(RanksFailed, match=r"rank 1\n(?s:.*)hang_on"):
            pool.run(2, hang_on, 1, timeout_seconds=60)
        assert pool.run(2, who, "new") == [("new", 0, 2), ("new", 1, 2)]
    finally:
        pids = [process.pid for process in pool._processes]
        pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
