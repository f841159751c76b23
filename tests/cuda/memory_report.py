"""`python -m tests.cuda.memory_report --recipes N --seed S`: plans against runs, a line for each recipe, and a section of the page."""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from tests.cuda.drawn_memory import Weighed, drawn, layers_of, weigh
from tests.cuda.environment import with_gpus
from tests.cuda.live_memory import RunRefused
from tests.cuda.memory_step import only_at_peak, parting
from tests.fuzz.space import Draw
from tests.ranks import REPOSITORY, RankPool, RanksFailed

PAGE = REPOSITORY / "docs" / "evidence" / "plan-accuracy.md"
HEADING = "## Compared with an emulated GPU"
_MIB = 2**20
_BINS = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, float("inf"))
"""Upper ends of the rows of the histogram: per cent of the live peak."""
_WORST = 10
_HOW = """Written by `scripts/test-memory --recipes {recipes} --seed {first} --write`. Recipes drawn from the schema (seeds {first} to
{last}) train with the real worker on one or two emulated GPUs ([what they are](../development/testing.md#an-emulated-gpu)), three steps
of full rows. The most that is allocated in the third is compared with the replay of the recipe's trace, both in the allocator's blocks of
512 bytes. The emulated device has neither a CUDA context nor the workspaces of cuBLAS and of flash kernels; the plan's figures for these
are not part of the comparison. Models are toys: peaks are 15 to 500 MiB. A plan is within bounds if it is off by at most 0.5 % or 1 MiB."""


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


def compare(seed: int, folder: Path, pool: RankPool) -> ComparedRow:
    one = drawn(seed)
    try:
        weighed = weigh(one, folder, pool)
    except (RunRefused, RanksFailed, AssertionError) as error:
        return ComparedRow(seed, described(one), failure=_last_line(str(error)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sizes = weighed.live.peak_bytes, weighed.planned.peak_allocated_bytes
    return ComparedRow(seed, described(weighed.draw), *sizes, weighed.is_within, difference(weighed))


def difference(weighed: Weighed) -> str | None:
    """Where run and plan part, and what only one of them holds at its peak; None if they hold the same."""
    live, planned = weighed.live, weighed.planned.step
    at_peak = [f"only the {name}'s peak has {found[0]}" for name, found in only_at_peak(live, planned).items() if found]
    first = parting(live, planned)
    return "; ".join([*([f"first {first}"] if first else []), *at_peak]) or None


def described(one: Draw) -> str:
    """The recipe in a line: what is drawn, by the last parts of the keys."""
    batch = one.batch["training.per_device_train_batch_size"], one.batch["training.gradient_accumulation_steps"]
    parts = [f"{one.family}, {layers_of(one)} layers, {one.ranks} GPU{'s' * (one.ranks > 1)}, {batch[0]} × {batch[1]} rows"]
    parts += ["packed"] if one.batch["data.packing"] else []
    parts += [f"{name.rpartition('.')[2]} {value}" for name, value in sorted(one.switches.items())]
    return ", ".join(parts)


def _last_line(text: str) -> str:
    if "no answer in time" in text:  # and after it the stacks
        return "a rank did not answer in time"
    return text.strip().splitlines()[-1][:300] if text.strip() else "no message"


# ---- The page


def section(rows: Sequence[ComparedRow]) -> str:
    compared = [row for row in rows if row.failure is None]
    outside = [row for row in compared if not row.is_within]
    off = sorted(abs(row.percent) for row in compared)
    lines = [
        HEADING,
        "",
        *_HOW.format(recipes=len(rows), first=rows[0].seed, last=rows[-1].seed).splitlines(),
        "",
        f"**{len(compared) - len(outside)} of {len(compared)} recipes are within bounds**: median {statistics.median(off):.2f} %, "
        f"nine of ten below {off[int(0.9 * (len(off) - 1))]:.2f} %, largest {off[-1]:.2f} %.",
        f"{len(rows) - len(compared)} more could not be compared.",
        "",
        "| off by | recipes | |",
        "| --- | ---: | --- |",
        *_histogram(off),
        "",
        f"The {min(_WORST, len(compared))} that are farthest off:",
        "",
        "| seed | recipe | run, MiB | plan | where they part |",
        "| ---: | --- | ---: | ---: | --- |",
    ]
    worst = sorted(compared, key=lambda row: -abs(row.percent))[:_WORST]
    lines += [
        f"| {row.seed} | {row.recipe} | {row.live_bytes / _MIB:.2f} | {row.percent:+.2f} % | {row.parting or 'small blocks'} |"
        for row in worst
    ]
    failed = [f"- seed {row.seed}, {row.recipe}: `{row.failure}`" for row in rows if row.failure is not None]
    lines += ["", "Not compared:", "", *failed] if failed else []
    return "\n".join(lines) + "\n"


def _histogram(off: Sequence[float]) -> list[str]:
    found = Counter(next(end for end in _BINS if value <= end) for value in off)
    names = ["exactly", *(f"at most {end:g} %" for end in _BINS[1:-1]), f"more than {_BINS[-2]:g} %"]
    return [f"| {name} | {found[end]} | {'█' * found[end]} |" for name, end in zip(names, _BINS, strict=True)]


def written(page: str, new: str) -> str:
    """The page with the section in place of the old one, or at the end. A heading below it, of any depth, begins another."""
    begin = page.find(HEADING)
    if begin < 0:
        return f"{page.rstrip()}\n\n{new}"
    following = re.search(r"^#", page[begin + len(HEADING) :], re.MULTILINE)
    rest = "" if following is None else "\n" + page[begin + len(HEADING) + following.start() :]
    return page[:begin] + new + rest


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test-memory", description=__doc__)
    parser.add_argument("--recipes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first recipe; the others count up from it")
    parser.add_argument("--write", action="store_true", help=f"write the section of {PAGE.name}")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    pool = RankPool(folder / "ranks", size=2, environment=with_gpus(2))
    rows: list[ComparedRow] = []
    started = time.monotonic()
    try:
        for seed in range(arguments.seed, arguments.seed + arguments.recipes):
            rows.append(compare(seed, folder / str(seed), pool))
            print(rows[-1], flush=True)
    finally:
        pool.close()
        shutil.rmtree(folder, ignore_errors=True)
    outside = sum(not row.is_within for row in rows if row.failure is None)
    failed = sum(row.failure is not None for row in rows)
    print(f"{len(rows)} recipes, {outside} out of bounds, {failed} not compared, {time.monotonic() - started:.0f} s")
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), section(rows)), encoding="utf-8")
    return 1 if outside or failed else 0


if __name__ == "__main__":
    sys.exit(main())
