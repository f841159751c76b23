"""Checks of `doctor` on speed: matrix products, collectives, and the links between machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low

from fsdp_tune.cluster.health_facts import HealthCheck, HealthNeeds, RankHealth, State, first_ranks, judged
from fsdp_tune.core.units import format_bytes
from fsdp_tune.run.health_files import CollectiveTime, NetworkFacts

SLOW_SHARE, FAILING_SHARE = 1.10, 1.50
"""Time of a rank's matrix product relative to the median of all ranks."""
SHARED_CORE_SHARE = 1.5
"""The same for products in a row. Only this shows a limit of the CPU or another process, which the shortest
single product avoids."""
SLOW_LINK_SHARE = 1.5
"""Time of a collective relative to the link table of the planner, whose figures are those of healthy
machines."""
SLOW_PAIR_SHARE, FAILING_PAIR_SHARE = 1.5, 3.0
"""Time of an exchange of two machines relative to the lowest eighth of all pairs: with one slow machine of
three, most pairs are slow."""
LEAST_PAIRS = 3
"""Of fewer, none can be called the slow one by the others."""
LEAST_RATE_SHARE, USUAL_MBITS, MOST_MBITS = 1 / 4, 1_000, 4_000
"""A link is slow below this share of its interface's rate. A virtual one has no known rate; one connection
does not use up a fast one."""


def slow_ranks(seconds: Sequence[float], share: float = SLOW_SHARE) -> list[int]:
    """Return the ranks whose time exceeds the lower median by more than a share: of two ranks, that of the
    faster one."""
    middle = median_low(seconds)
    return [rank for rank, own in enumerate(seconds) if own > share * middle]


