"""`benchmarks/gpu.py`: its report from hand-written rows, failing and slow parts, and (slow) a full run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def document(**parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": "benchmarks/gpu.py --output out",
        "commit": "abc1234",
        "versions": {"torch": "2.11.0"},
        "device": {"name": "NVIDIA H200"},
        "planned_for": "H200",
        "tiny": False,
        "limit_seconds": 520.0,
        "seconds": 100.0,
        "parts": {name: {"rows": rows, "seconds": 10.0, "reason": None} for name, rows in parts.items()},
    }


def test_report_has_figures_reasons_and_request(tmp_path: Path) -> None:
    import gpu_report
    from gpu_parts import PARTS

    good = gpu_report.with_errors(
        {"name": "1B", "fits": "yes", "predicted_allocated_gib": 11.0, "allocated_gib": 10.0, "step_seconds": 0.5, "mfu": 0.5}
    )
    refused = gpu_report.with_errors({"name": "8B", "fits": "no", "predicted_allocated_gib": 90.0, "reason": "out of memory | on the card"})
    ran = gpu_report.with_errors({"name": "3B", "fits": "no", "predicted_allocated_gib": 99.0, "allocated_gib": 100.0})
    best = {"name": "Llama 8B", "mfu": 0.513, "tokens_per_second": 9876.0, "because": "the fastest of 3"}
    found = document(memory=[good, refused, ran], recipe=[best], bare=[{"name": "ours", "speed_over_bare": 0.991}])
    gpu_report.write(found, PARTS, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "gpu.json").read_text()) == found
    text = (tmp_path / "new" / "gpu.md").read_text()
    assert "| 1B | yes | 0.500 | 50.0% | 11.00 | 10.00 | +10.0% |  |" in text
    assert "| 8B | no |  |  | 90.00 |  |  | out of memory \\| on the card |" in text
    assert "tokens/s" not in text.split("## memory")[1], "a column without a figure is left out"
    assert "- Llama 8B: MFU 51.3% (asked: 50 %, aim 55 %), 9,876 tokens/s" in text
    assert "- ours runs at 0.991 of the loop by hand (asked: 0.98)" in text
    assert "- plan's allocated memory: median 5.5% off, at most 10.0%, 2 runs" in text
    assert "- plan said that these do not fit, and they ran: 3B" in text
    assert text.count("Not run.") == len(PARTS) - 3


def test_toy_figures_are_not_reported_as_results(tmp_path: Path) -> None:
    import gpu_report
    from gpu_parts import PARTS

    found = document(recipe=[{"name": "Llama 8B", "mfu": 0.5, "tokens_per_second": 1.0}]) | {"tiny": True}
    assert gpu_report.summary(found) == []
    assert "no figure here says anything about a GPU" in gpu_report.markdown(found, PARTS)


class NoBench:
    """Of a part that starts no run."""

    tiny = True

    def __init__(self) -> None:
        self.run = type("Run", (), {"left": None})()


def two_rows_and_then(what: str) -> Any:
    def rows(_bench: Any) -> Iterator[dict[str, Any]]:
        yield {"name": "one"}
        yield {"name": "two"}
        if what == "raises":
            raise RuntimeError("it broke")
        if what == "dies":
            import os

            os._exit(7)
        if what == "hangs":
            time.sleep(600)

    return rows


@pytest.mark.parametrize(
    ("what", "reason"),
    [("ends", None), ("raises", "RuntimeError: it broke"), ("dies", "its process ended with code 7"), ("hangs", "its 1 s were up")],
)
def test_failed_part_keeps_its_rows_and_the_reason(what: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu
    from gpu_parts import Part

    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.3)
    found: dict[str, Any] = {"rows": [], "seconds": 0.0, "reason": None}
    noted: list[int] = []
    gpu.run_part(Part("p", "", 9, two_rows_and_then(what), ()), NoBench(), 1.0, found, lambda: noted.append(len(found["rows"])))
    assert found["rows"] == [{"name": "one"}, {"name": "two"}]
    assert found["reason"] == reason
    assert noted == [1, 2], "written down after every row"


def test_failed_or_slow_job_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_runs

    monkeypatch.setattr(gpu_runs, "probe", lambda _job: sys.exit("no card"))
    job = {"kind": "probe", "device": "cuda", "result": str(tmp_path / "r"), "log": str(tmp_path / "log")}
    assert gpu_runs.run_job(job, 30.0, forks=True).reason == "exit code 1: SystemExit: no card"
    monkeypatch.setattr(gpu_runs, "probe", lambda _job: time.sleep(600))
    assert gpu_runs.run_job(job, 0.5, forks=True).reason == "killed after 0 s"


def test_rows_are_full_and_learnable(tmp_path: Path) -> None:
    import gpu_runs

    from fsdp_tune.data.store import RowStore

    assert gpu_runs.example_lengths(64, 3) == [10, 21, 33]
    store = RowStore(gpu_runs.write_rows(tmp_path, 64, 5, 100, examples=3) / "train")
    assert [store[index].lengths for index in range(len(store))] == [(10, 21, 33)] * 5
    first = store[0].input_ids[:10].astype(int)
    assert len(set((first[1:] - first[:-1]) % 100)) == 1


@pytest.mark.slow
@pytest.mark.ranks
def test_every_part_runs_on_the_cpu(tmp_path: Path, repository: Path) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "gpu.py"), "--output", str(tmp_path), "--device", "cpu", "--tiny"]
    done = subprocess.run([*command, "--seconds", "900"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: part["reason"] for name, part in parts.items() if part["reason"]} == {}
    without = {row["name"]: row["reason"] for part in parts.values() for row in part["rows"] if row.get("reason")}
    assert all(reason.startswith("not available: ") for reason in without.values()), without
    assert sum(len(part["rows"]) for part in parts.values()) - len(without) >= 20
