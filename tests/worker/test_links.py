"""Links between machines, measured by pairs: ranks stand for machines."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fsdp_tune.run.launch_files import LinkTime
from fsdp_tune.worker import doctor
from fsdp_tune.worker.doctor import pairs_of_round, time_links
from fsdp_tune.worker.rank import Rank
from tests.ranks import RankPool


@pytest.mark.parametrize("machines", [2, 3, 4, 5, 8, 63, 64])
def test_all_pairs_meet_once(machines: int) -> None:
    rounds = [pairs_of_round(machines, number) for number in range(machines - 1 + machines % 2)]
    for met in rounds:
        assert all(met[other] == machine for machine, other in met.items())
        assert len(met) == machines - machines % 2
    pairs = [tuple(sorted(pair)) for met in rounds for pair in met.items()]
    assert sorted(pairs) == sorted([(low, high) for high in range(machines) for low in range(high)] * 2)


def links_with_a_slow_machine(slow: int) -> list[LinkTime]:
    import torch.distributed as dist

    rank = Rank(dist.get_rank(), 0, dist.get_world_size())
    exchange = doctor._exchange

    def late(*arguments: Any) -> None:
        if rank.index == slow:
            time.sleep(0.1)
        exchange(*arguments)

    doctor._exchange, doctor.PAIR_BYTES = late, 1 << 16
    return time_links("cpu", rank, 1)


@pytest.mark.ranks
def test_links_of_a_slow_machine_take_longer(pool: RankPool) -> None:
    found = pool.run(4, links_with_a_slow_machine, 2)
    for machine, links in enumerate(found):
        assert sorted(link.machine for link in links) == [other for other in range(4) if other != machine]
        for link in links:
            assert (link.seconds > 0.06) == (2 in (machine, link.machine)), (machine, link)
