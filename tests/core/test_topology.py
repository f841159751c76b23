"""Positions of ranks and sizes of groups along each parallel dimension."""

from __future__ import annotations

import pytest

from fsdp_tune.core.topology import Group, Topology


def test_ranks_that_share_rows_have_one_data_rank() -> None:
    topology = Topology(replicate=2, shard=2, sequence=2, tensor=2, machines=2)
    assert topology.world_size == 16
    assert topology.local_world_size == 8
    assert (topology.data_size, topology.gradient_size) == (4, 8)
    assert [rank for rank in range(16) if topology.counts_rows(rank)] == [0, 4, 8, 12]
    assert [topology.data_rank(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.parametrize(
    ("topology", "shard", "replicate"),
    [
        (Topology(shard=32, machines=4), Group(32, 4), Group(1, 1)),
        (Topology(replicate=4, shard=8, machines=4), Group(8, 1), Group(4, 4)),
        (Topology(replicate=2, shard=4), Group(4, 1), Group(2, 1)),
        (Topology(replicate=2, shard=2, sequence=8, machines=4), Group(16, 2), Group(2, 2)),
        (Topology(replicate=8), Group(1, 1), Group(8, 1)),
    ],
)
def test_groups_span_as_few_machines_as_they_can(topology: Topology, shard: Group, replicate: Group) -> None:
    assert topology.group("shard") == shard
    assert topology.group("replicate") == replicate
    assert topology.group("sequence") == Group(topology.sequence, 1)
    assert topology.group("world") == Group(topology.world_size, topology.machines)
