"""`scripts/gpu-day`: order, limits, and a second call that continues, with cheap parts; (slow) all parts on
an emulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

FACTS: dict[str, Any] = {
    "name": "NVIDIA H100",
    "capability": [9, 0],
    "cuda": "13.0",
    "nccl": "2.28",
    "free_gib": 79.0,
    "total_gib": 80.0,
}


class Bench:
    """Of parts that start no run."""

    def __init__(self, done: frozenset[str] = frozenset()) -> None:
        self.done = done
        self.run = type("Run", (), {"left": None})()

    def close(self) -> None:
        pass


def part(name: str, rows: Callable[[Any], Iterator[dict[str, Any]]], budget_seconds: float = 60.0) -> Any:
    from gpu_parts import Part

    return Part(name, f"What {name} is.", budget_seconds, rows, (("name", "", ""), ("value", "value", "d")))


def counting(*names: str) -> Callable[[Any], Iterator[dict[str, Any]]]:
    def rows(bench: Any) -> Iterator[dict[str, Any]]:
        return ({"name": name, "value": 1} for name in names if name not in bench.done)

    return rows


def call(
    parts: list[Any], day: dict[str, Any], output: Path, seconds: float = 60.0
) -> dict[str, dict[str, Any]]:
    import gpu_day

    gpu_day.run_parts(parts, day, lambda _part, done: Bench(done), output, time.monotonic() + seconds, 1.0)
    return day["parts"]


def new_day() -> dict[str, Any]:
    return {"calls": [], "parts": {}}


def test_second_call_measures_only_what_has_no_row(tmp_path: Path) -> None:
    """The state is read from the results of the first: the second call is on another machine."""
    import gpu_runs
    import gpu_state

    def cut(bench: Any) -> Iterator[dict[str, Any]]:
        if "one" not in bench.done:
            yield {"name": "one", "value": 1}
            raise gpu_runs.TimeIsUp("the time of the part was up: killed after 3 s in phase loading")
        yield {"name": "two", "value": 2}

    found = call(
        [part("recipe", counting("a")), part("memory", cut), part("switches", counting("b"))],
        new_day(),
        tmp_path,
    )
    assert [(name, each["is_complete"]) for name, each in found.items()] == [
        ("recipe", True),
        ("memory", False),
        ("switches", True),
    ]
    assert "the time of the part was up: killed after 3 s" in (tmp_path / "report.md").read_text()
    day = gpu_state.read(tmp_path / "second", tmp_path)
    never = part("recipe", lambda _: pytest.fail("it has a result"))
    found = call([never, part("memory", cut), part("switches", counting("b"))], day, tmp_path / "second")
    assert found["memory"]["rows"] == [{"name": "one", "value": 1}, {"name": "two", "value": 2}]
    assert found["memory"]["is_complete"]
    assert sorted(file.name for file in (tmp_path / "second").iterdir()) == ["day.json", "report.md"], (
        "at most eight files come back"
    )


@pytest.mark.parametrize(
    ("what", "ended", "is_complete"),
    [
        pytest.param("raises", "RuntimeError: it broke", True, marks=pytest.mark.slow),
        ("dies", "its process ended with code 7", True),
        pytest.param("is killed", "its process ended with code -9", False, marks=pytest.mark.slow),
        ("hangs", "its 1 s were up", False),
    ],
)
def test_failed_or_hung_part_keeps_its_rows_and_the_next_begins(
    what: str, ended: str, is_complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_day

    monkeypatch.setattr(gpu_day, "GRACE_SECONDS", 0.3)
    pid = tmp_path / "pid"

    def rows(_bench: Any) -> Iterator[dict[str, Any]]:
        yield {"name": "one", "value": 1}
        if what == "raises":
            raise RuntimeError("it broke")
        if what == "dies":
            os._exit(7)
        if what == "is killed":
            os.kill(os.getpid(), 9)
        pid.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)

    limit = 1.0 if what == "hangs" else 60.0
    found = call([part(what, rows, limit), part("next", counting("a"))], new_day(), tmp_path)
    assert found[what]["rows"] == [{"name": "one", "value": 1}]
    assert (found[what]["ended"], found[what]["is_complete"]) == (ended, is_complete)
    assert found["next"]["is_complete"]
    if pid.exists():
        _, alive = psutil.wait_procs(
            [psutil.Process(int(pid.read_text()))] if psutil.pid_exists(int(pid.read_text())) else [],
            timeout=15,
        )
        assert alive == [], "what a hung part started outlives it"


def test_part_that_is_killed_in_the_middle_of_a_row_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_day

    def torn(_part: Any, _bench: Any, pipe: Any) -> None:
        os.write(pipe.fileno(), b"\0\0\1\0the beginning")
        os.kill(os.getpid(), 9)

    with monkeypatch.context() as patched:
        patched.setattr(gpu_day, "play", torn)
        found = call([part("one", counting("a"))], new_day(), tmp_path)
    assert (found["one"]["ended"], found["one"]["is_complete"]) == ("its process ended with code -9", False)


def test_tests_of_a_killed_part_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_tests

    import fsdp_tune.core.processes  # noqa: F401  with the real interpreter

    pid, program = tmp_path / "pid", tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 60\n")
    program.chmod(0o755)

    def rows(bench: Any) -> Iterator[dict[str, Any]]:
        def kill() -> None:
            while not (pid.exists() and pid.read_text().strip()):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)

        threading.Thread(target=kill, daemon=True).start()
        bench.run.folder = tmp_path
        return gpu_tests._tests(bench, "gpu", ["tests/gpu"])

    monkeypatch.setattr(sys, "executable", str(program))
    found = call([part("kernels", rows)], new_day(), tmp_path / "out")
    assert found["kernels"]["ended"] == "its process ended with code -9"
    left = [psutil.Process(int(pid.read_text()))] if psutil.pid_exists(int(pid.read_text())) else []
    _, alive = psutil.wait_procs(left, timeout=15)
    for each in alive:
        each.kill()
    assert alive == [], "it has a session of its own"


def test_call_ends_in_time_and_reports_what_it_left_out(tmp_path: Path) -> None:
    started = time.monotonic()
    found = call([part("one", counting("a")), part("two", counting("b"))], new_day(), tmp_path, seconds=3.0)
    assert time.monotonic() - started < 3.0
    assert not found["one"]["is_complete"], "less is left than a part needs"


def test_run_that_the_part_cuts_is_no_result_and_one_that_hangs_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run that was begun last would never be measured, or one that hangs would hold up all calls."""
    import gpu_runs

    monkeypatch.setattr(gpu_runs, "probe", lambda _job: time.sleep(600))
    monkeypatch.setattr(gpu_runs, "LEAST_SECONDS", 0.1)
    run = gpu_runs.Runner(tmp_path, "NVIDIA H100", forks=True, at_most_seconds=0.6)
    assert run.job("probe")["reason"].startswith("killed after 1 s")
    run.left = lambda: 0.3
    with pytest.raises(gpu_runs.TimeIsUp, match="killed after 0 s"):
        run.job("probe")
    run.left = lambda: 0.05
    with pytest.raises(gpu_runs.TimeIsUp):
        run.job("probe")


