from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.cuda.devices import DEVICES, leave_to_slow_tests
from tests.evidence import Results, installed
from tests.parity.bench import Bench, shared_bench
from tests.parity.cases import SHORT, Case
from tests.parity.report import EVIDENCE, summary
from tests.ranks import Ranks, shared_ranks

HERE = Path(__file__).parent
ON_CUDA_TOO = {
    "test_matrix",
    "test_adapters",
    "test_breaks",
    "test_fp8",
    "test_lean_state",
    "test_optimizers",
    "test_resume",
    "test_shared_rows",
}
"""Modules whose tests also run on an emulated GPU, where they are slow. tests/cuda/test_plants.py has a fast
run like these."""


@pytest.fixture(scope="session")
def on_ranks(device: str) -> Ranks:
    return shared_ranks(device)


@pytest.fixture(scope="session")
def bench(device: str) -> Bench:
    return shared_bench(device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bench" in metafunc.fixturenames and metafunc.module.__name__.rpartition(".")[2] in ON_CUDA_TOO:
        metafunc.parametrize("device", DEVICES, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest hands the items of all folders to each conftest
    own = [item for item in items if item.path.is_relative_to(HERE)]
    leave_to_slow_tests(own)
    for item in own:
        if isinstance(item, pytest.Function) and _needs_one_gpu(item):
            item.add_marker(pytest.mark.one_gpu)


def _needs_one_gpu(item: pytest.Function) -> bool:
    """Whether a test compares a run of one rank on a GPU that needs no run of more."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    case = given.get("case")
    return (
        given.get("device") == "cuda"
        and isinstance(case, Case)
        and case.ranks == 1
        and case.resumed != "other"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-write", action="store_true", help="write the measured deviations into docs/evidence/"
    )


def _row(test: pytest.TestReport) -> dict[str, str] | None:
    row = dict(test.user_properties).get("parity")
    if not isinstance(row, dict) or test.when != "call" or f", steps {SHORT}" in row["case"]:
        return None
    is_real = torch.cuda.is_available() and "EMULATED_CUDA" not in os.environ
    on_gpu = "on a GPU" if is_real else "on an emulated GPU"
    return row | {"section": f"{row['section']}, {on_gpu}"} if "[cuda-" in test.nodeid else row


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """With -v, print what a case measured next to its verdict."""
    row = _row(report)
    if row is None or hasattr(report, "wasxfail"):
        return None
    numbers = "  ".join(
        f"{name.strip()} {value}" for name, value in row.items() if name not in ("section", "case")
    )
    return (
        report.outcome,
        {"passed": ".", "failed": "F"}.get(report.outcome, "?"),
        f"{report.outcome.upper()}  {numbers}",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [
        report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])
    ]
    rows = [row for report in reports if (row := _row(report)) is not None]
    is_written = config.getoption("--parity-write", default=False)
    if not rows or (not is_written and config.get_verbosity() < 1):
        return
    terminalreporter.section("parity")
    for line in summary(rows):
        terminalreporter.write_line(line)
    if is_written:
        EVIDENCE.write(Results(installed("torch", "transformers", "accelerate"), rows))
