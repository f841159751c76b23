"""Links between machines, measured by pairs: ranks stand for machines."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fsdp_tune.run.health_files import LinkTime
from fsdp_tune.worker import speed_probe
from fsdp_tune.worker.rank import Rank
from fsdp_tune.worker.speed_probe import pairs_of_round, time_links
from tests.ranks import Ranks


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
    exchange = speed_probe._exchange

    def late(*arguments: Any) -> float:
        if rank.index == slow:
            time.sleep(0.1)
        return exchange(*arguments)

    speed_probe._exchange, speed_probe.PAIR_BYTES = late, 1 << 16
    return time_links("cpu", rank, 1)


@pytest.mark.ranks
def test_messages_of_a_slow_machine_take_longer(on_ranks: Ranks) -> None:
    found = on_ranks.run(4, links_with_a_slow_machine, 2)
    for machine, links in enumerate(found):
        assert sorted(link.machine for link in links) == [other for other in range(4) if other != machine]
        for link in links:
            assert (link.seconds > 0.06) == (link.machine == 2), (machine, link)


def links_with_a_fixed_rate(bytes_per_second: float, pair_bytes: int) -> list[LinkTime]:
    import torch.distributed as dist

    speed_probe.PAIR_BYTES = pair_bytes

    def fixed(sent: Any, *_: Any) -> float:
        return len(sent) / bytes_per_second

    speed_probe._exchange = fixed
    return time_links("cpu", Rank(dist.get_rank(), 0, dist.get_world_size()), 1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("bytes_per_second", "measured"),
    [(1 << 30, speed_probe.PAIR_BYTES), (1 << 20, speed_probe.PAIR_BYTES // 16)],
)
def test_slow_link_is_measured_with_fewer_bytes(
    on_ranks: Ranks, bytes_per_second: float, measured: int
) -> None:
    for (link,) in on_ranks.run(2, links_with_a_fixed_rate, bytes_per_second, speed_probe.PAIR_BYTES):
        assert (link.bytes, link.seconds) == (measured, measured / bytes_per_second)
