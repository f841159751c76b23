"""The scoreboard: run the tests of every row of the catalogue, plant the bugs, and report the results
(`scripts/test --suite faults`)."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.planting import Plant
from tests.faults.plants import PLANTS
from tests.faults.scoreboard import EVIDENCE, MISSING, NOT_RUN, STUCK, WRONG, Board, Standing
from tests.faults.table import ROWS, Row

ROOT = Path(__file__).resolve().parent.parent.parent
FILE_LIMIT_SECONDS = 2400.0
PLANT_LIMIT_SECONDS = 300.0
AT_ONCE = 2
"""Files, or plants: a core each, though ranks take more than one."""
COPIED = (
    "fsdp_tune",
    "tests",
    "configs",
    "docs",
    "scripts",
    "benchmarks",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "AGENTS.md",
)


@dataclass
class Seen:
    """What came of one test function."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    stuck: bool = False
    counts: Counter[str] = field(default_factory=Counter)


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]


def run_tests(tests: Iterable[str], *, fast: bool) -> dict[str, Seen]:
    """Runs test functions, a file at a time; a file that does not end leaves its tests stuck."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in dict.fromkeys(tests):
        by_file[test.split("::")[0]].append(test)
    # Those of the faults take longest, and so begin.
    files = sorted(by_file, key=lambda file: (not file.startswith("tests/faults"), -len(by_file[file]), file))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        each = list(pool.map(lambda file: run_file(file, by_file[file], fast=fast), files))
    return {test: found for one in each for test, found in one.items()}


def run_file(file: str, nodes: Sequence[str], *, fast: bool) -> dict[str, Seen]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        selection = ("-m", "not slow and not gpu") if fast else ("-m", "not gpu")
        command = pytest_command(*nodes, *selection, f"--junitxml={report}")
        try:
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=FILE_LIMIT_SECONDS, check=False
            )
            output = ended.stdout
        except subprocess.TimeoutExpired:
            output = "no end in time"
        found = read_report(report, nodes) if report.exists() else {node: Seen(stuck=True) for node in nodes}
    bad = [node for node in nodes if found[node].failed or found[node].stuck]
    lines = [
        f"{file}: {sum(one.passed for one in found.values())} passed in {time.monotonic() - started:.0f} s"
    ]
    lines += [f"    FAILED {node}" for node in bad] + (output.splitlines()[-40:] if bad else [])
    say("\n".join(lines))
    return found


_SAYING = threading.Lock()


def say(text: str) -> None:
    with _SAYING:
        print(text, flush=True)


def read_report(report: Path, nodes: Sequence[str]) -> dict[str, Seen]:
    seen = {node: Seen() for node in nodes}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        node = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').split('[')[0]}"
        if node not in seen:
            continue
        one = seen[node]
        if case.find("failure") is not None or case.find("error") is not None:
            one.failed += 1
        elif case.find("skipped") is not None:
            one.skipped += 1
        else:
            one.passed += 1
        for entry in case.iter("property"):
            one.counts[str(entry.get("name"))] += int(str(entry.get("value")))
    return seen


def copy_with(plant: Plant, folder: Path) -> Path:
    """A copy of the repository that has the planted bug."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target)
    (folder / "fsdp_tune" / plant.path).write_text(plant.planted(), encoding="utf-8")
    return folder


def red_rows(plant: Plant, place: Path, *, fast: bool) -> set[str]:
    """Rows of a plant that a test fails for, in the copy."""
    rows = {row.id: row.tests for row in ROWS if row.id in plant.rows}
    if plant.by and not fast:
        report = place / "report.xml"
        if run_in(place, f"--junitxml={report}", *plant.by) is not None and report.exists():
            found = read_report(report, [test for tests in rows.values() for test in tests])
            return {row for row, tests in rows.items() if any(found[test].failed for test in tests)}
    return {row for row, tests in rows.items() if is_red(tests, place, fast=fast)}


def is_red(tests: Sequence[str], place: Path, *, fast: bool = False) -> bool:
    """Return whether a test fails in the copy, quick tests first. An exit code other than 1 is not a
    result."""
    for selection in ("not slow and not gpu",) if fast else ("not slow and not gpu", "slow and not gpu"):
        # A run that does not end would be seen too.
        if run_in(place, "-x", "-m", selection, *tests) in (1, None):
            return True
    return False


