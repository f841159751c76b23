"""A section of docs/evidence/plan-accuracy.md: the memory of drawn recipes on an emulated GPU, compared with
their plans."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.evidence import Evidence, Results, table

HEADING = "## Compared with an emulated GPU"
_MIB = 2**20
_BINS = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, float("inf"))
"""Upper ends of the counts: per cent of the live peak."""
_WORST = 10
_HOW = """Written by `scripts/test --suite memory --recipes {recipes} --seed {first} --write`. Drawn recipes (seeds
{first} to {last}) train three steps of full rows on one or two [emulated GPUs](../development/testing.md#an-emulated-gpu). The most that is
allocated in the third is compared with the replay of the recipe's trace, without the CUDA context and the workspaces of cuBLAS
and flash kernels.
Models are toys: peaks are 15 to 500 MiB. A plan is within bounds if it is off by at most 0.5 % or 1 MiB.

**{within} of {compared} recipes are within bounds**: median {median} %, nine of ten below {ninetieth} %, largest {largest} %. {counts}.
[plan-accuracy.json](data/plan-accuracy.json) has the {shown} that are farthest off, with the tensors where run and plan part, and
the {failed} that could not be compared. Out of bounds:
"""  # noqa: E501


@dataclass(frozen=True)
class ComparedRow:
    seed: int
    recipe: str
    live_bytes: int = 0
    planned_bytes: int = 0
    is_within: bool = False
    parting: str | None = None
    failure: str | None = None
    """Why the recipe was not compared: what the run or the trace ended with."""

    @property
    def percent(self) -> float:
        return 100 * (self.planned_bytes - self.live_bytes) / self.live_bytes

    def __str__(self) -> str:
        if self.failure is not None:
            return f"{self.seed}  NOT COMPARED: {self.failure}  ({self.recipe})"
        text = f"{self.seed}  {self.live_bytes / _MIB:.2f} MiB, planned {self.percent:+.2f} % ({self.recipe})"
        return text if self.is_within else f"{text}\n    OUT OF BOUND: {self.parting}"


def results(rows: Sequence[ComparedRow]) -> Results:
    """What is kept of a comparison: figures of all rows, and the rows that are farthest off or failed."""
    compared = sorted((row for row in rows if row.failure is None), key=lambda row: -abs(row.percent))
    off = sorted(abs(row.percent) for row in compared)
    bins = Counter(next(end for end in _BINS if value <= end) for value in off)
    about = {
        "recipes": len(rows),
        "first": rows[0].seed,
        "last": rows[-1].seed,
        "compared": len(compared),
        "within": sum(row.is_within for row in compared),
        "median": f"{statistics.median(off):.2f}",
        "ninetieth": f"{off[int(0.9 * (len(off) - 1))]:.2f}",
        "largest": f"{off[-1]:.2f}",
        "off": {_name(end): bins[end] for end in _BINS},
    }
    return Results(
        about,
        [asdict(row) for row in (*compared[:_WORST], *(row for row in rows if row.failure is not None))],
    )


def _name(end: float) -> str:
    return (
        "exactly"
        if end == 0
        else f"at most {end:g} %"
        if end < float("inf")
        else f"more than {_BINS[-2]:g} %"
    )


def section(found: Results) -> str:
    rows = [ComparedRow(**row) for row in found.rows]
    failed = sum(row.failure is not None for row in rows)
    counts = "Off by " + ", ".join(
        f"{name}: {number}" for name, number in found.about["off"].items() if number
    )
    text = _HOW.format(**found.about, counts=counts, shown=len(rows) - failed, failed=failed)
    outside = [row for row in rows if row.failure is None and not row.is_within]
    lines = [
        [row.seed, _short(row.recipe), f"{row.live_bytes / _MIB:.2f}", f"{row.percent:+.2f} %"]
        for row in outside
    ]
    return f"{HEADING}\n\n{text}\n{table(['seed', 'recipe', 'run, MiB', 'plan'], lines)}"


def _short(recipe: str) -> str:
    """The model, the GPUs and the rows, without the switches."""
    return ", ".join(recipe.split(", ")[:4])


def written(page: str, new: str) -> str:
    """The page with the section in place of the old one, or at the end. A heading below it, of any depth,
    begins another."""
    begin = page.find(HEADING)
    if begin < 0:
        return f"{page.rstrip()}\n\n{new}"
    following = re.search(r"^#", page[begin + len(HEADING) :], re.MULTILINE)
    rest = "" if following is None else "\n" + page[begin + len(HEADING) + following.start() :]
    return page[:begin] + new + rest


EVIDENCE = Evidence(
    Path("evidence/plan-accuracy.md"), lambda found, previous: written(previous, section(found))
)
