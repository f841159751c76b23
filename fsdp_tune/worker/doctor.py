"""A rank of `fsdp-tune doctor`: measures its machine, its device and the links between ranks, and trains nothing.

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter

from fsdp_tune.cluster.doctor_checks import MISSING, NOT_COMPARED, SHARED_CORE_SHARE, RankHealth, slow_ranks
from fsdp_tune.core.atomic import DISK, write_file, write_json
from fsdp_tune.core.devices import GpuState, gpu_states, host, versions
from fsdp_tune.core.errors import FailedError, FsdpTuneError, Problem
from fsdp_tune.core.files import expanded
from fsdp_tune.core.library_errors import PEER_LOST
from fsdp_tune.core.ownership import LOCKLESS
from fsdp_tune.core.parent_death import die_with_launcher
from fsdp_tune.core.processes import open_standard_streams
from fsdp_tune.core.units import MIB
from fsdp_tune.data.read.file_access import is_builtin
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import describe_base, digest_of_samples
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.health_files import (
    CollectiveTime,
    HealthFiles,
    HealthRequest,
    LinkTime,
    Lock,
    MessageSize,
    NetworkFacts,
    NetworkInterface,
    OutputFacts,
)
from fsdp_tune.worker import rank as ranks

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

PROBE_PREFIX = ".fsdp-tune-doctor-"
WRITTEN_BYTES, CHUNK_BYTES, WRITE_SECONDS = 64 * MIB, 4 * MIB, 2.0
SEEN_SECONDS = 3.0
"""A network file system may show a new file of another machine this late."""
MATMUL_SIZES = {"cpu": 512}
MATMUL_SIZE = 8192
MATMUL_SECONDS, MATMUL_PASSES, WINDOW_SECONDS = 0.7, 6, 0.3
"""A rank counts as slow only if it is slow in each pass: another process may have used its core or device in one. Products in a row are
averaged over a window, which is longer than the period of a limit of the CPU (cgroup: 0.1 s)."""
MESSAGE_SECONDS = 1.0
CPU_MESSAGE_BYTES = 64 * MIB
"""Larger messages are measured at this size over gloo."""
PAIR_BYTES, PAIR_SECONDS, LEAST_EXCHANGES, MOST_ROUNDS = 16 * MIB, 0.3, 5, 16
"""Exchanged by two ranks in each direction; time for a pair, and exchanges also if they take longer, as another process may have used the
core; pairs of each machine, of more machines evenly chosen."""
SLOW_LINK_SECONDS, SLOW_LINK_PART = 2.0, 16
"""A link on which `PAIR_BYTES` take longer is measured with this part of them, and messages over gloo get no more time than that."""
CONTAINER_INTERFACES = ("lo", "docker", "br-", "veth", "virbr", "cni", "cali", "cilium", "flannel", "kube", "podman", "lxc", "tun", "tap")
TOKENIZER_FILES = ("tokenizer*.json", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "chat_template*", "config.json")


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
    """Raises: FailedError if the machines together have started another number of ranks than this one's recipe has."""
    started = int(os.environ["WORLD_SIZE"])
    if started != recipe.world_size:
        message = f"the machines started {started} ranks together, and the recipe of this one is for {recipe.world_size}"
        hint = "pass the same recipe and `--set launch.num_processes=N` on all machines"
        raise FailedError(Problem("world-size-mismatch", message, hint=hint))


def _problem(error: Exception) -> Problem:
    if isinstance(error, FsdpTuneError):
        return error.problems[0]
    if (lost := next((words for words in PEER_LOST if words in str(error)), None)) is not None:
        return Problem("lost-rank", f"another rank is gone ({lost})")
    line = str(error).splitlines()[0] if str(error) else "no message"
    return Problem("doctor-failed", f"{type(error).__name__}: {line}")


