"""Files of `doctor`: what the command asks of its ranks, and what they measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.devices import GpuState


@dataclass(frozen=True, slots=True)
class MessageSize:
    """A collective of the recipe that is to be measured. `bytes` is the full buffer."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class HealthRequest:
    """What the command passes to the ranks of its machine, next to the recipe."""

    messages: list[MessageSize]
    checkpoint_bytes: int | None
    gpus_before: list[GpuState]


@dataclass(frozen=True, slots=True)
class HealthFiles:
    """The private directory of one command, which its ranks read and write. It has the names of a run
    directory for the launcher."""

    path: Path

    @property
    def request(self) -> Path:
        return self.path / "request.json"

    @property
    def facts(self) -> Path:
        """Of all ranks of all machines; written by the first rank of this one."""
        return self.path / "facts.json"

    @property
    def probe(self) -> Path:
        """The path of what the ranks leave in the output directory while they measure."""
        return self.path / "probe"

    def phase(self, rank: int) -> Path:
        """What a rank does now."""
        return self.path / f"phase-{rank}"

    def problem(self, rank: int) -> Path:
        """Why a rank has failed."""
        return self.path / f"problem-{rank}.json"

    def problems(self) -> dict[int, Path]:
        """Return those that exist, by rank. If machines start other numbers of ranks, they are not those that
        the command expects."""
        return {
            int(path.stem.removeprefix("problem-")): path for path in sorted(self.path.glob("problem-*.json"))
        }


@dataclass(frozen=True, slots=True)
class CollectiveTime(JsonAnswer):
    kind: str
    bytes: int
    """Of the full buffer."""
    seconds: float
    """Shortest of several."""


@dataclass(frozen=True, slots=True)
class LinkTime(JsonAnswer):
    """An exchange with the rank of the same local number on another machine, while all machines exchange in
    pairs."""

    machine: int
    """The other one."""
    bytes: int
    """In each direction."""
    seconds: float
    """Until this rank has received them; shortest of several."""


@dataclass(frozen=True, slots=True)
class NetworkInterface(JsonAnswer):
    name: str
    mbits: int
    """Nominal rate in Mbit/s; 0: unknown."""
    mtu: int
    """Largest packet in bytes."""


@dataclass(frozen=True, slots=True)
class NetworkFacts(JsonAnswer):
    """Of one machine."""

    used: str | None
    """The interface of gloo; null if it chooses one itself."""
    interfaces: list[NetworkInterface]
    """Those that are up and have an address, without loopback and those of containers."""

    @property
    def mbits(self) -> int:
        """Nominal rate of the interface in use; 0: unknown."""
        return next((each.mbits for each in self.interfaces if each.name == self.used), 0)


Lock = Literal["works", "not shared", "missing", "untested"]
"""What locks on a file in the output directory do."""


@dataclass(frozen=True, slots=True)
class OutputFacts(JsonAnswer):
    directory: str
    """The output directory, or the nearest directory above it that exists."""
    error: str | None
    """Why this rank cannot write there."""
    visible_ranks: int
    """Ranks whose files this rank sees."""
    sees_rename: bool
    lock: Lock
    """`not shared`: another machine's lock does not exclude this one."""
    free_bytes: int | None
    written_bytes: int
    write_seconds: float
