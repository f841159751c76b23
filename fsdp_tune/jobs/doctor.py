"""Check the machines of a recipe before its run: its ranks start as in `train`, measure for some seconds, and
the facts are judged."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from fsdp_tune.cluster.doctor_checks import judge_health, judge_limits, judge_space
from fsdp_tune.cluster.health_facts import HealthCheck, HealthNeeds, RankHealth, RankLimits, State
from fsdp_tune.cluster.submit.container_job import shared_memory
from fsdp_tune.cluster.submit.slurm import check_allocation
from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.devices import gpu_states, visible_devices
from fsdp_tune.core.errors import FailedError, Notice, Problem
from fsdp_tune.core.gpus import detect
from fsdp_tune.core.host import host, interconnect
from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.core.topology import Group
from fsdp_tune.jobs.inspection import inspect_model
from fsdp_tune.jobs.machine_plan import trace_of
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import DoctorOptions
from fsdp_tune.jobs.recipes import check_cache, resolve_recipe
from fsdp_tune.launch.command.accelerate import LaunchPlan, launch_plan, machine_rank_of
from fsdp_tune.launch.command.ports import check_port
from fsdp_tune.model.model_files import INSTALLED
from fsdp_tune.planner.predict.collectives import collective_seconds
from fsdp_tune.planner.predict.memory import disk, least_checkpoint_bytes, most_checkpoints
from fsdp_tune.planner.trace_format import COLLECTIVES, DTYPES, Trace
from fsdp_tune.recipe.fsdp_arguments import accelerate_config
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import RunDir, complete_checkpoints
from fsdp_tune.run.health_files import HealthFiles, HealthRequest, MessageSize

WORKER = "fsdp_tune.worker.doctor"
LIMIT_SECONDS = 300.0
"""From the start of the ranks. Imports on a slow shared disk and the waits for other machines take most of
it."""
POLL_SECONDS = 0.1
MEASURED = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class DoctorAnswer(JsonAnswer):
    """The answer of `doctor`."""

    state: State
    """The worst of all checks."""
    world_size: int
    machines: int
    checks: list[HealthCheck]
    ranks: list[RankHealth]
    """What each rank measured; empty if the ranks have not come that far."""


def doctor(
    recipe: LoadedRecipe, options: DoctorOptions = DoctorOptions(), *, observer: Observer = Observer()
) -> DoctorAnswer:
    """Start the ranks of a recipe on this machine, measure for some seconds and judge. With several machines,
    call it on each of them.

    Only the caches of the inspection and of the trace stay on disk. Raises: FsdpTuneError for a recipe that
    `train` would refuse before its inputs are read.
    """
    with session(recipe):
        observer.phase("finding the devices of this machine")
        resolution = resolve_recipe(recipe, options.allowed, observer, starts_ranks=True, starts_here=True)
        observer.notices(resolution.notices)
        resolved = resolution.recipe
        if options.machine_rank is None:
            observer.notices(check_allocation(resolved, os.environ))
        machine = machine_rank_of(resolved, options.machine_rank, os.environ)
        check_cache(resolved)
        check_port(resolved, machine)
        observer.phase("tracing a step for the sizes of messages and checkpoints")
        with children.threads(1) as pool:
            packages = pool.submit(_packages, resolved)
            trace = trace_of(resolved)
        with temporary_directory("doctor-") as folder:
            files = HealthFiles(folder)
            plan = launch_plan(resolved, RunDir(folder), worker_module=WORKER, machine_rank=machine)
            request = _request(resolved, trace)
            observer.phase(f"measuring on {len(plan.ranks)} ranks")
            failed = _run_ranks(plan, resolved, request, files)
            facts: list[RankHealth] = []
            if failed is None:
                facts = TypeAdapter(list[RankHealth]).validate_json(files.facts.read_bytes())
        judged = [failed] if failed is not None else [
            HealthCheck("ranks", "ok", f"{len(facts)} ranks started and found each other"),
            *judge_health(facts, _needs(resolved, trace, request)),
        ]  # fmt: skip
        checks = [_host_name(resolved, plan), *_traced(trace, judged), *packages.result(), *judged]
        states = {check.state for check in checks}
        worst: State = "fail" if "fail" in states else "warn" if "warn" in states else "ok"
        return DoctorAnswer(worst, resolved.world_size, resolved.launch.num_machines, checks, facts)


def refuse_failed(answer: DoctorAnswer) -> None:
    """Raise FailedError (exit 1) with each check that failed."""
    failed = [
        Problem("doctor-failed", f"{check.name}: {check.finding}", hint=check.fix)
        for check in answer.checks
        if check.state == "fail"
    ]
    if failed:
        raise FailedError(*failed)


def notices_of_machine(recipe: Recipe, plan: LaunchPlan) -> list[Notice]:
    """Return the findings of the checks that need no rank, for the ranks of this machine. Takes milliseconds;
    call it before they start."""
    facts, on_gpus = host(), recipe.launch.device == "cuda"
    states = gpu_states(plan.env) if on_gpus else []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = [
        RankLimits(
            rank=rank,
            machine=plan.machine_rank,
            host=str(facts["name"]),
            open_files_limit=None if limit == resource.RLIM_INFINITY else limit,
            open_files_needed=recipe.open_files_needed,
            locked_memory_limit_bytes=facts["locked_memory_limit_bytes"],
            shared_memory_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
            gpu_before=states[place] if place < len(states) else None,
        )
        for place, rank in enumerate(plan.ranks)
    ]
    checks = [_host_name(recipe, plan), *judge_limits(limits, _needs_of_machine(recipe))]
    return [
        Notice("machine-unfit", f"{check.name}: {check.finding}", hint=check.fix)
        for check in checks
        if check.state != "ok"
    ]


def check_space(
    recipe: Recipe,
    *,
    parameters: int,
    trained_parameters: int,
    is_new: bool,
    steps: int | None,
    refuses: bool = True,
) -> list[Notice]:
    """Compare the free space of the output directory with what the checkpoints need. Raises: FailedError if
    not one has room; without `refuses`, that is a notice too.

    `is_new`: whether the run begins at step 0, so that earlier checkpoints there stay beside its own.
    `steps`: those of the whole run.
    """
    run = RunDir(Path(recipe.output_dir))
    folder = next(each for each in (run.path, *run.path.parents) if each.is_dir())
    needed_bytes = least_checkpoint_bytes(recipe, parameters, trained_parameters)
    if recipe.has_own_directories:
        needed_bytes //= recipe.launch.num_machines
    most, period = most_checkpoints(recipe), recipe.training.save_steps
    if steps is not None and training_value(recipe.training, "save_strategy") == "steps":
        saves = -(-steps // max(1, math.ceil(period * steps) if period < 1 else int(period)))
        most = saves if most is None else min(most, saves)
    kept = 0 if is_new else len(complete_checkpoints(run)[0])
    check = judge_space(
        str(folder),
        shutil.disk_usage(folder).free,
        needed_bytes,
        None if most is None else max(1, most - kept),
    )
    message = f"{check.name}: {check.finding}"
    if check.state == "fail" and refuses:
        raise FailedError(
            Problem("machine-unfit", message, hint=f"{check.fix}; `--ignore-plan` to train all the same")
        )
    return [] if check.state == "ok" else [Notice("machine-unfit", message, hint=check.fix)]


def _traced(trace: Trace | None, judged: Sequence[HealthCheck]) -> list[HealthCheck]:
    # a missing model has no trace
    if trace is not None or any(check.name == "inputs" and check.state == "fail" for check in judged):
        return []
    finding = "the step could not be traced, so neither messages nor checkpoints have a known size"
    return [HealthCheck("sizes", "warn", finding, "`fsdp-tune plan` shows the reason")]


def _packages(recipe: Recipe) -> list[HealthCheck]:
    """Return a check for the optional packages whose kernels the model would use on this machine's GPUs; none
    if it names no package."""
    if recipe.launch.device != "cuda":
        return []
    found = inspect_model(recipe)
    missing = [
        HealthCheck("packages", "warn", notice.message, notice.hint)
        for notice in found.notices
        if notice.code == "slow-kernels"
    ]
    kernels = {} if found.model is None else found.model.kernels
    installed = [name for name in sorted(kernels) if kernels[name].value == INSTALLED]
    return missing or (
        [HealthCheck("packages", "ok", f"{' and '.join(installed)} installed")] if installed else []
    )


def _host_name(recipe: Recipe, plan: LaunchPlan) -> HealthCheck:
    """gloo connects to the address of the host's own name, unless a variable names the interface."""
    name = socket.gethostname()
    # chosen by the launch if a route leads to the first machine
    interface = plan.env.get("GLOO_SOCKET_IFNAME")
    if recipe.launch.num_machines == 1 or interface is not None:
        return HealthCheck(
            "host name",
            "ok",
            f"{name}; not needed on one machine" if interface is None else f"the interface is {interface}",
        )
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = f"nothing ({error.strerror})"
    if address.startswith(("127.", "nothing")):
        fix = "set `launch.env: {GLOO_SOCKET_IFNAME: NAME}` to the interface that the machines share"
        return HealthCheck(
            "host name", "fail", f"{name} resolves to {address}, where other machines cannot connect", fix
        )
    return HealthCheck("host name", "ok", f"{name} resolves to {address}")


