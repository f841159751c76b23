"""Checks of `doctor`, which judge the facts that its ranks measure about their machines.

Pure: `worker/doctor.py` measures, `jobs/doctor.py` starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fsdp_tune.cluster.health_facts import (
    MISSING,
    NOT_COMPARED,
    HealthCheck,
    HealthNeeds,
    RankHealth,
    RankLimits,
    first_ranks,
    judged,
)
from fsdp_tune.cluster.speed_checks import judge_collectives, judge_links, judge_matmul, judge_network
from fsdp_tune.core.units import GIB, format_bytes, format_seconds

SLOW_CHECKPOINT_SECONDS = 600.0
CLOCK_SECONDS = 1.0
IDLE_BYTES = GIB
"""Memory in use on an idle GPU: the driver's own, and a display."""
LOCKED_BYTES = 64 << 20
"""A limit of locked memory below this fails InfiniBand's registration of buffers (`ibv_reg_mr`)."""


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
        *(_output, _rename, _locks, _space, _write_rate, _inputs),
        *(judge_matmul, judge_collectives, judge_network, judge_links),
    )
    return [check for judge in judges if (check := judge(facts, needs)) is not None]


def judge_limits(facts: Sequence[RankLimits], needs: HealthNeeds) -> list[HealthCheck]:
    """Judge what is known of a machine before any rank has started."""
    return [check for judge in _LIMITS if (check := judge(facts, needs)) is not None]


def _versions(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001  all judges have one signature
    found = differences_of_ranks([each.versions for each in facts], [each.label for each in facts])
    known = facts[0].versions
    good = f"torch {known.get('torch')}, transformers {known.get('transformers')} on every rank"
    return judged("versions", found, good, "install the same packages on every machine")


def _settings(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck | None:  # noqa: ARG001
    if len(first_ranks(facts)) == 1:
        return None
    found = [each.differs for each in facts if each.differs is not None]
    fix = (
        "pass the same recipe and `--set` and set the same variables on all machines, else `train` does "
        "not start"
    )
    return judged(
        "settings", found, "the same recipe, devices and variables of NCCL and gloo on all machines", fix
    )


def _clocks(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001
    found = [
        f"the clock of {each.host} is {each.clock_seconds:+.1f} s from that of {facts[0].host}"
        for each in first_ranks(facts)
        if abs(each.clock_seconds) > CLOCK_SECONDS
    ]
    fix = "synchronise the clocks (chrony or NTP): heartbeats and locks of other machines are judged by time"
    return judged("clocks", found, f"within {CLOCK_SECONDS:.0f} s of rank 0", fix, "warn")


def _open_files(facts: Sequence[RankLimits], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001
    found = [
        f"{each.host} allows {each.open_files_limit} open files, a rank needs {each.open_files_needed}"
        for each in first_ranks(facts)
        if each.open_files_limit is not None and each.open_files_limit < each.open_files_needed
    ]
    return judged(
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
        for each in first_ranks(facts)
        if (each.shared_memory_bytes or 0) < needed
    ]
    fix = (
        f"`docker run --shm-size={max(1, needed // GIB)}g`, an emptyDir of medium Memory in Kubernetes, "
        "or remove stale files there"
    )
    return judged("/dev/shm", found, f"{format_bytes(needed)} free", fix, "warn")


def _locked_memory(facts: Sequence[RankLimits], needs: HealthNeeds) -> HealthCheck | None:
    if not needs.uses_infiniband:
        return None
    limits = [(each.host, each.locked_memory_limit_bytes) for each in first_ranks(facts)]
    found = [
        f"{host} allows {format_bytes(limit)} of locked memory"
        for host, limit in limits
        if limit is not None and limit < LOCKED_BYTES
    ]
    return judged(
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
        return judged(
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
    return judged(
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
        return judged(
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
    return judged("output directory", hidden, "writable and shared by all ranks", fix)


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
    return judged("rename", found, "seen by all ranks", fix)


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
    return judged("locks", found, "exclude other commands", fix, "warn")


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
    return judged("write rate", [finding] if seconds > SLOW_CHECKPOINT_SECONDS else [], finding, fix, "warn")


def _inputs(facts: Sequence[RankHealth], needs: HealthNeeds) -> HealthCheck:  # noqa: ARG001
    machines = first_ranks(facts)
    missing = [
        f"{each.host}: {text.removeprefix(MISSING)}"
        for each in machines
        for text in each.inputs.values()
        if text.startswith(MISSING)
    ]
    if missing:
        return judged(
            "inputs", missing, "", "`fsdp-tune validate` on that machine checks the paths of model and data"
        )
    found = [words for each in machines[1:] for words in _differing_inputs(each, machines[0])]
    if found:
        return judged("inputs", found, "", "copy the same files to every machine")
    unseen = sorted({key for each in machines for key, text in each.inputs.items() if text == NOT_COMPARED})
    named = "what is on this disk of model, tokenizer and data is found, and equal on all machines"
    unseen_too = [f"{named}; not compared, as it would be downloaded: {', '.join(unseen)}"] if unseen else []
    return judged(
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