def test_failed_job_keeps_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_runs

    job = {"kind": "probe", "result": str(tmp_path / "r"), "log": str(tmp_path / "log")}
    monkeypatch.setattr(gpu_runs, "probe", lambda _job: sys.exit("no card"))
    assert gpu_runs.run_job(job, 30.0, forks=True).reason == "exit code 1: SystemExit: no card"
    monkeypatch.setattr(gpu_runs, "probe", lambda _job: os.kill(os.getpid(), 9))
    assert "is the host out of memory?" in str(gpu_runs.run_job(job, 30.0, forks=True).reason), (
        "not `killed` by this day"
    )


def test_killed_run_keeps_the_lines_of_its_steps(tmp_path: Path) -> None:
    import gpu_runs

    from fsdp_tune.run.directory import RunDir

    run = RunDir(tmp_path)
    line = {
        "loss": 2.0,
        "step_seconds": 0.5,
        "tokens_per_second_per_device": 100.0,
        "mfu": 0.4,
        "peak_allocated_gib": 3.0,
    }
    first = {"event": "first_step", "step": 1, "phase_seconds": {"loading the model": 1.234}}
    lines = [json.dumps(each) for each in (first, line, line)]
    run.metrics_jsonl.write_text("\n".join([*lines, '{"loss": 1']))
    (tmp_path / "log").write_text("the end of its log")
    row = gpu_runs.measured(tmp_path, "killed after 75 s in phase saving", tmp_path / "log").row()
    assert (row["step_seconds"], row["allocated_gib"], row["startup"]) == (
        0.5,
        3.0,
        {"loading the model": 1.23},
    )
    assert (row["reason"], row["message"]) == ("killed after 75 s in phase saving", "the end of its log")