def _request(recipe: Recipe, trace: Trace | None) -> HealthRequest:
    size = None if trace is None else disk(recipe, trace, None).checkpoint_bytes
    return HealthRequest(
        _messages(trace), size, gpu_states(os.environ) if recipe.launch.device == "cuda" else []
    )


def _messages(trace: Trace | None) -> list[MessageSize]:
    """Return the largest collective of each kind in a step."""
    if trace is None:
        return []
    table, found = trace.steady(trace.collectives), list[MessageSize]()
    for kind in MEASURED:
        rows = table[table["kind"] == COLLECTIVES.index(kind)]
        if len(rows):
            row = rows[rows["bytes"].argmax()]
            found.append(MessageSize(kind, int(row["bytes"]), DTYPES[int(row["dtype"])]))
    return found


def _needs(recipe: Recipe, trace: Trace | None, request: HealthRequest) -> HealthNeeds:
    visible = visible_devices(os.environ) if recipe.launch.device == "cuda" else []
    hardware = detect(visible[0].name) if visible else None
    predicted: dict[str, float] = {}
    for each in request.messages:
        seconds = (
            None
            if hardware is None
            else collective_seconds(
                each.kind, each.bytes, Group(recipe.world_size, recipe.launch.num_machines), hardware
            )
        )
        predicted |= {} if seconds is None else {each.kind: seconds}
    return replace(
        _needs_of_machine(recipe),
        checkpoint_bytes=request.checkpoint_bytes,
        most_checkpoints=None if trace is None else most_checkpoints(recipe),
        collective_seconds=predicted,
        own_directories=recipe.launch.num_machines if recipe.has_own_directories else 1,
    )


