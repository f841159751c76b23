"""Times of collectives: bandwidth, latency, and traffic between machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.topology import Group, Topology
from fsdp_tune.core.units import GIB, MIB
from fsdp_tune.planner.predict.collectives import Volume, bus_bytes_per_second, collective_seconds, sent_bytes

A100 = find_hardware("A100-80GB")
EIGHT = Group(8, 1)


def seconds(kind: str, size: float, group: Group) -> float:
    found = collective_seconds(kind, size, group, A100)
    assert found is not None
    return found


def test_large_all_gather_runs_at_the_bus_bandwidth_that_nccl_tests_report() -> None:
    """nccl-tests on 8 × A100 SXM: 235 to 240 GB/s of bus bandwidth, size / seconds × (n − 1) / n."""
    assert GIB / seconds("all_gather", GIB, EIGHT) * 7 / 8 == pytest.approx(237e9, rel=0.05)


def test_all_reduce_costs_an_all_gather_and_a_reduce_scatter_at_most() -> None:
    both = seconds("all_gather", GIB, EIGHT) + seconds("reduce_scatter", GIB, EIGHT)
    assert seconds("all_reduce", GIB, EIGHT) <= both * 1.001


def test_small_multi_machine_all_reduce_uses_a_tree() -> None:
    """A ring of 512 ranks would take 1,022 hops."""
    many = Group(512, 64)
    assert seconds("all_reduce", 8, many) < 150e-6 < seconds("all_gather", 8, many)


def test_time_grows_with_size_and_with_ranks() -> None:
    sizes = [seconds("all_gather", size, EIGHT) for size in (1024, MIB, 64 * MIB, GIB)]
    assert sizes == sorted(sizes)
    ranks = [seconds("all_gather", 64 * MIB, Group(8 * machines, machines)) for machines in (1, 2, 8, 64)]
    assert ranks == sorted(ranks)


def test_ring_all_reduce_crosses_machines_as_nccl_counts() -> None:
    """`nInterSteps` of NCCL 2.20: 2 × machines of the 2 × (ranks − 1) steps; Simple carries what is large."""
    ring = 8.4e-6 + 26 * 3.4e-6 + 4 * 14e-6
    bus = bus_bytes_per_second(Group(16, 2), A100)
    assert bus is not None
    assert seconds("all_reduce", 100 * GIB, Group(16, 2)) == pytest.approx(
        ring + 2 * 15 / 16 * 100 * GIB / bus, abs=1e-9
    )


def test_one_rank_needs_no_communication() -> None:
    assert seconds("all_reduce", GIB, Group(1, 1)) == 0.0
    assert sent_bytes("all_gather", GIB, Group(1, 1)) == Volume(0, 0)


def test_slowest_link_of_the_ring_decides() -> None:
    inside, over = bus_bytes_per_second(EIGHT, A100), bus_bytes_per_second(Group(16, 2), A100)
    assert inside is not None
    assert over is not None
    assert over < inside, "eight cards of 25 GB/s are less than NVLink's 300"
    single = bus_bytes_per_second(Group(2, 2), A100)
    assert single == pytest.approx(over / 8), "one rank of each machine brings one network card"


def test_all_to_all_over_machines_uses_one_card_for_each_rank() -> None:
    group, card = Group(16, 2), bus_bytes_per_second(Group(2, 2), A100)
    assert card is not None
    assert seconds("all_to_all", GIB, group) == pytest.approx(GIB / 2 / card, rel=0.02), (
        "half of the buffer goes to the other machine"
    )
    assert seconds("all_to_all", GIB, EIGHT) == seconds("all_gather", GIB, EIGHT)
    assert sent_bytes("all_to_all", 16 * MIB, group) == Volume(7 * MIB, 8 * MIB)


def test_unknown_link_makes_the_time_unknown() -> None:
    cards = find_hardware("RTX4090")
    assert collective_seconds("all_gather", GIB, Group(2, 1), cards) is not None, "PCIe"
    assert collective_seconds("all_gather", GIB, Group(16, 2), cards) is None, (
        "no vendor's machine has a network for it"
    )
    assert collective_seconds("all_gather", GIB, Group(2, 1), replace(cards, pcie_gb_s=None)) is None


@pytest.mark.parametrize(
    ("shard", "replicate", "shards", "copies"),
    [
        (32, 1, Group(32, 4), Group(1, 1)),  # FULL_SHARD over four machines
        (8, 4, Group(8, 1), Group(4, 4)),  # a copy on each machine
        (4, 8, Group(4, 1), Group(8, 4)),  # two copies on each
        (16, 2, Group(16, 2), Group(2, 2)),  # a copy over two machines
        (1, 32, Group(1, 1), Group(32, 4)),  # NO_SHARD
    ],
)
def test_groups_of_the_mesh_follow_the_order_of_ranks_on_machines(
    shard: int, replicate: int, shards: Group, copies: Group
) -> None:
    topology = Topology(replicate=replicate, shard=shard, machines=4)
    assert topology.group("shard") == shards
    assert topology.group("replicate") == copies
    assert topology.group("world") == Group(32, 4)


def test_bytes_sent_add_up_over_links() -> None:
    """Of the ranks of a machine one has its next neighbour elsewhere, so that a machine sends the buffer once
    over its network."""
    group = Group(16, 2)
    sent = sent_bytes("all_gather", 16 * MIB, group)
    assert sent.machine_link_bytes + sent.network_bytes == 15 * MIB
    assert sent.network_bytes * group.local_ranks == 15 * MIB
    assert sent_bytes("all_reduce", 8 * MIB, EIGHT) == Volume(14 * MIB, 0)
    assert sent_bytes("reduce_scatter", 8 * MIB, EIGHT) == Volume(7 * MIB, 0)
