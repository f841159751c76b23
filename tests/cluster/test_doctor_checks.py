"""Facts of ranks → the checks that `doctor` prints."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fsdp_tune.cluster.doctor_checks import differences_of_ranks, judge_health
from fsdp_tune.cluster.health_facts import HealthCheck, HealthNeeds, RankHealth
from fsdp_tune.cluster.speed_checks import slow_ranks
from fsdp_tune.core.devices import GpuState
from fsdp_tune.core.units import GIB, MIB
from fsdp_tune.run.health_files import CollectiveTime, LinkTime, NetworkFacts, NetworkInterface, OutputFacts

OUTPUT = OutputFacts("/runs", None, 4, True, "works", 100 * GIB, 64 * MIB, 0.5)
GPU = GpuState(300 * MIB, 0, 1980, 0, 700.0, 700.0, ())
NEEDS = HealthNeeds(10 * GIB, 3, 2 * GIB, {"all_gather": 0.010}, uses_infiniband=True)


ETH0 = NetworkInterface("eth0", 25_000, 1500)


def healthy(rank: int) -> RankHealth:
    return RankHealth(
        rank=rank,
        machine=rank // 2,
        host="ab"[rank // 2],
        versions={"python": "3.12.1", "torch": "2.13.0", "transformers": "5.24.0"},
        open_files_limit=65536,
        open_files_needed=4116,
        locked_memory_limit_bytes=None,
        shared_memory_bytes=8 * GIB,
        clock_seconds=0.01,
        output=OUTPUT,
        inputs={"model": "blake2b:1", "data.train[0]": "blake2b:2"} if rank % 2 == 0 else {},
        matmul_seconds=0.010 + rank * 1e-5,
        mean_matmul_seconds=0.0102,
        network=NetworkFacts("eth0", [ETH0]) if rank % 2 == 0 else None,
        collectives=[CollectiveTime("all_gather", 400 * MIB, 0.011)],
        gpu_before=GPU,
        gpu=GPU,
    )


def judged(needs: HealthNeeds = NEEDS, **changes: RankHealth) -> list[HealthCheck]:
    facts = [healthy(rank) for rank in range(4)]
    for rank, changed in changes.items():
        facts[int(rank.removeprefix("rank"))] = changed
    return judge_health(facts, needs)


def found(checks: list[HealthCheck]) -> tuple[str, str, str]:
    """The only check that is not ok."""
    (bad,) = [check for check in checks if check.state != "ok"]
    assert bad.fix
    return bad.name, bad.state, bad.finding


def test_healthy_machines_pass_every_check() -> None:
    checks = judged()
    assert {check.state for check in checks} == {"ok"}
    assert len(checks) == 16
    assert {check.fix for check in checks} == {None}


def test_machines_with_own_directories_see_no_files_of_each_other() -> None:
    needs = replace(NEEDS, checkpoint_bytes=60 * GIB, most_checkpoints=3, own_directories=2)
    unshared = {
        f"rank{rank}": output(rank, visible_ranks=2, sees_rename=rank < 2, lock="not shared")
        for rank in range(4)
    }
    checks = {check.name: check for check in judged(needs, **unshared)}
    assert [check for check in checks.values() if check.state != "ok"] == []
    assert "rename" not in checks
    assert "3 checkpoints need 90.00 GiB" in checks["space"].finding
    unwritable = {
        check.name: check for check in judged(needs, rank3=output(3, error="Read-only file system"))
    }
    assert unwritable["output directory"].state == "fail"


def output(rank: int, **changes: object) -> RankHealth:
    return replace(healthy(rank), output=replace(OUTPUT, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "changed", "name", "state", "words"),
    [
        (
            2,
            {"versions": {"python": "3.12.1", "torch": "2.12.0", "transformers": "5.24.0"}},
            "versions",
            "fail",
            "rank 2 on b has torch 2.12.0",
        ),
        (2, {"clock_seconds": -40.0}, "clocks", "warn", "the clock of b is -40.0 s from that of a"),
        (2, {"open_files_limit": 1024}, "open files", "fail", "b allows 1024 open files"),
        (2, {"shared_memory_bytes": 64 * MIB}, "/dev/shm", "warn", "b has 64.00 MiB"),
        (2, {"locked_memory_limit_bytes": 65536}, "locked memory", "fail", "b allows 64.00 KiB"),
        (3, {"gpu": replace(GPU, uncorrected_errors=2)}, "GPUs", "fail", "rank 3 on b has 2 uncorrected"),
        (3, {"gpu_before": replace(GPU, used_bytes=9 * GIB)}, "GPUs", "warn", "was not idle: 9.00 GiB"),
        (3, {"gpu": replace(GPU, slowed_by=("heat",))}, "GPUs", "warn", "lowers its clock (heat)"),
        (3, {"gpu": replace(GPU, power_limit_watts=400.0)}, "GPUs", "warn", "limited to 400 W of 700 W"),
        (1, {"matmul_seconds": 0.0115}, "matrix product", "warn", "rank 1 on a takes 15% longer"),
        (1, {"matmul_seconds": 0.020}, "matrix product", "fail", "rank 1 on a takes"),
        (
            2,
            {"inputs": {"model": "blake2b:1"}},
            "inputs",
            "fail",
            "b does not have the files of `data.train[0]`, which a has",
        ),
        (
            2,
            {"inputs": {"model": "blake2b:3", "data.train[0]": "blake2b:2"}},
            "inputs",
            "fail",
            "the files of `model` on b are not those on a",
        ),
        (
            2,
            {"inputs": {"model": "not compared", "data.train[0]": "blake2b:2"}},
            "inputs",
            "fail",
            "b does not have the files of `model`",
        ),
        (
            2,
            {"inputs": {"model": "error: `m` does not exist", "data.train[0]": "blake2b:2"}},
            "inputs",
            "fail",
            "b: `m` does not exist",
        ),
        (
            1,
            {"mean_matmul_seconds": 0.018},
            "matrix product",
            "warn",
            "rank 1 on a takes 76% longer than the median for matrix products in a",
        ),
        (2, {"differs": "machine 1 (b) differs"}, "settings", "fail", "machine 1 (b) differs"),
        (
            2,
            {"network": NetworkFacts("eth0", [ETH0, NetworkInterface("eth1", 0, 1500)])},
            "network",
            "warn",
            "b has the interfaces eth0",
        ),
        (
            2,
            {"network": NetworkFacts("eth0", [replace(ETH0, mtu=9000)])},
            "network",
            "warn",
            "eth0 (25,000 Mbit/s, MTU 9000); a has eth0",
        ),
        (
            2,
            {"network": NetworkFacts("eth0", [replace(ETH0, mbits=1000)])},
            "network",
            "warn",
            "b has the interfaces eth0 (1,000 Mbit/s",
        ),
        (2, {"network": NetworkFacts("lo", [ETH0])}, "network", "warn", "gloo on b uses `lo`"),
        (
            1,
            {"collectives": [CollectiveTime("all_gather", 400 * MIB, 0.031)]},
            "collectives",
            "warn",
            "31.0 ms, 10.0 ms by the link table",
        ),
    ],
)
def test_each_fault_is_named_and_nothing_else(
    rank: int, changed: dict[str, object], name: str, state: str, words: str
) -> None:
    bad = found(judged(**{f"rank{rank}": replace(healthy(rank), **changed)}))  # type: ignore[arg-type]
    assert bad[:2] == (name, state)
    assert words in bad[2]


def test_read_only_directory_of_one_rank_is_named_and_hides_its_consequences() -> None:
    assert found(
        judged(
            rank3=output(
                3, error="Read-only file system", written_bytes=0, visible_ranks=3, sees_rename=False
            )
        )
    ) == (
        "output directory",
        "fail",
        "rank 3 on b cannot write in /runs: Read-only file system",
    )


def test_directory_that_machines_do_not_share_fails() -> None:
    name, state, finding = found(judged(rank2=output(2, visible_ranks=2, sees_rename=False)))
    assert (name, state) == ("output directory", "fail")
    assert "sees the files of 2 of 4 ranks" in finding


def test_unseen_rename_fails_and_unshared_locks_warn() -> None:
    assert found(judged(rank2=output(2, sees_rename=False)))[:2] == ("rename", "fail")
    assert found(judged(rank2=output(2, lock="not shared")))[:2] == ("locks", "warn")


@pytest.mark.parametrize(("free_gib", "state"), [(9, "fail"), (29, "warn"), (30, "ok")])
def test_space_is_compared_with_one_checkpoint_and_with_all_kept(free_gib: int, state: str) -> None:
    (space,) = [
        check for check in judged(rank1=output(1, free_bytes=free_gib * GIB)) if check.name == "space"
    ]
    assert space.state == state


def test_slow_disk_is_reported_by_the_time_of_a_checkpoint() -> None:
    slow = {f"rank{rank}": output(rank, written_bytes=MIB, write_seconds=1.0) for rank in range(4)}
    name, state, finding = found(judged(NEEDS, **slow))
    assert (name, state) == ("write rate", "warn")
    assert finding.startswith("4.00 MiB/s: 42m")


def test_of_two_ranks_the_slower_one_is_named() -> None:
    assert slow_ranks([0.010, 0.0112]) == [1]
    assert slow_ranks([0.010, 0.0109]) == []


def test_cpu_ranks_without_a_trace_are_judged_by_what_is_known() -> None:
    facts = [replace(healthy(rank), gpu=None, gpu_before=None, collectives=[]) for rank in range(4)]
    names = [check.name for check in judge_health(facts, HealthNeeds())]
    assert names == [
        "versions",
        "settings",
        "clocks",
        "open files",
        "output directory",
        "rename",
        "locks",
        "inputs",
        "matrix product",
        "network",
    ]


def test_differences_name_values_that_only_one_has() -> None:
    assert differences_of_ranks([{"a": "1"}, {"a": "1", "b": "2"}]) == ["rank 1 has b 2, rank 0 has None"]


def linked(slow: dict[tuple[int, int], float], machines: int = 4) -> list[RankHealth]:
    """Ranks of machines whose pairs take 10 ms, or as `slow` has it."""
    facts: list[RankHealth] = []
    for rank in range(2 * machines):
        others = [other for other in range(machines) if other != rank // 2]
        links = [
            LinkTime(other, MIB, slow.get((min(rank // 2, other), max(rank // 2, other)), 0.010))
            for other in others
        ]
        facts.append(
            replace(healthy(0), rank=rank, machine=rank // 2, host=f"node{rank // 2}", inputs={}, links=links)
        )
    return facts


@pytest.mark.parametrize(
    ("slow", "state", "words"),
    [
        ({(0, 2): 0.020}, "warn", "node0 and node2: 20.0 ms (2.0 times the usual)"),
        (
            {(0, 2): 0.020, (1, 3): 0.050},
            "fail",
            "node1 and node3: 50.0 ms (5.0 times the usual) (and 1 more)",
        ),
        (
            {(0, 1): 0.020, (1, 2): 0.022, (1, 3): 0.018},
            "warn",
            "node1: 3 of its links take 18.0 ms (1.8 times the usual) to 22.0 ms",
        ),
    ],
)
def test_slow_link_is_named_by_its_pair_or_its_machine(
    slow: dict[tuple[int, int], float], state: str, words: str
) -> None:
    (check,) = [check for check in judge_health(linked(slow), HealthNeeds()) if check.name == "links"]
    assert (check.state, check.finding.startswith(words)) == (state, True), check.finding


def test_interfaces_of_other_names_but_the_same_rates_are_equal() -> None:
    other = NetworkFacts("ens5", [replace(ETH0, name="ens5")])
    assert {check.state for check in judged(rank2=replace(healthy(2), network=other))} == {"ok"}


@pytest.mark.parametrize(
    ("mbits", "seconds", "words"),
    [
        (25_000, 0.268, None),
        (25_000, 0.274, "b to a: 980 Mbit/s; their interfaces have 25,000 Mbit/s"),
        (1_000, 1.0, None),
        (1_000, 1.2, "b to a: 224 Mbit/s; their interfaces have 1,000 Mbit/s"),
        (0, 1.0, None),
        (0, 1.2, "b to a: 224 Mbit/s; the rate of their interfaces is unknown"),
    ],
)
def test_link_of_two_machines_is_compared_with_their_interfaces(
    mbits: int, seconds: float, words: str | None
) -> None:
    """Two ranks of each machine share the link: 16 MiB in a second each are 268 Mbit/s."""
    network = NetworkFacts("eth0", [replace(ETH0, mbits=mbits)])
    facts = [
        replace(
            healthy(rank),
            network=network,
            links=[LinkTime(1 - rank // 2, 16 * MIB, seconds if rank < 2 else 0.01)],
        )
        for rank in range(4)
    ]
    (check,) = [check for check in judge_health(facts, HealthNeeds()) if check.name == "links"]
    assert (check.state, check.finding.startswith(words or "")) == ("warn" if words else "ok", True), (
        check.finding
    )


def test_rank_without_its_core_does_not_make_its_link_slow() -> None:
    links = {0: [LinkTime(1, 16 * MIB, 9.0)], 2: [LinkTime(0, 16 * MIB, 9.0)]}
    facts = [
        replace(healthy(rank), gpu=None, gpu_before=None, links=links.get(rank, [])) for rank in range(4)
    ]
    assert {check.name for check in judge_health(facts, HealthNeeds()) if check.state != "ok"} == {"links"}
    facts[3] = replace(facts[3], mean_matmul_seconds=0.030)
    assert {check.name for check in judge_health(facts, HealthNeeds()) if check.state != "ok"} == {
        "matrix product"
    }


def test_link_that_was_measured_with_fewer_bytes_is_compared_by_its_rate() -> None:
    facts = linked({(0, 2): 0.010})
    halved = [
        replace(
            each,
            links=[
                replace(link, bytes=link.bytes // 16) if {each.machine, link.machine} == {0, 2} else link
                for link in each.links
            ],
        )
        for each in facts
    ]
    (check,) = [check for check in judge_health(halved, HealthNeeds()) if check.name == "links"]
    assert (check.state, check.finding.startswith("node0 and node2: 160.0 ms")) == ("fail", True), (
        check.finding
    )


@pytest.mark.parametrize(
    ("machines", "slow"),
    [(3, {2}), (4, {1}), (4, {1, 2}), (5, {0, 1}), (6, {0, 1}), (17, {3}), (100, {3, 77})],
    ids=lambda value: str(value),
)
def test_machines_with_slow_links_are_named_and_no_other(machines: int, slow: set[int]) -> None:
    pairs = {(low, high): 0.040 for high in range(machines) for low in range(high) if slow & {low, high}}
    (check,) = [
        check for check in judge_health(linked(pairs, machines), HealthNeeds()) if check.name == "links"
    ]
    assert check.state == "fail"
    named = re.findall(r"node\d+", check.finding)
    assert set(named) <= {f"node{machine}" for machine in slow}, check.finding
    assert (" (and 1 more)" in check.finding) == (len(slow) == 2)
