"""`python -m tests.cuda.memory_report --recipes N --seed S`: plans against runs, a line for each recipe, and
a section of the page."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import transformers

from tests.cuda.drawn_memory import Weighed, drawn, layers_of, weigh
from tests.cuda.live_memory import RunRefused
from tests.cuda.memory_page import EVIDENCE, ComparedRow, results
from tests.cuda.memory_step import only_at_peak, parting
from tests.fuzz.space import Draw
from tests.ranks import Ranks, RanksFailed, shared_ranks


def compare(seed: int, folder: Path, on_ranks: Ranks) -> ComparedRow:
    one = drawn(seed)
    try:
        weighed = weigh(one, folder, on_ranks)
    except (RunRefused, RanksFailed, AssertionError) as error:
        return ComparedRow(seed, described(one), failure=_last_line(str(error)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sizes = weighed.live.peak_bytes, weighed.planned.peak_allocated_bytes
    return ComparedRow(seed, described(weighed.draw), *sizes, weighed.is_within, difference(weighed))


def difference(weighed: Weighed) -> str | None:
    """Where run and plan part, and what only one of them holds at its peak; None if they hold the same."""
    live, planned = weighed.live, weighed.planned.step
    at_peak = [
        f"only the {name}'s peak has {found[0]}"
        for name, found in only_at_peak(live, planned).items()
        if found
    ]
    first = parting(live, planned)
    return "; ".join([*([f"first {first}"] if first else []), *at_peak]) or None


def described(one: Draw) -> str:
    """The recipe in a line: what is drawn, by the last parts of the keys."""
    batch = (
        one.batch["training.per_device_train_batch_size"],
        one.batch["training.gradient_accumulation_steps"],
    )
    parts = [
        f"{one.family}, {layers_of(one)} layers, {one.ranks} GPU{'s' * (one.ranks > 1)}, {batch[0]} "
        f"× {batch[1]} rows"
    ]
    parts += ["packed"] if one.batch["data.packing"] else []
    parts += [f"{name.rpartition('.')[2]} {value}" for name, value in sorted(one.switches.items())]
    return ", ".join(parts)


def _last_line(text: str) -> str:
    if "no answer in time" in text:  # and after it the stacks
        return "a rank did not answer in time"
    return text.strip().splitlines()[-1][:300] if text.strip() else "no message"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --suite memory", description=__doc__)
    parser.add_argument("--recipes", type=int, default=60)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first recipe; the others count up from it"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/evidence/data/plan-accuracy.json and the section of its page",
    )
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    rows: list[ComparedRow] = []
    started = time.monotonic()
    try:
        for seed in range(arguments.seed, arguments.seed + arguments.recipes):
            rows.append(compare(seed, folder / str(seed), shared_ranks("cuda")))
            print(rows[-1], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outside = sum(not row.is_within for row in rows if row.failure is None)
    failed = sum(row.failure is not None for row in rows)
    print(
        f"{len(rows)} recipes, {outside} out of bounds, {failed} not compared, "
        f"{time.monotonic() - started:.0f} s"
    )
    if arguments.write:
        EVIDENCE.write(results(rows))
    return 1 if outside or failed else 0


if __name__ == "__main__":
    sys.exit(main())
