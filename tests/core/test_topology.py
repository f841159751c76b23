"""Positions of ranks and sizes of groups along each parallel dimension."""

from __future__ import annotations

import pytest

from fsdp_tune.core.topology import DIMENSIONS, Group, Topology


def test_ranks_that_share_rows_have_one_data_rank() -> None:
    topology = Topology(replicate=2, shard=2, sequence=2, tensor=2, machines=2)
    assert topology.world_size == 16
    assert topology.local_world_size == 8
    assert (topology.data_size, topology.gradient_size) == (4, 8)
    assert [rank for rank in range(16) if topology.counts_rows(rank)] == [0, 4, 8, 12]
    assert [topology.data_rank(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [rank for rank in range(16) if topology.counts_loss(rank)] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert (topology.row_size, topology.row_parts, topology.copy_size) == (4, 2, 4)
    assert topology.row_keys() == {"parallelism.sp_size": 2, "parallelism.tp_size": 2}


def test_ranks_with_rows_or_tokens_of_their_own_are_the_outer_ones() -> None:
    """Numbers of ranks are divided by the sizes of the inner dimensions."""
    of_rows, of_tokens = (
        [getattr(each, name) for each in DIMENSIONS.values()] for name in ("has_own_rows", "has_own_tokens")
    )
    assert of_rows == sorted(of_rows, reverse=True)
    assert of_tokens == sorted(of_tokens, reverse=True)
    assert all(each.has_own_tokens for each in DIMENSIONS.values() if each.has_own_rows)
    shards = [index for index, each in enumerate(DIMENSIONS.values()) if each.has_own_shards]
    assert shards == list(range(shards[0], shards[-1] + 1)), "FSDP shards over one dimension"


def test_groups_along_a_dimension_are_neighbours_at_the_distance_of_the_inner_ones() -> None:
    topology = Topology(replicate=2, shard=3, sequence=4, tensor=5)
    assert {name: topology.split(name) for name in DIMENSIONS} == {
        "replicate": (1, 2, 60),
        "shard": (2, 12, 5),
        "sequence": (6, 4, 5),
        "tensor": (24, 5, 1),
    }


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


@pytest.mark.parametrize(
    ("ranks", "machines"), [(2, 1), (3, 2), (4, 1), (6, 2), (8, 2), (12, 3)], ids=lambda number: str(number)
)
def test_group_of_neighbours_that_crosses_a_border_is_on_several_machines(ranks: int, machines: int) -> None:
    """Four ranks on each of six machines."""
    assert Topology(shard=24, machines=6).neighbours(ranks) == Group(ranks, machines)


def test_copies_that_cross_a_border_are_on_two_machines() -> None:
    """Four copies of three ranks on three machines: the second one has ranks 3 to 5."""
    topology = Topology(replicate=4, shard=3, machines=3)
    assert topology.group("shard") == Group(3, 2)
    assert topology.group("replicate") == Group(4, 3)
