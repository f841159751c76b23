"""Comparisons of all ranks by the facts that each sends to the others: generators, rows, and tensors that
must be equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_tune.core.topology import Topology


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank sends to the others before the first step or after the first update."""

    generators: dict[str, str] = field(default_factory=dict[str, str])
    """A digest of the state of each generator."""
    weights_seed: int | None = None
    """Of the initial weights; None where they were read."""
    rows: list[int] = field(default_factory=list[int])
    """Of the step, in the order of reading."""
    found: list[str] = field(default_factory=list[str])
    """Differences that the rank sees alone."""
    recipe: str = ""
    """A digest, as `parameter_names`."""
    parameter_names: str = ""
    rates: list[float] = field(default_factory=list[float])
    copies: dict[str, str] = field(default_factory=dict[str, str])
    """A digest of the tensors that some ranks must have alike, by these ranks."""


def generator_differences(every: list[RankFacts]) -> list[str]:
    """Compare the generators of ranks: dropout masks must differ, and the seed of the initial weights must
    not."""
    found: list[str] = []
    for kind in every[0].generators:
        by_state: dict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(every):
            by_state[facts.generators[kind]].append(rank)
        found += [
            f"the {kind} generators of {named_ranks(ranks)} are in the same state"
            for ranks in by_state.values()
            if len(ranks) > 1
        ]
    seeds = {facts.weights_seed for facts in every if facts.weights_seed is not None}
    if len(seeds) > 1:
        found.append(f"initial weights were drawn from different seeds: {', '.join(map(str, sorted(seeds)))}")
    return found


def row_differences(every: list[RankFacts], expected: Iterable[int], topology: Topology) -> list[str]:
    """Check that the ranks together read the rows of the step's global batch, each once, or once on each rank
    of a group that shares it."""
    wanted, first = sorted(expected), 0
    owners: dict[int, list[int]] = defaultdict(list)
    for rank, facts in enumerate(every):
        if topology.counts_rows(rank):
            first = rank
            for row in facts.rows:
                owners[row].append(rank)
        elif facts.rows != every[first].rows:
            return [f"rank {rank} reads other rows than rank {first}, and they share their rows"]
    if sorted(row for row, ranks in owners.items() for _ in ranks) == wanted:
        return []
    for row, ranks in owners.items():
        if row not in wanted:
            return [f"row {row} of {named_ranks(ranks)} is not in the global batch"]
        if len(ranks) > 1:
            return [f"row {row} is read {len(ranks)} times, by {named_ranks(ranks)}"]
    return [f"row {next(row for row in wanted if row not in owners)} of the global batch is read by no rank"]


def copy_differences(every: list[dict[str, dict[str, int]]]) -> list[str]:
    """Return a message for each tensor that differs between ranks that must have equal copies, from each
    rank's checksums."""
    found: list[str] = []
    for key in dict.fromkeys(key for sums in every for key in sums):
        holders = [(rank, sums[key]) for rank, sums in enumerate(every) if key in sums]
        first_rank, first = holders[0]
        for name in first:
            others = [rank for rank, sums in holders if sums.get(name) != first[name]]
            if others:
                found.append(
                    f"`{name}` of {named_ranks(others)} differs from that of rank {first_rank}, which "
                    "must be equal"
                )
    return found


def copies_differ(every: list[RankFacts]) -> bool:
    """Return whether tensors that some ranks must have alike differ, by their digests."""
    digests: dict[str, set[str]] = defaultdict(set)
    for facts in every:
        for key, checksum in facts.copies.items():
            digests[key].add(checksum)
    return any(len(found) > 1 for found in digests.values())


def other_than_first(values: Iterable[object]) -> list[list[int]]:
    """Return the ranks whose value is not that of rank 0, as one list; none if all are equal."""
    first, *rest = values
    others = [rank for rank, value in enumerate(rest, start=1) if value != first]
    return [others] if others else []


def named_ranks(ranks: Sequence[int]) -> str:
    """`[1, 2, 5]` → "ranks 1, 2 and 5"."""
    return (
        f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    )
