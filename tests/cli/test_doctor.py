"""`doctor`: healthy ranks raise no alarm, each planted fault is named, nothing is left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode
from tests.cli.conftest import Cli, document
from tests.cli.in_process import settings

pytestmark = [pytest.mark.e2e, pytest.mark.ranks]

READ_ONLY = """
import builtins, errno, os
plain = builtins.open
def refusing(file, mode="r", *arguments, **options):
    if "w" in mode and ".fsdp-tune-doctor-" in str(file):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))
    return plain(file, mode, *arguments, **options)
builtins.open = refusing
"""
FULL = """
import shutil
plain = shutil.disk_usage
shutil.disk_usage = lambda path: plain(path)._replace(free=4096)
"""
THROTTLED = """
import time, torch
plain = torch.mm
def slow(*arguments, **options):
    began = time.perf_counter()
    plain(*arguments, **options)
    time.sleep(0.4 * (time.perf_counter() - began) + 0.001)
torch.mm = slow
"""


def plant(folder: Path, fault: str, rank: int) -> str:
    """Return a PYTHONPATH in which one rank of the worker runs `fault` before anything else."""
    folder.mkdir()
    body = "\n".join(f"    {line}" for line in fault.strip().splitlines())
    (folder / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('RANK') == '{rank}':\n{body}\n", encoding="utf-8"
    )
    return str(folder)


def unhealthy(answer: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["state"] for check in answer["checks"] if check["state"] != "ok"}


def test_healthy_ranks_raise_no_alarm_and_nothing_is_left(cli: Cli, tmp_path: Path) -> None:
    done = cli("doctor", "--config", "gpt2_smoke", "--json")
    assert done.returncode == 0, done.stderr
    answer = document(done)
    alarms = unhealthy(answer)
    # other tests take the cores of one rank; test_doctor_checks.py holds this check
    alarms.pop("matrix product", None)
    assert alarms == {}
    assert {each["kind"] for each in answer["ranks"][0]["collectives"]} >= {"all_gather", "reduce_scatter"}
    assert [each["rank"] for each in answer["ranks"]] == [0, 1]
    assert {each["output"]["lock"] for each in answer["ranks"]} == {"works", "untested"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_read_only_directory_of_one_rank_fails_with_its_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = cli("doctor", "--config", "gpt2_smoke", PYTHONPATH=plant(tmp_path / "site", READ_ONLY, 1))
    assert done.returncode == ExitCode.FAILED
    assert "output directory: rank 1 on" in done.stderr
    assert "Read-only file system" in done.stderr
    assert "ok    matrix product" in done.stdout + done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_missing_data_fail_with_one_document(cli: Cli) -> None:
    done = cli(
        "doctor",
        "--config",
        "gpt2_smoke",
        *settings("data.train=[{path: ./gone.jsonl}]", "data.eval=null"),
        "--json",
    )
    assert done.returncode == ExitCode.FAILED
    answer = document(done)
    assert unhealthy(answer) == {"inputs": "fail"}
    assert [each["code"] for each in answer["errors"]] == ["doctor-failed"]
    assert "gone.jsonl" in answer["errors"][0]["message"]


@pytest.mark.slow
def test_full_disk_and_missing_data_are_reported_together(cli: Cli, tmp_path: Path) -> None:
    words = settings("data.train=[{path: ./gone.jsonl}]", "data.eval=null")
    done = cli(
        "doctor", "--config", "gpt2_smoke", *words, "--json", PYTHONPATH=plant(tmp_path / "site", FULL, 0)
    )
    assert done.returncode == ExitCode.FAILED
    answer = document(done)
    assert unhealthy(answer) == {"space": "fail", "inputs": "fail"}
    assert [each["code"] for each in answer["errors"]] == ["doctor-failed", "doctor-failed"]
    assert "gone.jsonl" in answer["errors"][1]["message"]


@pytest.mark.slow
def test_throttled_rank_is_named(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "doctor", "--config", "gpt2_smoke", "--json", PYTHONPATH=plant(tmp_path / "site", THROTTLED, 1)
    )
    (check,) = [each for each in document(done)["checks"] if each["name"] == "matrix product"]
    assert check["state"] in ("warn", "fail")
    assert check["finding"].startswith("rank 1 on ")


@pytest.mark.slow
def test_rank_that_dies_fails_with_its_last_line(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "doctor",
        "--config",
        "gpt2_smoke",
        PYTHONPATH=plant(tmp_path / "site", "import torch\ntorch.mm = None", 1),
    )
    assert done.returncode == ExitCode.FAILED
    assert "ranks: rank 1: TypeError" in done.stderr