def test_runs_of_a_day_save_nothing(tmp_path: Path) -> None:
    """A save copies weights and optimizer into locked host memory: 48 GB or more of an 8B model, after its
    last step."""
    import gpu_runs
    import plan_gpu

    from fsdp_tune.run.directory import RunDir
    from fsdp_tune.run.launch_files import ResumeRequest

    recipe = gpu_runs.resolved(
        plan_gpu.recipe_of(plan_gpu.SMALL[0], tmp_path), tmp_path / "recipe.json", "NVIDIA H100 80GB HBM3"
    )
    gpu_runs.write_run(recipe, tmp_path / "run", gpu_runs.write_rows(tmp_path, 64, 4, 384), 384)
    request = ResumeRequest.read(RunDir(tmp_path / "run").resume_json)
    assert request is not None
    assert not request.saves


def test_rows_are_full_and_learnable(tmp_path: Path) -> None:
    import gpu_runs

    from fsdp_tune.data.store import RowStore

    assert gpu_runs.example_lengths(64, 3) == [10, 21, 33]
    store = RowStore(gpu_runs.write_rows(tmp_path, 64, 5, 100, examples=3) / "train")
    assert [store[index].lengths for index in range(len(store))] == [(10, 21, 33)] * 5
    first = store[0].input_ids[:10].astype(int)
    assert len(set((first[1:] - first[:-1]) % 100)) == 1


def test_plans_made_ahead_are_joined_by_the_name_of_the_row(tmp_path: Path) -> None:
    import gpu_state

    day = new_day()
    ours = day["parts"]["p"] = gpu_state.empty_part()
    gpu_state.add_plan(ours, {"name": "1B", "fits": "yes", "predicted_allocated_gib": 11.0})
    assert gpu_state.measured(ours) == frozenset()
    assert gpu_state.plans(day, "p") == {"1B": {"fits": "yes", "predicted_allocated_gib": 11.0}}
    gpu_state.add_row(ours, {"name": "1B", **gpu_state.plans(day, "p")["1B"], "allocated_gib": 10.0})
    gpu_state.add_plan(ours, {"name": "1B", "fits": "yes", "predicted_allocated_gib": 12.0})
    assert ours["rows"] == [
        {"name": "1B", "fits": "yes", "predicted_allocated_gib": 12.0, "allocated_gib": 10.0}
    ]
    gpu_state.forget(day, ["p"])
    assert gpu_state.measured(day["parts"]["p"]) == frozenset()
    assert gpu_state.plans(day, "p")["1B"]["predicted_allocated_gib"] == 12.0


def test_results_of_another_device_or_plans_for_another_are_refused() -> None:
    import gpu_state

    day = new_day()
    gpu_state.begin_call(day, FACTS, "H100", 9.0, tiny=False, start_seconds=1.0)
    gpu_state.begin_call(
        day, FACTS | {"free_gib": 70.0, "total_gib": 79.9}, "H100", 9.0, tiny=False, start_seconds=1.0
    )
    assert len(day["calls"]) == 2, "another machine of the kind continues"
    with pytest.raises(SystemExit, match=r"another day.*NVIDIA H100"):
        gpu_state.begin_call(day, FACTS | {"name": "NVIDIA A100"}, "A100", 9.0, tiny=False, start_seconds=1.0)
    with pytest.raises(SystemExit, match="plans are those of H200"):
        gpu_state.begin_call(
            new_day() | {"planned_for": "H200"}, FACTS, "H100", 9.0, tiny=False, start_seconds=1.0
        )


