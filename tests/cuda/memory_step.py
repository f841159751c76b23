"""Allocations and frees up to the end of a step, of a run or of a plan: what is alive, how much, and where
two of them part."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_tune.planner.predict.allocator import rounded

NOTABLE = 0.002
"""Share of the peak from which an allocation is named as a difference."""


class MemoryChange(NamedTuple):
    """Memory that is given out (`size` > 0, in bytes as requested) or given back (`size` < 0). `label`: the
    operation and its place."""

    block: int
    size: int
    label: str


@dataclass(frozen=True)
class MemoryStep:
    """`changes[begin:]` are those of the step. Blocks are counted in the allocator's units of 512 bytes."""

    changes: list[MemoryChange]
    begin: int

    @property
    def levels(self) -> npt.NDArray[np.int64]:
        """Bytes that are alive after each change."""
        return np.cumsum(
            [rounded(abs(change.size)) * (1 if change.size > 0 else -1) for change in self.changes],
            dtype=np.int64,
        )

    @property
    def highest(self) -> int:
        """Index of the change after which most is alive in the step."""
        return self.begin + int(np.argmax(self.levels[self.begin :]))

    @property
    def peak_bytes(self) -> int:
        return int(self.levels[self.highest])

    def alive(self) -> list[MemoryChange]:
        """The allocations that are alive at the peak."""
        found: dict[int, MemoryChange] = {}
        for change in self.changes[: self.highest + 1]:
            if change.size > 0:
                found[change.block] = change
            else:
                del found[change.block]
        return list(found.values())

    def allocations(self, least_bytes: float) -> list[MemoryChange]:
        return [change for change in self.changes[self.begin :] if change.size >= least_bytes]


def parting(live: MemoryStep, planned: MemoryStep) -> str | None:
    """The first notable allocation of the step that only one side has; None if both allocate the same in the
    same order."""
    least = NOTABLE * live.peak_bytes
    ours, theirs = live.allocations(least), planned.allocations(least)
    matcher = SequenceMatcher(
        None, [rounded(each.size) for each in ours], [rounded(each.size) for each in theirs], autojunk=False
    )
    for tag, first, last, other, end in matcher.get_opcodes():
        if tag == "equal":
            continue
        sides = [("live", ours[first:last]), ("plan", theirs[other:end])]
        return "; ".join(f"{name} {_described(found[0])}" for name, found in sides if found)
    return None


def only_at_peak(live: MemoryStep, planned: MemoryStep) -> dict[str, list[str]]:
    """What is alive at one peak and not at the other, by size: notable sums of blocks, the largest first."""
    least = NOTABLE * live.peak_bytes
    sides = {"live": live.alive(), "plan": planned.alive()}
    counts = {name: Counter(rounded(each.size) for each in blocks) for name, blocks in sides.items()}
    found: dict[str, list[str]] = {}
    for name, other in (("live", "plan"), ("plan", "live")):
        by_size: dict[int, list[MemoryChange]] = defaultdict(list)
        for each in sides[name]:
            by_size[rounded(each.size)].append(each)
        surplus = {
            size: count for size, count in (counts[name] - counts[other]).items() if size * count >= least
        }
        ordered = sorted(surplus, key=lambda size: -size * surplus[size])
        found[name] = [f"{surplus[size]} × {_described(by_size[size][-1])}" for size in ordered]
    return found


def _described(change: MemoryChange) -> str:
    return f"{change.size / 2**20:.2f} MiB by {change.label}"
