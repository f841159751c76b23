"""The parallel dimensions of a run and the position of each rank in them. Pure arithmetic; `model.shard.wrap` builds the mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """A number of communicating ranks, spread evenly over a number of machines."""

    ranks: int
    machines: int

    @property
    def local_ranks(self) -> int:
        return max(1, self.ranks // self.machines)


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the dimensions, outermost first: replicate × shard × sequence × tensor = `world_size`.

    Ranks are numbered in this order, machine by machine: neighbours differ in the innermost dimension.
    """

    replicate: int = 1
    """Copies of the model."""
    shard: int = 1
    """Ranks that share one copy and read different rows."""
    sequence: int = 1
    """Ranks that share each row and the shards of a copy."""
    tensor: int = 1
    """Ranks that share each matrix."""
    machines: int = 1

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def local_world_size(self) -> int:
        """Ranks of one machine."""
        return max(1, self.world_size // self.machines)

    @property
    def copy_size(self) -> int:
        """Ranks that hold the shards of one copy."""
        return self.shard * self.sequence

    @property
    def data_size(self) -> int:
        """Groups of ranks that read different rows."""
        return self.replicate * self.shard

    @property
    def gradient_size(self) -> int:
        """Ranks whose gradients are averaged: those that compute the loss of different tokens."""
        return self.replicate * self.shard * self.sequence

    def data_rank(self, rank: int) -> int:
        """Return the group of `data_size` that a rank belongs to."""
        return rank // (self.sequence * self.tensor)

    def counts_rows(self, rank: int) -> bool:
        """Return whether a rank counts the rows of its data rank, which several ranks may share: the first of them does."""
        return rank % (self.sequence * self.tensor) == 0

    def group(self, dimension: str) -> Group:
        """Return the ranks that communicate along `shard` (those of a copy), `replicate`, `sequence` or `world`."""
        if dimension == "world":
            return Group(self.world_size, self.machines)
        if dimension in ("shard", "sequence"):
            neighbours = self.copy_size if dimension == "shard" else self.sequence
            return Group(neighbours, max(1, math.ceil(neighbours / self.local_world_size)))
        copies_per_machine = max(1, self.local_world_size // self.copy_size)
        return Group(self.replicate, max(1, math.ceil(self.replicate / copies_per_machine)))
