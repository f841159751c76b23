"""Times and bytes of collectives: rings and trees as NCCL builds them. Pure.

Latencies are those of NCCL's own tuning model (src/graph/tuning.cc of 2.20: `baseLat`, `hwLat`); bandwidth is
the slowest link of the ring times what nccl-tests reach on it. A ring of several machines crosses each border
over all network cards of the machine at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.topology import Group
from fsdp_tune.core.units import MIB
from fsdp_tune.planner.trace_format import COLLECTIVES, PHASES, Records, Trace

NVLINK_SHARE = 0.8
"""Share of one direction: nccl-tests' bus bandwidth is 235–240 of 300 GB/s on 8 × A100 SXM, 360–370 of 450 on
8 × H100 SXM."""
PCIE_SHARE = 0.4
"""Share of one direction; without peer access each byte passes through host memory."""
NETWORK_SHARE = 0.8
"""Share for InfiniBand with GPUDirect."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of NCCL's protocols: start and hop latencies in µs, and the share of the bandwidth that it can
    use."""

    bandwidth: float
    ring_start: float
    ring_nvlink: float
    ring_pcie: float
    ring_network: float
    tree_start: float
    tree_nvlink: float
    tree_pcie: float
    tree_network: float


PROTOCOLS = (
    Protocol(0.25, 6.6, 0.6, 1.0, 2.7, 6.8, 0.6, 1.0, 5.0),  # LL
    Protocol(0.92, 14.0, 1.9, 2.5, 4.0, 14.0, 1.25, 1.9, 8.5),  # LL128
    Protocol(1.00, 8.4, 3.4, 5.7, 14.0, 8.4, 4.0, 4.0, 14.0),  # Simple
)


def bus_bytes_per_second(group: Group, hardware: Hardware) -> float | None:
    """Return the bandwidth of one ring through the group; None if the speed of a link is unknown.

    Other groups of the same kind run at the same time and share a machine's network cards, so each rank has
    the bandwidth of one card.
    """
    speeds: list[float | None] = []
    if group.local_ranks > 1:
        link = hardware.machine_link_bytes_per_second
        speeds.append(None if link is None else link * (NVLINK_SHARE if hardware.nvlink_gb_s else PCIE_SHARE))
    if group.machines > 1:
        network = hardware.network_gb_s
        speeds.append(None if network is None else network * 1e9 * NETWORK_SHARE * group.local_ranks)
    known = [speed for speed in speeds if speed is not None]
    return min(known) if len(known) == len(speeds) and known else None


def collective_seconds(kind: str, size_bytes: float, group: Group, hardware: Hardware) -> float | None:
    """Return the time of a collective; None if the speed of a link is unknown.

    `size_bytes` is the full buffer: output of an all-gather, input of a reduce-scatter, tensor of an
    all-reduce or broadcast, input of an all-to-all. The time is that of the fastest protocol, and for sums of
    the faster of ring and tree, as NCCL chooses by the same figures.
    """
    n = group.ranks
    if n == 1:
        return 0.0
    bus = bus_bytes_per_second(group, hardware)
    if bus is None:
        return None
    if kind == "all_to_all" and group.machines > 1:
        # Not a ring: each rank sends to those of other machines over its own network card.
        size_bytes *= (n - group.local_ranks) / (n - 1)
        bus = bus_bytes_per_second(Group(group.machines, group.machines), hardware) or bus
    passes = 2 if kind == "all_reduce" else 1
    share = (n - 1) / n if kind != "broadcast" else 1.0
    # Number of steps between machines: NCCL's `nInterSteps`.
    borders = 0 if group.machines == 1 else 2 * group.machines if kind == "all_reduce" else group.machines - 1
    hops = max(0, passes * (n - 1) - borders)
    is_nvlink = bool(hardware.nvlink_gb_s)
    best = math.inf
    for protocol in PROTOCOLS:
        local = protocol.ring_nvlink if is_nvlink else protocol.ring_pcie
        latency = protocol.ring_start + hops * local + borders * protocol.ring_network
        best = min(best, latency * 1e-6 + passes * share * size_bytes / (bus * protocol.bandwidth))
        if kind == "all_reduce":
            local = protocol.tree_nvlink if is_nvlink else protocol.tree_pcie
            latency = protocol.tree_start + 2 * (
                (group.local_ranks - 1) * local + math.log2(group.machines) * protocol.tree_network
            )
            best = min(best, latency * 1e-6 + 2 * size_bytes / (bus * protocol.bandwidth))
    return best


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes that one device sends in one step."""

    machine_link_bytes: int
    """NVLink or PCIe, to devices of the same machine."""
    network_bytes: int
    """To other machines: this device's share of the bytes that its machine sends."""


def sent_bytes(kind: str, size_bytes: int, group: Group) -> Volume:
    """Return the bytes that a rank sends. In a ring, one rank of each machine has its next neighbour on
    another machine."""
    if group.ranks == 1:
        return Volume(0, 0)
    if kind == "all_to_all":
        local, network = (
            round(size_bytes * ranks / group.ranks)
            for ranks in (group.local_ranks - 1, group.ranks - group.local_ranks)
        )
        return Volume(local, network)
    passes = 2 if kind == "all_reduce" else 1
    total = passes * size_bytes * (group.ranks - 1) / group.ranks
    across = 1 / group.local_ranks if group.machines > 1 else 0.0
    return Volume(round(total * (1 - across)), round(total * across))


FIRST_BUCKET_BYTES = 1 * MIB
"""`dist._DEFAULT_FIRST_BUCKET_BYTES`: small, so that the first sum starts early."""
BUCKET_BYTES = 25 * MIB
"""`bucket_cap_mb` of DistributedDataParallel."""


def in_buckets(trace: Trace, collectives: Records) -> Records:
    """Return the collectives of one step with DDP's gradients joined into buckets; each bucket is at the
    position of its last gradient."""
    if trace.shapes.shards > 1:
        return collectives
    is_sum = (collectives["kind"] == COLLECTIVES.index("all_reduce")) & (
        collectives["phase"] == PHASES.index("backward")
    )
    kept, sizes = np.ones(len(collectives), bool), collectives["bytes"].copy()
    gathered, limit = 0, FIRST_BUCKET_BYTES
    sums = np.flatnonzero(is_sum).tolist()
    for row in sums:
        gathered += int(sizes[row])
        if gathered >= limit or row == sums[-1]:
            sizes[row], gathered, limit = gathered, 0, BUCKET_BYTES
        else:
            kept[row] = False
    joined: Records = collectives.copy()
    joined["bytes"] = sizes
    return joined[kept]