def _needs_of_machine(recipe: Recipe) -> HealthNeeds:
    on_gpus = recipe.launch.device == "cuda"
    return HealthNeeds(
        shared_memory_bytes=shared_memory(recipe, recipe.local_world_size) if on_gpus else None,
        uses_infiniband=on_gpus and recipe.launch.num_machines > 1 and bool(interconnect()["infiniband"]),
    )


def _run_ranks(
    plan: LaunchPlan, recipe: Recipe, request: HealthRequest, files: HealthFiles
) -> HealthCheck | None:
    """Run the ranks of this machine to their end. Return the failed check if they did not measure
    everything."""
    run = plan.run
    write_file(run.accelerate_yaml, yaml.safe_dump(accelerate_config(recipe), sort_keys=False))
    write_file(run.recipe_json, recipe.model_dump_json(by_alias=True), private=True)
    write_file(files.request, TypeAdapter(HealthRequest).dump_json(request))
    log = files.path / "launcher.log"
    with DISK.open_private(log, "ab") as output:
        child = children.start(plan.argv, plan.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            is_late = child.poll() is None
        finally:
            children.end(child)
            if files.probe.exists():
                shutil.rmtree(files.probe.read_text(encoding="utf-8"), ignore_errors=True)
    if is_late:
        finding = f"not ready after {LIMIT_SECONDS:.0f} s: {_phases(plan.ranks, files)}"
        return HealthCheck(
            "ranks",
            "fail",
            finding,
            "start it on all machines; check their network, firewall and `launch.main_process_ip`",
        )
    if child.returncode or not files.facts.exists():
        return _failed(plan.ranks, files, child.returncode, log)
    return None


def _phases(ranks: Sequence[int], files: HealthFiles) -> str:
    known = [
        (rank, files.phase(rank).read_text(encoding="utf-8") if files.phase(rank).exists() else "starting")
        for rank in ranks
    ]
    return ", ".join(f"rank {rank} is {phase}" for rank, phase in known[:8])


def _failed(ranks: Sequence[int], files: HealthFiles, exit_code: int, log: Path) -> HealthCheck:
    problems = {rank: json.loads(path.read_text(encoding="utf-8")) for rank, path in files.problems().items()}
    # of a lost peer only if nothing else
    for rank, problem in sorted(problems.items(), key=lambda pair: pair[1]["code"] == "lost-rank"):
        return HealthCheck(
            "ranks",
            "fail",
            f"rank {rank}: {problem['message']}",
            problem["hint"] or "`fsdp-tune env` shows the machine",
        )
    words = children.describe_failure(exit_code, log.read_text(encoding="utf-8", errors="replace"))
    finding = f"the ranks ended before they had measured ({_phases(ranks, files)}): {words}"
    return HealthCheck("ranks", "fail", finding, "`fsdp-tune env` shows devices and known-bad combinations")
