"""A rank of `fsdp-tune doctor`: measures its machine, its device and the links between ranks, and trains
nothing.

    accelerate launch … -m fsdp_tune.worker.doctor DIRECTORY

Each step is bounded: files to 64 MiB and 2 s a rank, matrix products and collectives to about a second each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from fsdp_tune.cluster.health_facts import MISSING, NOT_COMPARED, RankHealth
from fsdp_tune.core.atomic import DISK, write_file, write_json
from fsdp_tune.core.errors import FailedError, FsdpTuneError, Problem
from fsdp_tune.core.files import expanded
from fsdp_tune.core.host import host
from fsdp_tune.core.inherited_state import open_standard_streams
from fsdp_tune.core.library_errors import PEER_LOST, typed_line
from fsdp_tune.core.ownership import LOCKLESS
from fsdp_tune.core.package_versions import versions
from fsdp_tune.core.parent_death import die_with_launcher
from fsdp_tune.core.units import MIB
from fsdp_tune.data.read.file_access import is_builtin
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import describe_base, digest_of_samples
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.health_files import (
    HealthFiles,
    HealthRequest,
    Lock,
    NetworkFacts,
    NetworkInterface,
    OutputFacts,
)
from fsdp_tune.worker import rank as ranks
from fsdp_tune.worker.speed_probe import time_collective, time_links, time_matmul

T = TypeVar("T")

PROBE_PREFIX = ".fsdp-tune-doctor-"
WRITTEN_BYTES, CHUNK_BYTES, WRITE_SECONDS = 64 * MIB, 4 * MIB, 2.0
SEEN_SECONDS = 3.0
"""A network file system may show a new file of another machine this late."""
CONTAINER_INTERFACES = (
    "lo",
    "docker",
    "br-",
    "veth",
    "virbr",
    "cni",
    "cali",
    "cilium",
    "flannel",
    "kube",
    "podman",
    "lxc",
    "tun",
    "tap",
)
TOKENIZER_FILES = (
    "tokenizer*.json",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "chat_template*",
    "config.json",
)


def main(arguments: list[str]) -> int:
    die_with_launcher()
    open_standard_streams()
    files = HealthFiles(Path(arguments[0]))
    run = RunDir(files.path)
    recipe = Recipe.model_validate_json(run.recipe_json.read_bytes())
    request = TypeAdapter(HealthRequest).validate_json(files.request.read_bytes())
    try:
        _refuse_other_world(recipe)
        _measure(recipe, ranks.read_rank(recipe, run), request, files)
    except Exception as error:  # noqa: BLE001  the command reports any error of a rank
        traceback.print_exc()
        write_json(files.problem(int(os.environ.get("RANK", "0"))), _problem(error).as_dict())
        return 1
    return 0


def _refuse_other_world(recipe: Recipe) -> None:
    """Raises: FailedError if the machines together have started another number of ranks than this one's
    recipe has."""
    started = int(os.environ["WORLD_SIZE"])
    if started != recipe.world_size:
        message = (
            f"the machines started {started} ranks together, and the recipe of this one is for "
            f"{recipe.world_size}"
        )
        hint = "pass the same recipe and `--set launch.num_processes=N` on all machines"
        raise FailedError(Problem("world-size-mismatch", message, hint=hint))


def _problem(error: Exception) -> Problem:
    if isinstance(error, FsdpTuneError):
        return error.problems[0]
    if (lost := next((words for words in PEER_LOST if words in str(error)), None)) is not None:
        return Problem("lost-rank", f"another rank is gone ({lost})")
    return Problem("doctor-failed", typed_line(error))


def _measure(recipe: Recipe, rank: ranks.Rank, request: HealthRequest, files: HealthFiles) -> None:
    def phase(name: str) -> None:
        write_file(files.phase(rank.index), name)

    phase("importing")
    ranks.set_library_environment(recipe)
    from fsdp_tune.worker.agreement import gather

    phase("joining the process group")
    device_type = ranks.start_process_group(recipe, rank)
    machine, is_first_here = int(os.environ.get("GROUP_RANK", "0")), rank.local_index == 0
    on_several = recipe.launch.num_machines > 1
    differs = _difference(recipe, machine, is_first_here=is_first_here) if on_several else None
    # A machine whose model is missing has no sizes of its own, and messages of different sizes would never
    # end.
    messages, checkpoint_bytes = gather((request.messages, request.checkpoint_bytes))[0]
    phase("comparing clocks")
    clock_seconds = _clock_difference(rank)
    phase("reading the inputs")
    inputs = input_digests(recipe) if is_first_here else {}
    phase("writing in the output directory")
    output = probe_output(Path(recipe.output_dir), checkpoint_bytes, rank, files, is_first_here=is_first_here)
    phase("multiplying matrices")
    matmul_seconds, mean_seconds, gpu = time_matmul(device_type, rank)
    phase("sending messages between pairs of machines")
    links = time_links(device_type, rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    phase("sending messages")
    slowest = min(gather(min((each.bytes / each.seconds for each in links), default=float("inf"))))
    timed = [time_collective(each, device_type, rank, slowest) for each in messages]
    facts = host()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    own = RankHealth(
        rank=rank.index,
        machine=machine,
        host=str(facts["name"]),
        versions=versions(),
        open_files_limit=None if limit == resource.RLIM_INFINITY else limit,
        open_files_needed=recipe.open_files_needed,
        locked_memory_limit_bytes=facts["locked_memory_limit_bytes"],
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        clock_seconds=clock_seconds,
        output=output,
        inputs=inputs,
        matmul_seconds=matmul_seconds,
        mean_matmul_seconds=mean_seconds,
        differs=differs,
        network=_network() if on_several and is_first_here else None,
        collectives=timed,
        links=links,
        gpu_before=request.gpus_before[rank.local_index]
        if rank.local_index < len(request.gpus_before)
        else None,
        gpu=gpu,
    )
    phase("gathering the results")
    _hand_over(own, files, is_first_here=is_first_here)


def _hand_over(own: RankHealth, files: HealthFiles, *, is_first_here: bool) -> None:
    """Write the facts of all ranks on each machine, and leave the process group. Collective."""
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    every = gather(own)
    if is_first_here:
        write_file(files.facts, TypeAdapter(list[RankHealth]).dump_json(every))
    dist.barrier()
    dist.destroy_process_group()


def _difference(recipe: Recipe, machine: int, *, is_first_here: bool) -> str | None:
    """Return how this machine differs from the first, versions apart; None if it does not, or if it is not
    its first rank. Collective."""
    from fsdp_tune.launch.machines.identity import difference, identity_of
    from fsdp_tune.worker.agreement import gather

    # versions are a check of their own
    mine = replace(identity_of(recipe, os.environ), versions={}) if is_first_here else None
    first = gather(mine)[0]
    problem = None if mine is None or first is None else difference(machine, mine, first, 0.0)
    return None if problem is None else problem.message


def _network() -> NetworkFacts:
    import psutil

    used = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or None
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    names = [
        name
        for name, state in sorted(states.items())
        if state.isup
        and (name == used or not name.startswith(CONTAINER_INTERFACES))
        and name != "lo"
        and any(
            each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith("fe80")
            for each in addresses.get(name, ())
        )
    ]
    return NetworkFacts(
        used, [NetworkInterface(name, states[name].speed, states[name].mtu) for name in names]
    )


def _clock_difference(rank: ranks.Rank) -> float:
    """Return the seconds that this clock is ahead of rank 0's: the smallest of five, as ranks leave a barrier
    at different times."""
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    found: list[float] = []
    for _ in range(5):
        dist.barrier()
        now = time.time()
        found.append(now - gather(now)[0])
    return min(found, key=abs) if rank.index else 0.0


def input_digests(recipe: Recipe) -> dict[str, str]:
    """Return a digest of each input on this machine, by samples of its files, or the reason why it cannot be
    read.

    What would be downloaded is not compared, nor are URLs.
    """
    found: dict[str, str] = {}
    name = recipe.model.name_or_path
    if name is not None:
        base = _or_missing(lambda: describe_base(name, recipe.model.revision))
        found["model"] = base if isinstance(base, str) else base.digest or NOT_COMPARED
        if found["model"] == digest_of_samples([]):
            found["model"] = f"{MISSING}there are no weights in `{name}`"
    tokenizer = recipe.model.tokenizer or name
    if tokenizer is not None and (folder := expanded(tokenizer)).is_dir():
        digest = _or_missing(
            lambda: digest_of_samples({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)})
        )
        found["tokenizer"] = str(digest)
    for key, entry in recipe.data.sources:
        path = expanded(entry.path)
        if is_builtin(entry.path):
            continue
        if entry.loader is not None or not (path.exists() or can_only_be_a_path(entry.path)):
            found[key] = NOT_COMPARED
            continue
        found[key] = str(
            _or_missing(lambda entry=entry, key=key: digest_of_samples(find_source(entry, key).stored_in))
        )
    return found


def _or_missing(read: Callable[[], T]) -> T | str:
    try:
        return read()
    except FsdpTuneError as error:
        return MISSING + error.problems[0].message
    except OSError as error:
        return f"{MISSING}{error}"


def probe_output(
    output: Path, checkpoint_bytes: int | None, rank: ranks.Rank, files: HealthFiles, *, is_first_here: bool
) -> OutputFacts:
    """Write, list, lock and rename in a directory next to the files of the run, which is removed at the end.
    Collective."""
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    token = gather(secrets.token_hex(6))[0]
    parent = next(each for each in (output, *output.parents) if each.is_dir())
    probe = parent / f"{PROBE_PREFIX}{token}"
    if is_first_here:
        write_file(files.probe, str(probe))  # the command removes it if the ranks are killed
    size = min(WRITTEN_BYTES, max(1, (checkpoint_bytes or 8 * MIB * rank.world_size) // rank.world_size))
    error, written, seconds = None, 0, 0.0
    try:
        DISK.mkdir(probe)
        written, seconds = _write(probe / f"rank-{rank.index}", size)
        if rank.is_first:
            DISK.mkdir(probe / "stage")
    except OSError as failure:
        error = failure.strerror or str(failure)
    dist.barrier()
    visible = _await(lambda: len(list(probe.glob("rank-*"))), rank.world_size)
    lock = _lock(probe / "lock", rank, is_first_here=is_first_here)
    if rank.is_first:
        with contextlib.suppress(OSError):
            DISK.rename(probe / "stage", probe / "final")
    dist.barrier()
    renamed = _await(lambda: int((probe / "final").is_dir() and not (probe / "stage").exists()), 1) == 1
    free = shutil.disk_usage(parent).free
    dist.barrier()
    if rank.is_first or is_first_here:  # that of another machine is its own if they share no directory
        shutil.rmtree(probe, ignore_errors=True)
    return OutputFacts(str(parent), error, visible, renamed, lock, free, written, seconds)


def _write(path: Path, size_bytes: int) -> tuple[int, float]:
    """Write a file of at most `size_bytes` for about two seconds. Return its size and the seconds, with
    fsync. Raises: OSError."""
    # compressing file systems would store zeros as nothing
    chunk = memoryview(os.urandom(min(CHUNK_BYTES, size_bytes)))
    written, began = 0, time.monotonic()
    with DISK.open(path) as file:
        while written < size_bytes and time.monotonic() - began < WRITE_SECONDS:
            DISK.write(file, chunk[: size_bytes - written])
            written += min(len(chunk), size_bytes - written)
        DISK.fsync(file)
    return written, max(time.monotonic() - began, 1e-6)


def _await(count: Callable[[], int], wanted: int) -> int:
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        found = 0
        with contextlib.suppress(OSError):
            found = count()
        if found >= wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _lock(path: Path, rank: ranks.Rank, *, is_first_here: bool) -> Lock:
    """Lock a file on rank 0 and try to lock it on the first rank of each other machine. Return the word of
    `OutputFacts`. Collective."""
    import torch.distributed as dist

    answer: Lock = "untested"
    held: int | None = None
    with contextlib.suppress(OSError):
        if rank.is_first:
            held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            answer = _try_lock(held, free="works", taken="untested")
    dist.barrier()
    with contextlib.suppress(OSError):
        if is_first_here and not rank.is_first:
            other = os.open(path, os.O_RDWR)
            answer = _try_lock(other, free="not shared", taken="works")
            os.close(other)
    dist.barrier()
    if held is not None:
        os.close(held)
    return answer


def _try_lock(descriptor: int, *, free: Lock, taken: Lock) -> Lock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return taken
    except OSError as error:
        return "missing" if error.errno in LOCKLESS else "untested"
    return free


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