def _measure(recipe: Recipe, rank: ranks.Rank, request: HealthRequest, files: HealthFiles) -> None:
    def phase(name: str) -> None:
        write_file(files.phase(rank.index), name)

    phase("importing")
    ranks.set_library_environment(recipe)
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    phase("joining the process group")
    device_type = ranks.start_process_group(recipe, rank)
    machine, is_first_here = int(os.environ.get("GROUP_RANK", "0")), rank.local_index == 0
    on_several = recipe.launch.num_machines > 1
    differs = _difference(recipe, machine, is_first_here=is_first_here) if on_several else None
    # A machine whose model is missing has no sizes of its own, and messages of different sizes would never end.
    messages, checkpoint_bytes = gather((request.messages, request.checkpoint_bytes))[0]
    phase("comparing clocks")
    clock_seconds = _clock_difference(rank)
    phase("reading the inputs")
    inputs = input_digests(recipe) if is_first_here else {}
    phase("writing in the output directory")
    output = probe_output(Path(recipe.output_dir), checkpoint_bytes, rank, files, is_first_here=is_first_here)
    phase("multiplying matrices")
    matmul_seconds, mean_seconds, gpu = _matmul_seconds(device_type, rank)
    phase("sending messages between pairs of machines")
    links = time_links(device_type, rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    phase("sending messages")
    slowest = min(gather(min((each.bytes / each.seconds for each in links), default=float("inf"))))
    timed = [_collective(each, device_type, rank, slowest) for each in messages]
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
        gpu_before=request.gpus_before[rank.local_index] if rank.local_index < len(request.gpus_before) else None,
        gpu=gpu,
    )
    phase("gathering the results")
    every = gather(own)
    if is_first_here:
        write_file(files.facts, TypeAdapter(list[RankHealth]).dump_json(every))
    dist.barrier()
    dist.destroy_process_group()


def _difference(recipe: Recipe, machine: int, *, is_first_here: bool) -> str | None:
    """Return how this machine differs from the first, versions apart; None if it does not, or if it is not its first rank. Collective."""
    from fsdp_tune.launch.machines.identity import difference, identity_of
    from fsdp_tune.worker.agreement import gather

    mine = replace(identity_of(recipe, os.environ), versions={}) if is_first_here else None  # versions are a check of their own
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
            each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith("fe80") for each in addresses.get(name, ())
        )
    ]
    return NetworkFacts(used, [NetworkInterface(name, states[name].speed, states[name].mtu) for name in names])


def _clock_difference(rank: ranks.Rank) -> float:
    """Return the seconds that this clock is ahead of rank 0's: the smallest of five, as ranks leave a barrier at different times."""
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    found: list[float] = []
    for _ in range(5):
        dist.barrier()
        now = time.time()
        found.append(now - gather(now)[0])
    return min(found, key=abs) if rank.index else 0.0


