"""Facts that the ranks of `doctor` measure about their machines, and the checks that judge them.

Pure: `worker/doctor.py` measures, `jobs/doctor.py` starts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal, TypeVar

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.devices import GpuState
from fsdp_tune.core.units import GIB, format_bytes, format_seconds
from fsdp_tune.run.health_files import CollectiveTime, LinkTime, NetworkFacts, OutputFacts

State = Literal["ok", "warn", "fail"]

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
SLOW_CHECKPOINT_SECONDS = 600.0
CLOCK_SECONDS = 1.0
IDLE_BYTES = GIB
"""Memory in use on an idle GPU: the driver's own, and a display."""
LOCKED_BYTES = 64 << 20
"""A limit of locked memory below this fails InfiniBand's registration of buffers (`ibv_reg_mr`)."""
MISSING = "error: "
"""Before the message of an input that could not be found."""
NOT_COMPARED = "not compared"
"""An input that a machine would download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits(JsonAnswer):
    """What the machine of a rank allows it, and the state of its GPU."""

    rank: int
    machine: int
    host: str
    open_files_limit: int | None
    """The most that a process may request; null: no limit."""
    open_files_needed: int
    locked_memory_limit_bytes: int | None
    shared_memory_bytes: int | None
    """Free in /dev/shm; null: there is none."""
    gpu_before: GpuState | None = None
    """Before the ranks started."""
    gpu: GpuState | None = None
    """During matrix products."""

    @property
    def label(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth(RankLimits):
    versions: dict[str, str | None]
    clock_seconds: float
    """Ahead of rank 0."""
    output: OutputFacts
    inputs: dict[str, str]
    """Model, tokenizer and data → digest or the reason why there is none; of the first rank of each
    machine."""
    matmul_seconds: float
    """Shortest of many."""
    mean_matmul_seconds: float
    """Mean in the best third of a second."""
    differs: str | None = None
    """How this machine differs from the first in recipe, variables or ports, so that `train` would not start;
    of its first rank."""
    network: NetworkFacts | None = None
    """Of the first rank of each machine; null on a single one."""
    collectives: list[CollectiveTime] = field(default_factory=list[CollectiveTime])
    links: list[LinkTime] = field(default_factory=list[LinkTime])


AnyRank = TypeVar("AnyRank", bound=RankLimits)


@dataclass(frozen=True, slots=True)
class HealthNeeds:
    """What a run of the recipe needs; None if it is unknown."""

    checkpoint_bytes: int | None = None
    most_checkpoints: int | None = None
    """At one time; None: all are kept."""
    shared_memory_bytes: int | None = None
    """In /dev/shm of each machine; None on CPU ranks."""
    collective_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Kind → predicted time of the measured collective."""
    uses_infiniband: bool = False
    own_directories: int = 1
    """Machines that each write a part of a checkpoint into a directory of their own; 1: all ranks write into
    one."""


@dataclass(frozen=True, slots=True)
class HealthCheck(JsonAnswer):
    name: str
    state: State
    finding: str
    fix: str | None = None
    """What to do; null for `ok`."""


def differences_of_ranks(
    values: Sequence[Mapping[str, str | None]], labels: Sequence[str] | None = None
) -> list[str]:
    """Describe each value that differs from that of rank 0. `labels` name the owners, by default `rank N`."""
    labels = labels or [f"rank {rank}" for rank in range(len(values))]
    first = values[0]
    return [
        f"{label} has {name} {other.get(name)}, {labels[0]} has {first.get(name)}"
        for label, other in zip(labels[1:], values[1:], strict=True)
        for name in sorted({*first, *other}, key=[*first, *other].index)
        if other.get(name) != first.get(name)
    ]


def judge_health(facts: Sequence[RankHealth], needs: HealthNeeds) -> list[HealthCheck]:
    """Judge the facts of all ranks, in the order of ranks."""
    judges: Sequence[Callable[[Sequence[RankHealth], HealthNeeds], HealthCheck | None]] = (
        *(_versions, _settings, _clocks, *_LIMITS),
        *(_output, _rename, _locks, _space, _write_rate, _inputs, _matmul, _collectives, _network, _links),
    )
    return [check for judge in judges if (check := judge(facts, needs)) is not None]


def judge_limits(facts: Sequence[RankLimits], needs: HealthNeeds) -> list[HealthCheck]:
    """Judge what is known of a machine before any rank has started."""
    return [check for judge in _LIMITS if (check := judge(facts, needs)) is not None]


