"""`python -m tests.fuzz --runs N --seed S`: trials one after another; a failing one is made as small as it
still fails."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import transformers

from tests.fuzz.plants import PLANTS
from tests.fuzz.space import Draw, draw
from tests.fuzz.trial import Verdict, judge
from tests.ranks import Ranks, shared_ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --suite fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others count up from it")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a bug to find: exit 0 when it is found")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        return fuzz(
            range(arguments.seed, arguments.seed + arguments.runs), folder, shared_ranks(), arguments.plant
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fuzz(seeds: range, folder: Path, on_ranks: Ranks, plant: str | None = None) -> int:
    started, failed, refusals = time.monotonic(), 0, Counter[str]()
    for number, seed in enumerate(seeds, start=1):
        verdict = trial(draw(seed), folder / str(seed), on_ranks, plant)
        refusals.update(refusal.partition(":")[0] for refusal in verdict.refusals)
        if (
            verdict.failures
            and plant
            and not trial(verdict.draw, folder / f"{seed}-without", on_ranks).failures
        ):
            print(f"found `{plant}` by trial {number} (seed {seed}): {verdict.failures[0]}")
            return 0
        if verdict.failures:
            failed += 1
            smallest = shrink(verdict, folder / f"{seed}-smaller", on_ranks)
            print(f"\nseed {seed} FAILED\n  {smallest.draw}", *smallest.failures, sep="\n  ", flush=True)
        elif sys.stdout.isatty() or number % 10 == 0:
            print(
                f"{number} of {len(seeds)} trials, {failed} failed, {time.monotonic() - started:.0f} s",
                dict(refusals),
                flush=True,
            )
    print(
        f"{len(seeds) - failed} passed, {failed} failed in {time.monotonic() - started:.0f} s; "
        f"refusals, each right: {dict(refusals)}"
    )
    return 1 if failed or plant else 0


def trial(drawn: Draw, folder: Path, on_ranks: Ranks, plant: str | None = None) -> Verdict:
    try:
        return judge(drawn, folder, on_ranks, plant)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shrink(verdict: Verdict, folder: Path, on_ranks: Ranks) -> Verdict:
    """Takes out the resume, the bad step and switches, as many at once as it can, as long as the trial still
    fails."""
    smallest = verdict

    def fails(smaller: Draw) -> bool:
        nonlocal smallest
        tried = trial(smaller, folder, on_ranks)
        smallest = tried if tried.failures else smallest
        return bool(tried.failures)

    if verdict.draw.resumed is not None:
        fails(replace(smallest.draw, resumed=None))
    if verdict.draw.bad_step is not None:
        fails(replace(smallest.draw, bad_step=None))
    names = sorted(
        {*smallest.draw.switches, *(smallest.draw.resumed.switches if smallest.draw.resumed else ())}
    )
    size = len(names)
    while size:
        size = -(-size // 2) if size > 1 else 0
        for start in range(0, len(names), max(size, 1)):
            smaller = smallest.draw
            for name in names[start : start + max(size, 1)]:
                smaller = smaller.without(name)
            if smaller != smallest.draw:
                fails(smaller)
    return smallest


if __name__ == "__main__":
    sys.exit(main())
