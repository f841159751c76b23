"""The parallel dimensions of a run and the position of each rank in them. Pure arithmetic; `model.shard.wrap`
builds the process groups.

A dimension is declared here, at its field of `Topology`. Rows, loss weights, sharding and plans take their
numbers from a `Topology` and name no dimension, except where one has code of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

_OPEN_FILES = 4096
"""Of a rank, for all but connections."""
_GLOO_GROUPS = 5
"""At most at once: of all ranks, of saves, of loading, and two of a hybrid mesh."""
_GLOO_GROUPS_OF_ROWS = 2
"""Of each dimension along which ranks share rows."""


@dataclass(frozen=True, slots=True)
class Group:
    """A number of communicating ranks, spread evenly over a number of machines."""

    ranks: int
    machines: int

    @property
    def local_ranks(self) -> int:
        return max(1, self.ranks // self.machines)


class Split(NamedTuple):
    """How a dimension splits the ranks of a run."""

    groups: int
    ranks: int
    """Of each group."""
    distance: int
    """Of neighbours in a group."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A parallel dimension: its key in `parallelism:` of a recipe, and in what the ranks along it differ."""

    key: str
    has_own_rows: bool = False
    """They read different rows."""
    has_own_tokens: bool = False
    """They compute the loss of different tokens, so their gradients are averaged."""
    has_own_shards: bool = False
    """They hold different shards of the same copy of the model."""


def _dimension(key: str, *, own: str = "") -> Any:
    return field(
        default=1, metadata={"dimension": Dimension(key, "rows" in own, "tokens" in own, "shards" in own)}
    )


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the dimensions, outermost first; `world_size` is their product.

    Ranks are numbered in this order, machine by machine: neighbours differ in the innermost dimension. Those
    with rows of their own come before those that share rows, and those with tokens of their own before those
    that share tokens.
    """

    replicate: int = _dimension("dp_replicate_size", own="rows tokens")
    """Copies of the model."""
    shard: int = _dimension("dp_shard_size", own="rows tokens shards")
    """Ranks that share one copy and read different rows."""
    sequence: int = _dimension("sp_size", own="tokens shards")
    """Ranks that share each row and the shards of a copy."""
    tensor: int = _dimension("tp_size")
    """Ranks that share each matrix."""
    machines: int = 1

    def _size(self, counts: Callable[[Dimension], bool]) -> int:
        """Return the number of ranks along the dimensions that `counts` selects."""
        sizes: list[int] = [
            getattr(self, name) for name, dimension in DIMENSIONS.items() if counts(dimension)
        ]
        return math.prod(sizes)

    @property
    def world_size(self) -> int:
        return self._size(lambda _: True)

    @property
    def local_world_size(self) -> int:
        """Ranks of one machine."""
        return max(1, self.world_size // self.machines)

    @property
    def copy_size(self) -> int:
        """Ranks that hold the shards of one copy."""
        return self._size(lambda dimension: dimension.has_own_shards)

    @property
    def data_size(self) -> int:
        """Groups of ranks that read different rows."""
        return self._size(lambda dimension: dimension.has_own_rows)

    @property
    def row_size(self) -> int:
        """Ranks that share each row."""
        return self._size(lambda dimension: not dimension.has_own_rows)

    @property
    def row_parts(self) -> int:
        """Parts of each row, on different ranks."""
        return self._size(lambda dimension: dimension.has_own_tokens and not dimension.has_own_rows)

    @property
    def gradient_size(self) -> int:
        """Ranks whose gradients are averaged: those that compute the loss of different tokens."""
        return self._size(lambda dimension: dimension.has_own_tokens)

    def row_keys(self) -> dict[str, int]:
        """Return {key of a recipe: size} of the dimensions along which several ranks share rows."""
        sizes = {each.key: getattr(self, name) for name, each in DIMENSIONS.items() if each.key in ROW_KEYS}
        return {f"parallelism.{key}": size for key, size in sizes.items() if size > 1}

    def open_files_needed(self, other_groups: int = 0) -> int:
        """Return the open files of a rank: gloo connects it with all others for each group, of which
        `other_groups` are of meshes that are not the model's."""
        return (
            _OPEN_FILES
            + (_GLOO_GROUPS + _GLOO_GROUPS_OF_ROWS * len(self.row_keys()) + other_groups) * self.world_size
        )

    def data_rank(self, rank: int) -> int:
        """Return the group of `data_size` that a rank belongs to."""
        return rank // self.row_size

    def counts_rows(self, rank: int) -> bool:
        """Return whether a rank counts the rows of its data rank, which several ranks may share: the first of
        them does."""
        return rank % self.row_size == 0

    def counts_loss(self, rank: int) -> bool:
        """Return whether a rank counts the loss of its tokens, which several ranks may compute: the first of
        them does."""
        return rank % self._size(lambda dimension: not dimension.has_own_tokens) == 0

    def split(self, dimension: str) -> Split:
        """Return how a dimension splits the ranks; `shard` is all dimensions along which ranks hold shards of
        one copy."""
        names = (
            [name for name, each in DIMENSIONS.items() if each.has_own_shards]
            if dimension == "shard"
            else [dimension]
        )
        order = list(DIMENSIONS)
        inside: list[int] = [getattr(self, name) for name in order[order.index(names[-1]) + 1 :]]
        ranks, distance = math.prod(getattr(self, name) for name in names), math.prod(inside)
        return Split(self.world_size // (ranks * distance), ranks, distance)

    def group(self, dimension: str) -> Group:
        """Return the ranks that communicate along `world` or a dimension; see `split`."""
        if dimension == "world":
            return Group(self.world_size, self.machines)
        split = self.split(dimension)
        return self._group(split.ranks, split.distance)

    def neighbours(self, ranks: int) -> Group:
        """Return the groups of so many consecutive ranks that divide the run."""
        return self._group(ranks, 1)

    def _group(self, ranks: int, distance: int) -> Group:
        return Group(ranks, _most_machines(self.world_size, self.local_world_size, ranks, distance))


@functools.cache
def _most_machines(world_size: int, local_size: int, ranks: int, distance: int) -> int:
    """Return the machines of the most spread of all groups with so many ranks at a distance from each other:
    the others wait for it. 6 of 4 ranks on a machine are on two, and so are 3, as ranks 3 to 5."""
    last = (ranks - 1) * distance
    firsts = (
        first + offset for first in range(0, world_size, ranks * distance) for offset in range(distance)
    )
    return min(ranks, max((first + last) // local_size - first // local_size + 1 for first in firsts))


DIMENSIONS: dict[str, Dimension] = {
    each.name: each.metadata["dimension"] for each in fields(Topology) if each.metadata
}
"""By their name in a `Topology`, outermost first."""
DATA_KEYS = tuple(each.key for each in DIMENSIONS.values() if each.has_own_rows)
"""Keys of `parallelism:` that may be `auto`: the ranks that no other key takes read rows of their own."""
ROW_KEYS = tuple(each.key for each in DIMENSIONS.values() if not each.has_own_rows)
"""Keys of `parallelism:` with the ranks that share each row."""
