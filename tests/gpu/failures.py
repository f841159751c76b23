"""A plugin of pytest that writes each test as it ends: a GPU may be gone before the summary
(`pytest -p tests.gpu.failures`).

Failures are printed. If GPU_TEST_RESULTS names a file, it gets a line of JSON for each test: name, outcome,
seconds, what the test measured (`record_property`), and reason and message if it did not pass.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

RESULTS = "GPU_TEST_RESULTS"
LINES = 40


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    message = report.longreprtext.splitlines()[-LINES:] if report.failed else []
    if message:
        print(f"\n---- {report.nodeid}", *message, sep="\n", flush=True)
    is_result = report.when == "call" or not report.passed
    if is_result and RESULTS in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[RESULTS], "a", encoding="utf-8") as results:
            results.write(json.dumps(_row(report, message)) + "\n")


def _row(report: pytest.TestReport, message: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    if report.user_properties:
        row["measured"] = ", ".join(f"{name} {value}" for name, value in report.user_properties)
    if report.skipped:
        row["reason"] = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
    if message:
        causes = [line.removeprefix("E").strip() for line in message if line.startswith("E ")]
        row |= {"reason": causes[0] if causes else message[-1], "message": "\n".join(message)}
    return row