def test_plans_of_another_gpu_or_of_other_code_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_state

    day = new_day()
    for code, gpu, is_refused in (
        ("a1", "H200", False),
        ("a1", "H200", False),
        ("a1", "H100", True),
        ("a1+changed", "H200", True),
    ):
        monkeypatch.setattr(gpu_state, "source", lambda here=code: here)
        with pytest.raises(SystemExit, match="another folder") if is_refused else nullcontext():
            gpu_state.plan_for(day, gpu)
    monkeypatch.setattr(gpu_state, "source", lambda: "b2")
    with pytest.raises(SystemExit, match="plans are those of a1"):
        gpu_state.begin_call(
            {"planned_for": "H100", "planned_by": "a1"}, FACTS, "H100", 9.0, tiny=False, start_seconds=1.0
        )


def test_folder_of_an_earlier_call_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    import gpu_state

    assert gpu_state.read(tmp_path, None) == new_day()
    with pytest.raises(SystemExit, match=r"--from: .*typo/day.json does not exist"):
        gpu_state.read(tmp_path, tmp_path / "typo")


def test_code_of_a_day_is_known_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_machine

    monkeypatch.setattr(gpu_machine, "ROOT", tmp_path)
    found = {gpu_machine.source()}
    for text in ("1", "2"):
        (tmp_path / "fsdp_tune").mkdir(exist_ok=True)
        (tmp_path / "fsdp_tune" / "a.py").write_text(text)
        found.add(gpu_machine.source())
    assert len(found) == 3


def test_order_and_limits_of_a_day() -> None:
    from gpu_parts import PARTS
    from plan_gpu import CASES

    names = [each.name for each in PARTS]
    assert names[:8] == [
        "recipe",
        "memory",
        "switches",
        "adapters",
        "bare",
        "unexplained",
        "long rows",
        "offload",
    ]
    assert all(each.budget_seconds <= 90 for each in PARTS)
    assert sum(each.budget_seconds for each in PARTS[:5]) <= 9 * 60 - 60, (
        "the first call has a minute to start, and reaches the bare loop"
    )
    assert len(CASES) == 8
    assert {case.model for case in CASES} == {"0.1B", "0.5B", "1B", "3B", "8B"}


def test_wheels_that_travel_are_what_a_machine_with_torch_lacks() -> None:
    from gpu_machine import travelling_packages

    names = {each.partition("==")[0] for each in travelling_packages()}
    assert {"peft", "pydantic-core", "typer", "torchao", "pytest-xdist", "liger-kernel", "xxhash"} <= names
    assert not names & {"torch", "transformers", "accelerate", "numpy", "tokenizers"}, (
        "they would replace those of the machine"
    )
    assert not names & {"datasets", "pyarrow", "pandas"}, "they are too large to carry"


def test_unexplained_tests_exist(repository: Path) -> None:
    from gpu_tests import UNEXPLAINED

    for name in UNEXPLAINED:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (repository / "tests" / "gpu" / file).read_text(), name


def test_report_has_figures_reasons_messages_and_request() -> None:
    import gpu_report
    import gpu_state
    from gpu_parts import PARTS

    day = new_day()
    gpu_state.begin_call(day, FACTS, "H100", 9.0, tiny=False, start_seconds=31.0)
    rows: dict[str, list[dict[str, Any]]] = {
        "memory": [
            {
                "name": "1B",
                "fits": "yes",
                "predicted_allocated_gib": 11.0,
                "allocated_gib": 10.0,
                "step_seconds": 0.5,
                "mfu": 0.5,
            },
            {
                "name": "8B",
                "fits": "no",
                "predicted_allocated_gib": 90.0,
                "reason": "out of memory | on the card",
            },
            {"name": "3B", "fits": "no", "predicted_allocated_gib": 99.0, "allocated_gib": 100.0},
        ],
        "recipe": [
            {"name": "Llama 8B", "mfu": 0.513, "tokens_per_second": 9876.0, "because": "the fastest of 3"}
        ],
        "bare": [{"name": "ours", "speed_over_bare": 0.991}],
        "unexplained": [
            {
                "name": "t",
                "outcome": "failed",
                "reason": "AssertionError",
                "message": "no kernel\nfor this card",
            }
        ],
    }
    for name, found in rows.items():
        day["parts"][name] = gpu_state.empty_part() | {"rows": found, "seconds": 9.0, "is_complete": True}
    text = gpu_report.markdown(day, PARTS)
    assert "| 1B | yes | 0.500 | 50.0% | 11.00 | 10.00 | +10.0% |  |" in text
    assert "| 8B | no |  |  | 90.00 |  |  | out of memory \\| on the card |" in text
    assert "tokens/s" not in text.split("## memory")[1].split("##")[0], (
        "a column without a figure is left out"
    )
    assert "- Llama 8B: MFU 51.3% (asked: 50 %, aim 55 %), 9,876 tokens/s" in text
    assert "- ours runs at 0.991 of the loop by hand (asked: 0.98)" in text
    assert "- plan's allocated memory: median 5.5% off, at most 10.0%, 2 runs" in text
    assert "- plan said that these do not fit, and they ran: 3B" in text
    assert "no kernel\nfor this card" in text
    assert "NVIDIA H100 (capability [9, 0], cuda 13.0, nccl 2.28); commit " in text
    assert "31 s before the first part" in text
    assert text.count(gpu_report.NOT_BEGUN) == len(PARTS) - len(rows)
    day["setting"]["tiny"] = True
    toys = gpu_report.markdown(day, PARTS)
    assert "asked: 50 %" not in toys
    assert "no figure here says anything about a GPU" in toys


