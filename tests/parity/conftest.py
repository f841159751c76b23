from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.bench import Bench, shared_bench
from tests.parity.report import markdown, summary
from tests.ranks import RankPool, shared_pool


@pytest.fixture(scope="session")
def pool() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def bench() -> Bench:
    return shared_bench()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-report", type=Path, help="write the measured deviations to this file, as docs/evidence/parity.md is")


def _row(test: pytest.TestReport) -> dict[str, str] | None:
    row = dict(test.user_properties).get("parity")
    return row if isinstance(row, dict) and test.when == "call" else None


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """With -v, print what a case measured next to its verdict."""
    row = _row(report)
    if row is None or hasattr(report, "wasxfail"):
        return None
    numbers = "  ".join(f"{name.strip()} {value}" for name, value in row.items() if name not in ("section", "case"))
    return report.outcome, {"passed": ".", "failed": "F"}.get(report.outcome, "?"), f"{report.outcome.upper()}  {numbers}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    rows = [row for report in reports if (row := _row(report)) is not None]
    path = config.getoption("--parity-report", default=None)
    if not rows or (path is None and config.get_verbosity() < 1):
        return
    terminalreporter.section("parity")
    for line in summary(rows):
        terminalreporter.write_line(line)
    if path is not None:
        previous = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(markdown(rows, previous), encoding="utf-8")
