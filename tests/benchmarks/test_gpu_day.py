"""`scripts/gpu-day`: order, limits, resumption and report with cheap parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

SETTING: dict[str, Any] = {
    "commit": "abc1234",
    "versions": {"torch": "2.11.0"},
    "device": {"name": "NVIDIA H100", "emulated": False},
}


def task(name: str, code: str, limit_seconds: float = 60.0) -> Any:
    from gpu_day import Task

    return Task(name, f"What {name} is.", ("-c", code), limit_seconds)


def has_ended(pid: Path) -> bool:
    """Whether the process whose number is in the file is gone, or is within half a minute."""
    state, deadline = Path("/proc") / pid.read_text() / "stat", time.monotonic() + 30
    while state.exists() and ") Z " not in state.read_text():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def noting(tmp_path: Path, word: str) -> str:
    return f"open({str(tmp_path / 'order')!r}, 'a').write({word + ' '!r}); "


def test_parts_run_in_order_and_those_with_a_result_not_again(tmp_path: Path) -> None:
    from gpu_day import play

    tasks = [task(word, noting(tmp_path, word)) for word in ("one", "two", "three")]
    assert play(tasks, tmp_path, SETTING)
    assert (tmp_path / "order").read_text() == "one two three "
    assert play(tasks, tmp_path, SETTING, again=["two"])
    assert (tmp_path / "order").read_text() == "one two three two "


def test_failed_and_hung_parts_are_reported_and_the_next_begins(tmp_path: Path) -> None:
    from gpu_day import play, results

    pid = tmp_path / "pid"
    hangs = (
        f"import subprocess, time; child = subprocess.Popen(['sleep', '600']); open({str(pid)!r}, 'w').write(str(child.pid)); "
        f"{noting(tmp_path, 'hangs')}time.sleep(600)"
    )
    tasks = [
        task("fails", "import sys; print('no kernel for this card'); sys.exit(3)"),
        task("hangs", hangs, limit_seconds=2),
        task("good", noting(tmp_path, "good")),
    ]
    assert not play(tasks, tmp_path, SETTING)
    assert {name: result.ended for name, result in results(tasks, tmp_path).items()} == {
        "fails": "failed: exit code 3",
        "hangs": "killed: its 2 s were up",
        "good": "passed",
    }
    assert has_ended(pid), "what a hung part started outlives it"
    report = (tmp_path / "report.md").read_text()
    assert "| fails | failed: exit code 3 |" in report
    assert "no kernel for this card" in report
    assert "NVIDIA H100 (); commit abc1234; torch 2.11.0." in report
    assert (tmp_path / "order").read_text() == "hangs good "
    assert play(tasks[2:], tmp_path, SETTING)
    assert not play(tasks, tmp_path, SETTING), "what failed has a result, and it stays a failure"
    assert (tmp_path / "order").read_text() == "hangs good "


def test_what_the_time_cut_short_or_left_out_is_run_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_day

    monkeypatch.setattr(gpu_day, "LEAST_SECONDS", 1.0)
    quick = tmp_path / "quick"
    tasks = [
        task("slow", f"import pathlib, time; time.sleep(0 if pathlib.Path({str(quick)!r}).exists() else 600)"),
        task("last", noting(tmp_path, "last")),
    ]
    assert not gpu_day.play(tasks, tmp_path, SETTING, minutes=2 / 60)
    assert gpu_day.results(tasks, tmp_path)["slow"].ended == "killed: its 2 s were up"
    assert "| last | not begun: " in (tmp_path / "report.md").read_text()
    quick.touch()
    assert gpu_day.play(tasks, tmp_path, SETTING)
    assert (tmp_path / "order").read_text() == "last "


def test_killed_call_takes_its_part_with_it_and_is_continued(tmp_path: Path, repository: Path) -> None:
    import gpu_day

    going = tmp_path / "going"
    waiting = (
        f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
        f"[time.sleep(0.05) for _ in iter(lambda: pathlib.Path({str(going)!r}).exists(), True)]"
    )
    tasks = [task("one", noting(tmp_path, "one")), task("two", waiting)]
    commands = [(each.name, each.command) for each in tasks]
    code = (
        "from pathlib import Path; from gpu_day import Task, play; "
        f"play([Task(name, '', command, 60) for name, command in {commands!r}], Path({str(tmp_path)!r}), {SETTING!r})"
    )
    paths = os.pathsep.join([str(repository), str(repository / "benchmarks")])
    call = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths})
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert call.poll() is None
        time.sleep(0.05)
    call.send_signal(signal.SIGKILL)
    call.wait()
    assert has_ended(pid), "the part outlives the call"
    going.touch()
    assert gpu_day.play(tasks, tmp_path, SETTING)
    assert (tmp_path / "order").read_text() == "one "


def test_killed_tests_take_the_run_that_they_wait_for_with_them(tmp_path: Path, repository: Path) -> None:
    """It would take the GPU from whatever is run next."""
    test = "def test_one(train):\n    train(model={'from_config': LLAMA}, training={'max_steps': 10**6})\n"
    (tmp_path / "test_one.py").write_text(f"from tests.gpu.conftest import train\nfrom tests.gpu.models import LLAMA\n\n\n{test}")
    environment = os.environ | {"GPU_TEST_DEVICE": "cpu", "PYTHONPATH": str(repository)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "--basetemp",
        str(tmp_path / "temporary"),
    ]
    call = psutil.Popen([*command, str(tmp_path / "test_one.py")], env=environment, stdout=subprocess.DEVNULL)
    while not (runs := [child for child in call.children() if "train" in child.cmdline()]):
        assert call.poll() is None
        time.sleep(0.05)
    call.kill()
    call.wait()
    _, alive = psutil.wait_procs(runs, timeout=15)
    for process in (each for run in alive for each in (run, *run.children(recursive=True))):
        process.kill()
    assert alive == []


def test_folder_with_results_of_another_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_day
    import gpu_runs

    card = {"name": "NVIDIA H100"}
    monkeypatch.setattr(gpu_runs, "find_device", lambda _: ({**card, "free_gib": time.monotonic()}, True))
    assert gpu_day.setting_of(tmp_path) == gpu_day.setting_of(tmp_path)
    card["name"] = "NVIDIA A100"
    with pytest.raises(SystemExit, match=r"another day.*NVIDIA H100"):
        gpu_day.setting_of(tmp_path)


def test_a_day_has_25_minutes_and_parts_of_the_benchmark(tmp_path: Path) -> None:
    import gpu_day

    tasks = gpu_day.tasks_of_a_day(tmp_path, 1.0, tiny=False)
    assert sum(task.limit_seconds for task in tasks) <= 60 * gpu_day.MINUTES == 25 * 60
    assert len({task.name for task in tasks}) == len(tasks)
    assert not any("--tiny" in task.command for task in tasks)
    assert [task.name for task in tasks if not task.measures] == ["kernels", "parity"]


def test_report_of_passed_tests_is_what_pytest_summed_up() -> None:
    from gpu_day_report import of_passed

    parity = ["===== parity =====", "fp32: 9 cases  loss ≤ 1.0e-07", "===== 9 passed in 1s ====="]
    assert of_passed(["...", *parity]) == parity
    assert of_passed(["...", "===== short test summary info =====", "SKIPPED", "===== 8 passed ====="]) == ["===== 8 passed ====="]
    assert of_passed(["ceilings: 2 rows"]) == []


def test_report_has_the_rows_of_the_benchmark_and_calls_no_emulated_figure_a_measurement(tmp_path: Path) -> None:
    import gpu_day

    rows = [{"name": "Llama 8B", "mfu": 0.5, "tokens_per_second": 1234.0}]
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "gpu.json").write_text(json.dumps({"parts": {"recipe": {"rows": rows, "seconds": 9.0, "reason": None}}}))
    tasks = [task("recipe", "")]
    gpu_day.play(tasks, tmp_path, SETTING)
    real = (tmp_path / "report.md").read_text()
    assert "- Llama 8B: MFU 50.0% (asked: 50 %, aim 55 %), 1,234 tokens/s" in real
    assert "| Llama 8B | 1,234 | 50.0% |" in real
    gpu_day.play(tasks, tmp_path, SETTING | {"device": {"name": "NVIDIA H100", "emulated": True}})
    emulated = (tmp_path / "report.md").read_text()
    assert "asked: 50 %" not in emulated
    assert "Emulated: not a measurement." in emulated
    assert "NVIDIA H100, emulated on the CPU" in emulated