def test_killed_tests_take_the_run_that_they_wait_for_with_them(tmp_path: Path, repository: Path) -> None:
    """It would take the GPU from whatever is run next."""
    test = "def test_one(train):\n    train(model={'from_config': LLAMA}, training={'max_steps': 10**6})\n"
    (tmp_path / "test_one.py").write_text(
        f"from tests.gpu.conftest import train\nfrom tests.gpu.models import LLAMA\n\n\n{test}"
    )
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


def test_tests_of_a_part_are_rows_with_their_messages(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\n\n"
        "def test_good(record_property): record_property('drift', 2)\n\n\n"
        "def test_bad(): assert 1 == 2, 'no kernel'\n\n\n"
        "def test_absent(): pytest.skip('no flash-attn')\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.gpu.failures",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": str(repository), "GPU_TEST_RESULTS": str(tmp_path / "rows")}
    environment.pop("PYTEST_XDIST_WORKER", None)
    subprocess.run(
        [*command, str(tmp_path / "test_one.py")], env=environment, stdout=subprocess.DEVNULL, check=False
    )
    good, bad, absent = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert (good["outcome"], good["measured"], "reason" in good) == ("passed", "drift 2", False)
    assert (bad["outcome"], "no kernel" in bad["reason"], "assert 1 == 2" in bad["message"]) == (
        "failed",
        True,
        True,
    )
    assert (absent["outcome"], "no flash-attn" in absent["reason"]) == ("skipped", True)


@pytest.mark.slow
@pytest.mark.ranks
def test_every_part_runs_on_an_emulated_gpu(tmp_path: Path, repository: Path) -> None:
    from tests.cuda.build import why_not
    from tests.cuda.environment import with_gpus

    if (reason := why_not()) is not None:
        pytest.skip(reason)
    day = [sys.executable, str(repository / "benchmarks" / "gpu_day.py")]
    plans = [*day, "--tiny", "--plan-for", "H100-SXM", "--output", str(tmp_path / "plans")]
    subprocess.run(plans, check=True, env=os.environ | {"PYTHONPATH": str(repository)})
    environment = with_gpus(1) | {"PYTHON": sys.executable}
    from gpu_parts import PARTS

    # these are tests, which other suites run
    parts = [each.name for each in PARTS if each.name not in ("kernels", "parity")]
    command = [*day, "--patience", "20", "--from", str(tmp_path / "plans"), "--output", str(tmp_path / "out")]
    subprocess.run(
        [*command, *(word for name in parts for word in ("--part", name))], check=True, env=environment
    )
    found = json.loads((tmp_path / "out" / "day.json").read_text())["parts"]
    assert {name: found[name]["ended"] for name in parts} == dict.fromkeys(parts)
    without = {
        row["name"]: row["reason"] for name in parts for row in found[name]["rows"] if row.get("reason")
    }
    assert all("installed" in reason for reason in without.values()), without
    assert all(row.get("predicted_allocated_gib") for row in found["memory"]["rows"])
