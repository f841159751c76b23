"""Facts that the ranks of `doctor` measure about their machines, and the form of a check of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.devices import GpuState
from fsdp_tune.run.health_files import CollectiveTime, LinkTime, NetworkFacts, OutputFacts

State = Literal["ok", "warn", "fail"]
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


def judged(name: str, found: Sequence[str], good: str, fix: str, state: State = "fail") -> HealthCheck:
    """Return ok with `good` if nothing was found, else the first finding and the number of others."""
    if not found:
        return HealthCheck(name, "ok", good)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return HealthCheck(name, state, f"{found[0]}{more}", fix)


def first_ranks(facts: Sequence[AnyRank]) -> list[AnyRank]:
    """Return the first rank of each machine."""
    return list({each.machine: each for each in reversed(facts)}.values())[::-1]
