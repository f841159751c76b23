"""Measure what tests cost, and report it: a plugin of pytest that `tests/conftest.py` registers.

Each phase (collection of a file, set-up, call, tear-down) has wall-clock seconds and the CPU seconds of its
process and of the children that it waited for. After the tests it prints the slowest ones and what was left
out with the command that runs it; `--write-times` writes the costs by file to
`docs/evidence/data/test-times.tsv` and the tables of `docs/development/testing.md`.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "evidence" / "data" / "test-times.tsv"
PAGE = ROOT / "docs" / "development" / "testing.md"
BEGIN, END = "<!-- times -->", "<!-- end of times -->"
LEFT_OUT = {
    "gpu": ("need a GPU", "scripts/test-gpu"),
    "network": ("need the network", "pytest -m network"),
    "slow": ("are slow", "scripts/test --all"),
    "source": ("read sources alone", "scripts/check"),
    "e2e": ("run full commands", "scripts/test"),
}
"""Marker → what its tests are, and what runs them. A test with several counts under the first."""
UNKNOWN_SECONDS = 3.0
"""Assumed for a file that has not been measured."""
SUITES = "parity, faults, fuzz, memory, models, exports, chaos"


_elsewhere = 0.0


def add_elsewhere(seconds: float) -> None:
    """Count CPU seconds of processes that worked for this one and are not its children."""
    global _elsewhere
    _elsewhere += seconds


def cpu_seconds() -> float:
    """Of this process, of the children that it has waited for, and what was spent elsewhere for it."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system + _elsewhere


@dataclass
class Cost:
    """Seconds of a test file. All but `cpu` are wall-clock."""

    tests: int = 0
    collection: float = 0.0
    setup: float = 0.0
    call: float = 0.0
    cpu: float = 0.0

    @property
    def seconds(self) -> float:
        return self.collection + self.setup + self.call

    def add(self, other: Cost) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Times:
    """In a process of xdist it measures; in the process that pytest was started as it also gathers and
    reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_child = hasattr(config, "workerinput")
        self.started = time.monotonic()
        self.files: dict[str, Cost] = defaultdict(Cost)
        self.slowest: Counter[str] = Counter()
        self.collected: dict[str, tuple[float, float]] = {}
        self.left_out: Counter[str] = Counter()
        self.collection_seconds = 0.0

    # Measuring

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[Any]:
        wall, cpu = time.perf_counter(), cpu_seconds()
        report = yield
        if isinstance(collector, pytest.Module):
            self.collected[collector.nodeid] = (time.perf_counter() - wall, cpu_seconds() - cpu)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._spent = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        before, self._spent = self._spent, cpu_seconds()
        report.cpu_seconds = self._spent - before
        return report

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            mark = next((name for name in LEFT_OUT if item.get_closest_marker(name)), None)
            if mark is not None:
                self.left_out[mark] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if self.is_child:
            self.config.workeroutput["times"] = {"collected": self.collected, "left_out": dict(self.left_out)}  # type: ignore[attr-defined]

    # Gathering

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a process of xdist measured. Each of them collects everything: what that costs is added
        up, what is left out is not."""
        told = getattr(node, "workeroutput", {}).get("times")
        if told is not None:
            self._add_collected(told["collected"])
            self.left_out = Counter(told["left_out"])

    def _add_collected(self, collected: Mapping[str, Sequence[float]]) -> None:
        for name, (wall, cpu) in collected.items():
            self.files[name].add(Cost(collection=wall, cpu=cpu))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_child:
            return
        cost = self.files[report.nodeid.split("::")[0]]
        cost.cpu += getattr(report, "cpu_seconds", 0.0)
        self.slowest[report.nodeid] += report.duration
        if report.when == "call":
            cost.tests += 1
            cost.call += report.duration
        else:
            cost.setup += report.duration

    # Reporting

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.is_child or not self.slowest:
            return
        if not self.config.getoption("numprocesses", None):
            self._add_collected(self.collected)
        write = terminalreporter.write_line
        terminalreporter.section("times")
        for name, seconds in self.slowest.most_common(10):
            write(f"{seconds:6.1f} s  {name}")
        cpu = sum(cost.cpu for cost in self.files.values())
        write(f"{(time.monotonic() - self.started) / 60:.1f} minutes, {cpu / 60:.1f} minutes of CPU in tests")
        for mark, number in sorted(self.left_out.items()):
            what, command = LEFT_OUT[mark]
            write(f"not run: {number:,} that {what}: {command}")
        write(f"not run: suites ({SUITES}): scripts/test --suite NAME")
        if self.config.getoption("--write-times"):
            write_costs({name: cost for name, cost in self.files.items() if cost.tests})


def write_costs(files: Mapping[str, Cost]) -> None:
    """Write the table of files, and the tables of the page."""
    rows = [
        [name, str(cost.tests), *(f"{value:.1f}" for value in _numbers(cost))]
        for name, cost in sorted(files.items())
    ]
    TABLE.write_text("".join("\t".join(row) + "\n" for row in [COLUMNS, *rows]), encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(files)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


COLUMNS = ["file", "tests", "collection", "set-up", "call", "CPU"]


def _numbers(cost: Cost) -> Iterable[float]:
    return cost.collection, cost.setup, cost.call, cost.cpu


def read_costs() -> dict[str, Cost]:
    """What each file cost when `--write-times` was last given."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:] if TABLE.exists() else []
    return {
        name: Cost(int(tests), *map(float, seconds))
        for name, tests, *seconds in (line.split("\t") for line in lines)
    }


def tables(files: Mapping[str, Cost]) -> str:
    """Return the folders, and the twenty files with most CPU seconds, as Markdown."""
    from tests.evidence import table

    folders: dict[str, Cost] = defaultdict(Cost)
    for name, cost in files.items():
        folders[Path(name).parts[1] if len(Path(name).parts) > 2 else "(top level)"].add(cost)
        folders["all"].add(cost)
    header = ["", *COLUMNS[1:]]
    by_cost = sorted(files.items(), key=lambda item: -item[1].cpu)[:20]
    by_folder = sorted(folders.items(), key=lambda item: (item[0] == "all", -item[1].cpu))
    parts = [
        "Seconds of the fast tests, of all processes together; CPU includes ranks and commands that "
        "a test waited for.\n",
        table(header, [_row(f"`{name}`" if name != "all" else name, cost) for name, cost in by_folder]),
        "The twenty files with most CPU seconds:\n",
        table(header, [_row(f"`{name.removeprefix('tests/')}`", cost) for name, cost in by_cost]),
    ]
    return "\n".join(parts)


def _row(name: str, cost: Cost) -> list[str]:
    return [name, f"{cost.tests:,}", *(f"{value:.0f}" for value in _numbers(cost))]