def _check(name: str, found: Sequence[str], good: str, fix: str, state: State = "fail") -> HealthCheck:
    """Return ok with `good` if nothing was found, else the first finding and the number of others."""
    if not found:
        return HealthCheck(name, "ok", good)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return HealthCheck(name, state, f"{found[0]}{more}", fix)


def _versions(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001  all judges have one signature
    found = differences_of_ranks([each.versions for each in facts], [each.label for each in facts])
    known = facts[0].versions
    good = f"torch {known.get('torch')}, transformers {known.get('transformers')} on every rank"
    return _check("versions", found, good, "install the same packages on every machine")


def _machines(facts: Sequence[AnyRank]) -> list[AnyRank]:
    """Return the first rank of each machine."""
    return list({each.machine: each for each in reversed(facts)}.values())[::-1]


def _settings(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:  # noqa: ARG001
    if len(_machines(facts)) == 1:
        return None
    found = [each.differs for each in facts if each.differs is not None]
    fix = (
        "pass the same recipe and `--set` and set the same variables on all machines, else `train` does "
        "not start"
    )
    return _check(
        "settings", found, "the same recipe, devices and variables of NCCL and gloo on all machines", fix
    )


def _clocks(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001
    found = [
        f"the clock of {each.host} is {each.clock_seconds:+.1f} s from that of {facts[0].host}"
        for each in _machines(facts)
        if abs(each.clock_seconds) > CLOCK_SECONDS
    ]
    fix = "synchronise the clocks (chrony or NTP): heartbeats and locks of other machines are judged by time"
    return _check("clocks", found, f"within {CLOCK_SECONDS:.0f} s of rank 0", fix, "warn")


def _open_files(facts: Sequence[RankLimits], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001
    found = [
        f"{each.host} allows {each.open_files_limit} open files, a rank needs {each.open_files_needed}"
        for each in _machines(facts)
        if each.open_files_limit is not None and each.open_files_limit < each.open_files_needed
    ]
    return _check(
        "open files",
        found,
        f"{facts[0].open_files_needed} allowed",
        "raise the hard limit (`ulimit -Hn`, LimitNOFILE=)",
    )


def _shared_memory(facts: Sequence[RankLimits], needs: HealthNeeds) -> HealthCheck | None:
    needed = needs.shared_memory_bytes
    if needed is None:
        return None
    found = [
        f"{each.host} has {format_bytes(each.shared_memory_bytes or 0)} free in /dev/shm, the ranks "
        f"may need {format_bytes(needed)}"
        for each in _machines(facts)
        if (each.shared_memory_bytes or 0) < needed
    ]
    fix = (
        f"`docker run --shm-size={max(1, needed // GIB)}g`, an emptyDir of medium Memory in Kubernetes, "
        "or remove stale files there"
    )
    return _check("/dev/shm", found, f"{format_bytes(needed)} free", fix, "warn")


def _locked_memory(facts: Sequence[RankLimits], needs: HealthNeeds) -> HealthCheck | None:
    if not needs.uses_infiniband:
        return None
    limits = [(each.host, each.locked_memory_limit_bytes) for each in _machines(facts)]
    found = [
        f"{host} allows {format_bytes(limit)} of locked memory"
        for host, limit in limits
        if limit is not None and limit < LOCKED_BYTES
    ]
    return _check(
        "locked memory",
        found,
        "enough for InfiniBand",
        "`ulimit -l unlimited`, or LimitMEMLOCK=infinity for the daemon",
    )


def _gpus(facts: Sequence[RankLimits], needs: HealthNeeds) -> HealthCheck | None:  # noqa: ARG001
    if all(each.gpu is None and each.gpu_before is None for each in facts):
        return None
    errors = [
        f"the GPU of {each.label} has {each.gpu.uncorrected_errors} uncorrected memory errors"
        for each in facts
        if each.gpu is not None and each.gpu.uncorrected_errors
    ]
    if errors:
        return _check(
            "GPUs",
            errors,
            "",
            "reset the GPU, or leave its machine out; `nvidia-smi -q -d ECC` has the counts",
        )
    found = [f"the GPU of {each.label} {what}" for each in facts for what in _gpu_findings(each)]
    fix = (
        "`nvidia-smi` names the processes that use it, and `nvidia-smi -q -d PERFORMANCE,POWER` the "
        "causes of low clocks"
    )
    clocks = [each.gpu.clock_mhz for each in facts if each.gpu is not None and each.gpu.clock_mhz is not None]
    return _check(
        "GPUs",
        found,
        f"idle before, {min(clocks)} MHz or more under load" if clocks else "idle before",
        fix,
        "warn",
    )


def _gpu_findings(facts: RankLimits) -> Iterator[str]:
    before, now = facts.gpu_before, facts.gpu
    if before is not None and before.used_bytes is not None and before.used_bytes > IDLE_BYTES:
        yield f"was not idle: {format_bytes(before.used_bytes)} of its memory in use"
    elif before is not None and before.busy_percent:
        yield f"was not idle: {before.busy_percent} % busy"
    if now is None:
        return
    if now.slowed_by:
        yield f"lowers its clock ({', '.join(now.slowed_by)})"
    if now.power_limit_watts and now.default_power_watts and now.power_limit_watts < now.default_power_watts:
        yield f"is limited to {now.power_limit_watts:.0f} W of {now.default_power_watts:.0f} W"


_LIMITS: Sequence[Callable[[Sequence[RankLimits], HealthNeeds], HealthCheck | None]] = (
    _open_files,
    _shared_memory,
    _locked_memory,
    _gpus,
)


def _output(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:
    unwritable = [
        f"{each.label} cannot write in {each.output.directory}: {each.output.error}"
        for each in facts
        if each.output.error
    ]
    if unwritable:
        return _check(
            "output directory",
            unwritable,
            "",
            "change the permission or the mount, or `--set output_dir=DIR`",
        )
    if needs.own_directories > 1:
        return HealthCheck("output directory", "ok", "writable on all machines, each its own")
    hidden = [
        f"{each.label} sees the files of {each.output.visible_ranks} of {len(facts)} ranks in "
        f"{each.output.directory}"
        for each in facts
        if each.output.visible_ranks < len(facts)
    ]
    fix = (
        "`output_dir` must be on a file system that all machines see; `launch.shared_directory: false` "
        "gives each machine its own"
    )
    return _check("output directory", hidden, "writable and shared by all ranks", fix)


def _rename(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:
    if needs.own_directories > 1 or any(
        each.output.error or each.output.visible_ranks < len(facts) for each in facts
    ):
        return None
    found = [
        f"{each.label} does not see that rank 0 has renamed a directory"
        for each in facts
        if not each.output.sees_rename
    ]
    fix = (
        "checkpoints are completed by a rename: shorten the attribute cache of the mount (NFS: "
        "`actimeo`), or use another file system"
    )
    return _check("rename", found, "seen by all ranks", fix)


def _locks(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:
    """Judge whether a second command can be excluded; locks need not be shared by machines that have their
    own directories."""
    if any(each.output.error for each in facts):
        return None
    words = {"missing": "has no locks"}
    if needs.own_directories <= 1:
        words["not shared"] = "does not share locks between machines"
    found = [
        f"the file system of {each.output.directory} {words[each.output.lock]}"
        for each in facts
        if each.output.lock in words
    ]
    if not found and all(each.output.lock == "untested" for each in facts):
        return HealthCheck(
            "locks",
            "warn",
            f"could not be tested in {facts[0].output.directory}",
            "start a run once: a second command may not be excluded",
        )
    fix = (
        "nothing is lost: a killed command's run directory is free for another machine after 300 s; do "
        "not start a run twice"
    )
    return _check("locks", found, "exclude other commands", fix, "warn")


def _space(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:
    free = [(each.output.free_bytes, each) for each in facts if each.output.free_bytes is not None]
    if not free or needs.checkpoint_bytes is None:
        return None
    least, rank = min(free, key=lambda pair: pair[0])
    return judge_space(
        rank.output.directory, least, needs.checkpoint_bytes // needs.own_directories, needs.most_checkpoints
    )


def judge_space(
    directory: str, free_bytes: int, checkpoint_bytes: int, most_checkpoints: int | None
) -> HealthCheck:
    """Judge the free space for checkpoints. `most_checkpoints`: at one time; None: all are kept."""
    kept = most_checkpoints or 2
    wanted_bytes = checkpoint_bytes * kept
    fix = "free space, or lower `training.save_total_limit`"
    if free_bytes < checkpoint_bytes:
        finding = (
            f"{format_bytes(free_bytes)} free in {directory}; one checkpoint needs "
            f"{format_bytes(checkpoint_bytes)}"
        )
        return HealthCheck("space", "fail", finding, fix)
    finding = (
        f"{format_bytes(free_bytes)} free in {directory}; {kept} checkpoints need "
        f"{format_bytes(wanted_bytes)}"
    )
    is_enough = free_bytes >= wanted_bytes
    return HealthCheck("space", "ok" if is_enough else "warn", finding, None if is_enough else fix)


def _write_rate(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:
    rates = [
        each.output.written_bytes / each.output.write_seconds for each in facts if each.output.written_bytes
    ]
    if len(rates) < len(facts) or needs.checkpoint_bytes is None:
        return None
    seconds = needs.checkpoint_bytes / sum(rates)
    finding = (
        f"{format_bytes(sum(rates))}/s: {format_seconds(seconds)} for a checkpoint of "
        f"{format_bytes(needs.checkpoint_bytes)}"
    )
    fix = "save less often (`training.save_steps`), or write to a faster file system"
    return _check("write rate", [finding] if seconds > SLOW_CHECKPOINT_SECONDS else [], finding, fix, "warn")


def _inputs(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001
    machines = _machines(facts)
    missing = [
        f"{each.host}: {text.removeprefix(MISSING)}"
        for each in machines
        for text in each.inputs.values()
        if text.startswith(MISSING)
    ]
    if missing:
        return _check(
            "inputs", missing, "", "`fsdp-tune validate` on that machine checks the paths of model and data"
        )
    found = [words for each in machines[1:] for words in _differing_inputs(each, machines[0])]
    if found:
        return _check("inputs", found, "", "copy the same files to every machine")
    unseen = sorted({key for each in machines for key, text in each.inputs.items() if text == NOT_COMPARED})
    named = "what is on this disk of model, tokenizer and data is found, and equal on all machines"
    unseen_too = [f"{named}; not compared, as it would be downloaded: {', '.join(unseen)}"] if unseen else []
    return _check(
        "inputs", unseen_too, named, "download before the run, or see that every machine can", "warn"
    )


def _differing_inputs(mine: RankHealth, first: RankHealth) -> Iterator[str]:
    absent = (None, NOT_COMPARED)
    for key in sorted({*first.inputs, *mine.inputs}, key=[*first.inputs, *mine.inputs].index):
        here, there = mine.inputs.get(key), first.inputs.get(key)
        if here == there:
            continue
        if here in absent or there in absent:
            without, other = (mine, first) if here in absent else (first, mine)
            yield f"{without.host} does not have the files of `{key}`, which {other.host} has"
        else:
            yield f"the files of `{key}` on {mine.host} are not those on {first.host}"


def slow_ranks(seconds: Sequence[float], share: float = SLOW_SHARE) -> list[int]:
    """Return the ranks whose time exceeds the lower median by more than a share: of two ranks, that of the
    faster one."""
    middle = median_low(seconds)
    return [rank for rank, own in enumerate(seconds) if own > share * middle]


def _matmul(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001
    times, means = [each.matmul_seconds for each in facts], [each.mean_matmul_seconds for each in facts]
    middle, slow = median_low(times), sorted(slow_ranks(times), key=lambda rank: -times[rank])
    found = [
        f"{facts[rank].label} takes {times[rank] / middle - 1:.0%} longer than the median for a "
        "matrix product"
        for rank in slow
    ]
    found += [
        f"{facts[rank].label} takes {means[rank] / median_low(means) - 1:.0%} longer than the median "
        "for matrix products in a row, "
        "though not for a single one"
        for rank in sorted(
            set(slow_ranks(means, SHARED_CORE_SHARE)) - set(slow), key=lambda rank: -means[rank]
        )
    ]
    state: State = "fail" if any(times[rank] > FAILING_SHARE * middle for rank in slow) else "warn"
    fix = (
        "each step waits for it: leave its machine out, or look for heat, a power cap, a limit of the "
        "CPU, or another process there"
    )
    return _check(
        "matrix product",
        found,
        f"{middle * 1e3:.2f} ms, no rank more than {SLOW_SHARE - 1:.0%} slower",
        fix,
        state,
    )


def _collectives(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:
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
    return _check("collectives", slow, good, fix, "warn")


def _network(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:  # noqa: ARG001
    known = [(each.host, each.network) for each in _machines(facts) if each.network is not None]
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
    return _check(
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


def _links(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:  # noqa: ARG001
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
            rates[way] = (
                rates.get(way, 0.0) + link.bytes / link.seconds
            )  # all ranks of a machine exchange at once
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
    return _check("links", found, good, fix, state)


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
    firsts = {each.machine: each for each in _machines(facts)}
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