def judge_matmul(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001
    times, means = [each.matmul_seconds for each in facts], [each.mean_matmul_seconds for each in facts]
    middle, slow = median_low(times), sorted(slow_ranks(times), key=lambda rank: -times[rank])
    found = [
        f"{facts[rank].label} takes {times[rank] / middle - 1:.0%} longer than the median for a "
        "matrix product"
        for rank in slow
    ]
    found += [
        f"{facts[rank].label} takes {means[rank] / median_low(means) - 1:.0%} longer than the median for "
        "matrix products in a row, though not for a single one"
        for rank in sorted(
            set(slow_ranks(means, SHARED_CORE_SHARE)) - set(slow), key=lambda rank: -means[rank]
        )
    ]
    state: State = "fail" if any(times[rank] > FAILING_SHARE * middle for rank in slow) else "warn"
    fix = (
        "each step waits for it: leave its machine out, or look for heat, a power cap, a limit of the "
        "CPU, or another process there"
    )
    return judged(
        "matrix product",
        found,
        f"{middle * 1e3:.2f} ms, no rank more than {SLOW_SHARE - 1:.0%} slower",
        fix,
        state,
    )


def judge_collectives(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:
    by_kind = {
        each.kind: max(
            each,
            *(other for rank in facts for other in rank.collectives if other.kind == each.kind),
            key=_seconds,
        )
        for each in facts[0].collectives
    }
    if not by_kind:
        return None
    slow = [
        f"{_kind(kind)} of {format_bytes(slowest.bytes)} takes {slowest.seconds * 1e3:.1f} ms, "
        f"{predicted * 1e3:.1f} ms by the link table"
        for kind, slowest in by_kind.items()
        if (predicted := needs.collective_seconds.get(kind)) and slowest.seconds > SLOW_LINK_SHARE * predicted
    ]
    good = ", ".join(
        f"{_kind(kind)} of {format_bytes(each.bytes)} {each.seconds * 1e3:.1f} ms"
        for kind, each in by_kind.items()
    )
    fix = (
        "`NCCL_DEBUG=INFO` names the transport in use; `fsdp-tune env` lists the interfaces and "
        "InfiniBand ports"
    )
    return judged("collectives", slow, good, fix, "warn")


def judge_network(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:  # noqa: ARG001
    known = [(each.host, each.network) for each in first_ranks(facts) if each.network is not None]
    if len(known) < 2:
        return None
    first_host, first = known[0]
    found = [
        f"gloo on {host} uses `{network.used}`, which is not an interface with an address for other machines"
        for host, network in known
        if network.used not in (None, *(each.name for each in network.interfaces))
    ]
    found += [
        f"{host} has the interfaces {_listed(network)}; {first_host} has {_listed(first)}"
        for host, network in known[1:]
        if sorted((each.mbits, each.mtu) for each in network.interfaces)
        != sorted((each.mbits, each.mtu) for each in first.interfaces)
    ]
    fix = (
        "check cable, rate and MTU; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface of "
        "a machine"
    )
    return judged(
        "network", found, f"{_listed(first)} on {first_host}, the same on all machines", fix, "warn"
    )


def _listed(network: NetworkFacts) -> str:
    rates = {
        each.name: f"{each.mbits:,} Mbit/s" if each.mbits else "unknown rate" for each in network.interfaces
    }
    return (
        ", ".join(f"{each.name} ({rates[each.name]}, MTU {each.mtu})" for each in network.interfaces)
        or "none"
    )


def judge_links(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:  # noqa: ARG001
    """Find slow pairs of machines, the machines most of whose links are slow, and links that are slow for
    their interface."""
    largest = max((link.bytes for each in facts for link in each.links), default=0)
    pairs: dict[tuple[int, int], float] = {}
    rates: dict[tuple[int, int], float] = {}
    for each in facts:
        for link in each.links:
            pair = (min(each.machine, link.machine), max(each.machine, link.machine))
            pairs[pair] = max(link.seconds * largest / link.bytes, pairs.get(pair, 0.0))
            way = (link.machine, each.machine)
            # all ranks of a machine exchange at once
            rates[way] = rates.get(way, 0.0) + link.bytes / link.seconds
    if not pairs:
        return None
    usual = sorted(pairs.values())[len(pairs) // 8]
    found, state = (
        _slower_than_others(pairs, usual, {each.machine: each.host for each in facts})
        if len(pairs) >= LEAST_PAIRS
        else ([], "warn")
    )
    found = found or _slower_than_interface(rates, facts)
    good = (
        f"{len(pairs)} pairs of machines, {usual * 1e3:.1f} ms, none takes more than {SLOW_PAIR_SHARE} "
        "times as long"
    )
    if len(pairs) < LEAST_PAIRS:
        good = f"{format_bytes(min(rates.values()))}/s or more in each direction"
    fix = (
        "check cables, ports and switch, or leave the machine out: every collective over machines waits "
        "for the slowest link"
    )
    return judged("links", found, good, fix, state)


def _slower_than_others(
    pairs: Mapping[tuple[int, int], float], usual: float, hosts: Mapping[int, str]
) -> tuple[list[str], State]:
    slow = sorted(
        (pair for pair, seconds in pairs.items() if seconds > SLOW_PAIR_SHARE * usual),
        key=lambda pair: -pairs[pair],
    )
    links_of = Counter(machine for pair in pairs for machine in pair)
    left: list[tuple[int, int]] = slow
    found: list[str] = []
    while left:
        machine, number = Counter(machine for pair in left for machine in pair).most_common(1)[0]
        if number < 2 or number <= links_of[machine] / 2:
            break
        times = [pairs[pair] for pair in left if machine in pair]
        found.append(
            f"{hosts[machine]}: {number} of its links take {_times(min(times), usual)} to "
            f"{_times(max(times), usual)}"
        )
        left = [pair for pair in left if machine not in pair]
    found += [
        f"{hosts[first]} and {hosts[second]}: {_times(pairs[first, second], usual)}" for first, second in left
    ]
    return found, "fail" if any(pairs[pair] > FAILING_PAIR_SHARE * usual for pair in slow) else "warn"


def _slower_than_interface(rates: Mapping[tuple[int, int], float], facts: Sequence[RankHealth]) -> list[str]:
    """Describe each direction between two machines that is slow. `rates`: bytes a second, by sender and
    receiver."""
    firsts = {each.machine: each for each in first_ranks(facts)}
    means = [each.mean_matmul_seconds for each in facts]
    # gloo's messages are copied by the CPU: of a rank that does not get its core, they say nothing about the
    # link.
    busy = (
        set[int]() if facts[0].gpu else {facts[rank].machine for rank in slow_ranks(means, SHARED_CORE_SHARE)}
    )
    found: list[str] = []
    for way, rate in sorted(rates.items(), key=lambda pair: pair[1]):
        if busy & {*way}:
            continue
        sender, receiver = (firsts[machine] for machine in way)
        known = [
            end.network.mbits for end in (sender, receiver) if end.network is not None and end.network.mbits
        ]
        mbits = min(known, default=USUAL_MBITS)
        if rate * 8 / 1e6 < LEAST_RATE_SHARE * min(mbits, MOST_MBITS):
            nominal = (
                f"their interfaces have {mbits:,} Mbit/s"
                if known
                else "the rate of their interfaces is unknown"
            )
            found.append(f"{sender.host} to {receiver.host}: {rate * 8 / 1e6:,.0f} Mbit/s; {nominal}")
    return found


def _times(seconds: float, usual: float) -> str:
    return f"{seconds * 1e3:.1f} ms ({seconds / usual:.1f} times the usual)"


def _seconds(timed: CollectiveTime) -> float:
    return timed.seconds


def _kind(kind: str) -> str:
    return kind.replace("_", "-")