def run_in(place: Path, *arguments: str) -> int | None:
    """Exit code of pytest in a copy; None where it did not end."""
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            pytest_command(*arguments),
            cwd=place,
            env=environment,
            capture_output=True,
            timeout=PLANT_LIMIT_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def plant_all(plants: Sequence[Plant], *, fast: bool) -> dict[str, list[str]]:
    """row → the plants that turned it red. Every plant must turn all of its rows red."""
    red: dict[str, list[str]] = defaultdict(list)

    def see(plant: Plant) -> set[str]:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="planted-") as folder:
            seen = red_rows(plant, copy_with(plant, Path(folder)), fast=fast)
        missed = [row for row in plant.rows if row not in seen]
        verdict = f"NOT SEEN by {', '.join(missed)}" if missed else f"red: {', '.join(plant.rows)}"
        say(f"{plant.name}: {verdict} ({time.monotonic() - started:.0f} s)")
        return seen

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for plant, seen in zip(plants, pool.map(see, plants), strict=True):
            for row in sorted(seen):
                red[row].append(plant.name)
    return red


def judge(rows: Sequence[Row], seen: dict[str, Seen], red: dict[str, list[str]]) -> dict[str, Standing]:
    standings: dict[str, Standing] = {}
    for row in rows:
        found = [seen[test] for test in row.tests if test in seen]
        passed = sum(one.passed for one in found)
        state = row.ends
        if not row.tests:
            state = MISSING
        elif any(one.stuck for one in found):
            state = STUCK
        elif any(one.failed for one in found):
            state = WRONG
        elif not passed:
            state = NOT_RUN
        inner = sum(sum(one.counts.values()) for one in found)
        standings[row.id] = Standing(state, passed + inner, tuple(red.get(row.id, ())))
    return standings


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --suite faults", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out the slow tests")
    parser.add_argument("--no-plants", action="store_true", help="plant no bugs")
    parser.add_argument(
        "--only-plants",
        action="store_true",
        help="plant the bugs, and run no other tests; for the rows that are named",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/evidence/data/faults.json and faults.md; of named rows, replace those alone",
    )
    parser.add_argument("rows", nargs="*", metavar="F001", help="these rows only")
    options = parser.parse_args()
    if options.write and options.only_plants:
        parser.error("--write needs the tests too")
    started = time.monotonic()
    chosen = [row for row in ROWS if not options.rows or row.id in options.rows]
    plants = [plant for plant in PLANTS if set(plant.rows) & {row.id for row in chosen}]
    seen = (
        {}
        if options.only_plants
        else run_tests((test for row in chosen for test in row.tests), fast=options.fast)
    )
    red = {} if options.no_plants else plant_all(plants, fast=options.fast)
    counts = sum((one.counts for one in seen.values()), Counter[str]())
    board = Board([_what(options, time.monotonic() - started)], judge(chosen, seen, red), counts)
    for row, one in board.standings.items() if options.rows else ():
        print(f"{row}  {one.state}  {one.cases} cases  {'; '.join(one.planted)}")
    if options.write and options.rows:
        board, later = Board.of(EVIDENCE.read()), board
        board.run_again(later)
    if options.write or not options.rows:
        print("\n".join(["", *board.summary()]))
    if options.write:
        EVIDENCE.write(board.results(EVIDENCE.read().about["chaos"]))
    # Without the slow tests a bug may well go unseen.
    whole = not options.fast and not options.no_plants
    caught = {row: set(names) for row, names in red.items()}
    blind = [
        plant.name
        for plant in plants
        if whole and any(plant.name not in caught.get(row, ()) for row in plant.rows)
    ]
    if blind:
        print(f"planted bugs that were not seen everywhere: {', '.join(blind)}")
    return 1 if blind or any(one.state in (WRONG, STUCK) for one in board.standings.values()) else 0


def _what(options: argparse.Namespace, seconds: float) -> str:
    which = "the fast tests alone" if options.fast else "all tests, fast and slow"
    planted = "no bug was planted" if options.no_plants else "each bug was planted"
    rows = ", ".join(options.rows) or "The whole catalogue"
    return f"{rows}: {which}; {planted}; {seconds / 60:.0f} minutes."


if __name__ == "__main__":
    raise SystemExit(main())
