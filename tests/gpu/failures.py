"""A plugin of pytest: prints each failure as it comes: a GPU may be gone before the summary (`pytest -p tests.gpu.failures`)."""

from __future__ import annotations

import pytest

LINES = 40


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n---- {report.nodeid}", *report.longreprtext.splitlines()[-LINES:], sep="\n", flush=True)
