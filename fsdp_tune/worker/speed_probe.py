"""Times that a rank of `doctor` measures: matrix products, collectives, and messages between machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import TYPE_CHECKING

from fsdp_tune.cluster.speed_checks import SHARED_CORE_SHARE, slow_ranks
from fsdp_tune.core.devices import GpuState, gpu_states
from fsdp_tune.core.units import MIB
from fsdp_tune.run.health_files import CollectiveTime, LinkTime, MessageSize
from fsdp_tune.worker import rank as ranks

if TYPE_CHECKING:
    import torch

MATMUL_SIZES = {"cpu": 512}
MATMUL_SIZE = 8192
MATMUL_SECONDS, MATMUL_PASSES, WINDOW_SECONDS = 0.7, 6, 0.3
"""A rank counts as slow only if it is slow in each pass: another process may have used its core or device in
one. Products in a row are averaged over a window, which is longer than the period of a limit of the CPU
(cgroup: 0.1 s)."""
MESSAGE_SECONDS = 1.0
CPU_MESSAGE_BYTES = 64 * MIB
"""Larger messages are measured at this size over gloo."""
PAIR_BYTES, PAIR_SECONDS, LEAST_EXCHANGES, MOST_ROUNDS = 16 * MIB, 0.3, 5, 16
"""Exchanged by two ranks in each direction; time for a pair, and exchanges also if they take longer, as
another process may have used the core; pairs of each machine, of more machines evenly chosen."""
SLOW_LINK_SECONDS, SLOW_LINK_PART = 2.0, 16
"""A link on which `PAIR_BYTES` take longer is measured with this part of them, and messages over gloo get no
more time than that."""


def time_matmul(device_type: str, rank: ranks.Rank) -> tuple[float, float, GpuState | None]:
    """Time matrix products on this rank, all ranks at work. Collective.

    Returns the shortest time of one, the mean of those in the best window, and the state of the rank's GPU
    meanwhile.
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
        if not slow_ranks([each[0] for each in every]) and not slow_ranks(
            [each[1] for each in every], SHARED_CORE_SHARE
        ):
            break
    return best, mean, gpu


def least_mean(times: Sequence[float]) -> float:
    """Return the smallest mean time between consecutive `times` (seconds) over `WINDOW_SECONDS` or more;
    infinity if they are shorter."""
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


def time_collective(
    message: MessageSize, device_type: str, rank: ranks.Rank, slowest: float
) -> CollectiveTime:
    """Time a collective over all ranks at the size of the recipe's. `slowest`: bytes a second of the slowest
    link. Collective."""
    import torch
    import torch.distributed as dist

    from fsdp_tune.worker.agreement import gather

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(message.dtype, torch.float32)
    wanted = (
        min(message.bytes, CPU_MESSAGE_BYTES, max(MIB, slowest * SLOW_LINK_SECONDS))
        if device_type == "cpu"
        else message.bytes
    )
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
    times = [
        _timed(act, device_type) for _ in range(min(20, max(2, int(MESSAGE_SECONDS / max(first, 1e-4)))))
    ]
    return CollectiveTime(message.kind, part * world * dtype.itemsize, min(times))


def pairs_of_round(machines: int, number: int) -> dict[int, int]:
    """Return the partner of each machine in a round of a tournament: in `machines - 1` rounds (one more if
    odd) all pairs meet once."""
    places = machines + machines % 2  # who meets the place beyond the last machine has a free round
    circle = [0, *((number + offset) % (places - 1) + 1 for offset in range(places - 1))]
    met = dict(zip(circle, reversed(circle), strict=True))
    return {machine: other for machine, other in met.items() if max(machine, other) < machines}


def _exchange(sent: torch.Tensor, received: torch.Tensor, peer: int | None, device_type: str) -> float:
    """Exchange messages with a rank. Return the seconds until its message has arrived; on GPUs, until both
    have."""
    import torch.distributed as dist

    if peer is None:
        return 0.0
    began = time.perf_counter()
    first, *others = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, sent, peer)]
    )
    _timed(first.wait, device_type)
    seconds = time.perf_counter() - began
    for work in others:
        work.wait()
    return seconds


def time_links(device_type: str, rank: ranks.Rank, ranks_per_machine: int) -> list[LinkTime]:
    """Exchange messages with the rank of the same local number on other machines, all machines in pairs at
    once. Collective."""
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