def input_digests(recipe: Recipe) -> dict[str, str]:
    """Return a digest of each input on this machine, by samples of its files, or the reason why it cannot be read.

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
        digest = _or_missing(lambda: digest_of_samples({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}))
        found["tokenizer"] = str(digest)
    for key, entry in recipe.data.sources:
        path = expanded(entry.path)
        if is_builtin(entry.path):
            continue
        if entry.loader is not None or not (path.exists() or can_only_be_a_path(entry.path)):
            found[key] = NOT_COMPARED
            continue
        found[key] = str(_or_missing(lambda entry=entry, key=key: digest_of_samples(find_source(entry, key).stored_in)))
    return found


def _or_missing(read: Callable[[], T]) -> T | str:
    try:
        return read()
    except FsdpTuneError as error:
        return MISSING + error.problems[0].message
    except OSError as error:
        return f"{MISSING}{error}"


def probe_output(output: Path, checkpoint_bytes: int | None, rank: ranks.Rank, files: HealthFiles, *, is_first_here: bool) -> OutputFacts:
    """Write, list, lock and rename in a directory next to the files of the run, which is removed at the end. Collective."""
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
    """Write a file of at most `size_bytes` for about two seconds. Return its size and the seconds, with fsync. Raises: OSError."""
    chunk = memoryview(os.urandom(min(CHUNK_BYTES, size_bytes)))  # compressing file systems would store zeros as nothing
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
    """Lock a file on rank 0 and try to lock it on the first rank of each other machine. Return the word of `OutputFacts`. Collective."""
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


def _matmul_seconds(device_type: str, rank: ranks.Rank) -> tuple[float, float, GpuState | None]:
    """Time matrix products on this rank, all ranks at work. Collective.

    Returns the shortest time of one, the mean of those in the best window, and the state of the rank's GPU meanwhile.
    """
    import torch
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    size = MATMUL_SIZES.get(device_type, MATMUL_SIZE)
    dtype = torch.float32 if device_type == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device_type, dtype=dtype) for _ in range(2))
    result, gpu = torch.empty_like(left), None
    best = mean = float("inf")
    for _ in range(MATMUL_PASSES):
        dist.barrier()
        times = [time.perf_counter()]
        while times[-1] < times[0] + MATMUL_SECONDS:
            best = min(best, _timed(lambda: torch.mm(left, right, out=result), device_type))
            times.append(time.perf_counter())
        mean = min(mean, least_mean(times))
        if device_type == "cuda":
            torch.mm(left, right, out=result)  # is running while the driver is queried
            states = gpu_states(os.environ)
            gpu = states[rank.local_index] if rank.local_index < len(states) else None
        every = gather((best, mean))
        if not slow_ranks([each[0] for each in every]) and not slow_ranks([each[1] for each in every], SHARED_CORE_SHARE):
            break
    return best, mean, gpu


def least_mean(times: Sequence[float]) -> float:
    """Return the smallest mean time between consecutive `times` (seconds) over `WINDOW_SECONDS` or more; infinity if they are shorter."""
    least, first = float("inf"), 0
    for last, ends in enumerate(times):
        while first + 1 < last and ends - times[first + 1] >= WINDOW_SECONDS:
            first += 1
        if ends - times[first] >= WINDOW_SECONDS:
            least = min(least, (ends - times[first]) / (last - first))
    return least


def _timed(act: Callable[[], object], device_type: str) -> float:
    import torch

    began = time.perf_counter()
    act()
    if device_type != "cpu":
        getattr(torch, device_type).synchronize()
    return time.perf_counter() - began


def _collective(message: MessageSize, device_type: str, rank: ranks.Rank, slowest: float) -> CollectiveTime:
    """Time a collective over all ranks at the size of the recipe's. `slowest`: bytes a second of the slowest link. Collective."""
    import torch
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(message.dtype, torch.float32)
    wanted = min(message.bytes, CPU_MESSAGE_BYTES, max(MIB, slowest * SLOW_LINK_SECONDS)) if device_type == "cpu" else message.bytes
    world = rank.world_size
    part = max(1, int(wanted) // (dtype.itemsize * world))
    full, shard = (torch.zeros(count, dtype=dtype, device=device_type) for count in (part * world, part))
    act = {
        "all_gather": lambda: dist.all_gather_into_tensor(full, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, full),
        "all_reduce": lambda: dist.all_reduce(full),
    }[message.kind]
    act()  # connects the ranks
    dist.barrier()
    first = median_low(gather(_timed(act, device_type)))
    times = [_timed(act, device_type) for _ in range(min(20, max(2, int(MESSAGE_SECONDS / max(first, 1e-4)))))]
    return CollectiveTime(message.kind, part * world * dtype.itemsize, min(times))


def pairs_of_round(machines: int, number: int) -> dict[int, int]:
    """Return the partner of each machine in a round of a tournament: in `machines - 1` rounds (one more if odd) all pairs meet once."""
    places = machines + machines % 2  # who meets the place beyond the last machine has a free round
    circle = [0, *((number + offset) % (places - 1) + 1 for offset in range(places - 1))]
    met = dict(zip(circle, reversed(circle), strict=True))
    return {machine: other for machine, other in met.items() if max(machine, other) < machines}


def _exchange(sent: torch.Tensor, received: torch.Tensor, peer: int | None, device_type: str) -> float:
    """Exchange messages with a rank. Return the seconds until its message has arrived; on GPUs, until both have."""
    import torch.distributed as dist

    if peer is None:
        return 0.0
    began = time.perf_counter()
    first, *others = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, sent, peer)])
    _timed(first.wait, device_type)
    seconds = time.perf_counter() - began
    for work in others:
        work.wait()
    return seconds


def time_links(device_type: str, rank: ranks.Rank, ranks_per_machine: int) -> list[LinkTime]:
    """Exchange messages with the rank of the same local number on other machines, all machines in pairs at once. Collective."""
    import torch
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    def buffers(size_bytes: int) -> list[torch.Tensor]:
        return [torch.zeros(size_bytes, dtype=torch.uint8, device=device_type) for _ in range(2)]

    machines, machine = rank.world_size // ranks_per_machine, rank.index // ranks_per_machine
    rounds = machines - 1 + machines % 2
    found: list[LinkTime] = []
    for number in range(0, rounds, max(1, -(-rounds // MOST_ROUNDS))) if machines > 1 else ():
        other = pairs_of_round(machines, number).get(machine)
        peer = None if other is None else rank.index + (other - machine) * ranks_per_machine
        sent, received = buffers(PAIR_BYTES // SLOW_LINK_PART)
        gather(_exchange(sent, received, peer, device_type))  # connects them
        seconds = max(gather(_exchange(sent, received, peer, device_type)))
        if seconds * SLOW_LINK_PART <= SLOW_LINK_SECONDS:
            sent, received = buffers(PAIR_BYTES)
            seconds = max(gather(_exchange(sent, received, peer, device_type)))
        best = float("inf")
        for _ in range(min(20, max(LEAST_EXCHANGES, int(PAIR_SECONDS / max(1e-3, seconds))))):
            dist.barrier()  # else the time would contain the rest of what the peer sent before
            best = min(best, _exchange(sent, received, peer, device_type))
        if other is not None:
            found.append(LinkTime(other, len(sent), best))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
