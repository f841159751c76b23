"""Everything that waits for a GPU, in order of worth, in one command and 25 minutes: `scripts/gpu-day`.

    scripts/gpu-day --output DIR                   what DIR has no result of yet; DIR/report.md is written anew after every part
    scripts/gpu-day --output DIR --part memory     this part alone (again: more)
    scripts/gpu-day --output DIR --again memory    this part once more (again: more)
    python -m tests.cuda scripts/gpu-day --output DIR    all of it small, on an emulated GPU: that it can run

Each part is a command with a time limit and leaves DIR/NAME.json, so that the same command continues after a kill, a crash of the machine
or the end of the time. A part that fails or hangs is a line of the report, and the next one begins.

PYTHON names the interpreter: a GPU machine has its own torch, and the rest travels as wheels on PYTHONPATH (`gpu.py` says how; `--needs`
lists what is missing).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gpu
import gpu_day_report

MINUTES = 25.0
LEAST_SECONDS = 20.0
"""With less time left no part begins."""
TAIL_LINES = 60
PYTEST = ("-m", "pytest", "-p", "tests.gpu.failures", "-p", "no:cacheprovider", "-W", "default")  # another version may warn
WORKERS_AT_MOST = 8
"""Of pytest in a part that checks numbers: each holds a context of the device, half a GiB."""


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    what: str
    command: tuple[str, ...]
    """Arguments of Python, from the root of the repository."""
    limit_seconds: float
    measures: bool = True
    """False: it checks numbers, and says nothing of speed."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a part ended: `ended` is "passed" or says why not."""

    command: str
    ended: str
    seconds: float
    limit_seconds: float
    is_complete: bool
    """False: the next call runs it again."""
    tail: list[str]


def tasks_of_a_day(output: Path, patience: float, *, tiny: bool) -> list[Task]:
    """`patience`: how many times as long as on a GPU each part may take."""
    from gpu_parts import PARTS

    parts = {part.name: part for part in PARTS}

    def benchmark(name: str) -> Task:
        part = parts[name]
        own = (
            "--part",
            name,
            "--output",
            str(folder_of(output, name)),
            "--seconds",
            f"{part.budget_seconds * patience - 15:.0f}",
            "--patience",
            f"{patience:g}",
        )
        return Task(name, part.what, ("benchmarks/gpu.py", *own, *(["--tiny"] if tiny else [])), part.budget_seconds * patience)

    pytest = (*PYTEST, "-n", str(max(1, min(WORKERS_AT_MOST, (os.cpu_count() or 1) // 2))), "--dist", "load")
    return [
        Task(
            "kernels",
            "Kernels and the device's own code give right numbers.",
            (*pytest, "-m", "gpu", "-v", "tests/gpu"),
            280 * patience,
            measures=False,
        ),
        Task(
            "parity",
            "Runs of one rank follow a plain loop on the CPU: strategies, packing, compilation, fp8, 4 bits, adapters, optimizers.",
            (*pytest, "-m", "one_gpu", "-v", "tests/parity"),
            240 * patience,
            measures=False,
        ),
        *map(benchmark, ("ceilings", "recipe", "memory", "switches", "adapters", "long rows", "bare", "offload")),
    ]


def folder_of(output: Path, name: str) -> Path:
    return output / name.replace(" ", "-")


# ---- One part, or several side by side


def run_tasks(tasks: Sequence[Task], output: Path, seconds: float) -> list[Result]:
    """Run all tasks at the same time, each until its own limit or `seconds`. A task that `seconds` ended is incomplete."""
    from fsdp_tune.core.processes import ends_with_parent

    began = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    found: dict[str, Result] = {}
    try:
        for task in tasks:
            with _log(output, task).open("wb") as out:
                command = ends_with_parent([sys.executable, *task.command])
                running.append(
                    subprocess.Popen(command, cwd=gpu.ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
                )
        while len(found) < len(tasks):
            time.sleep(0.05)
            for task, process in zip(tasks, running, strict=True):
                if task.name not in found and (result := _ended(task, process, time.monotonic() - began, seconds)) is not None:
                    _kill(process)
                    tail = _log(output, task).read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
                    found[task.name] = replace(result, tail=tail)
    finally:
        for task, process in zip(tasks, running, strict=False):  # fewer run where one could not start
            if task.name not in found:
                _kill(process)
    return [found[task.name] for task in tasks]


def _ended(task: Task, process: subprocess.Popen[bytes], took: float, seconds: float) -> Result | None:
    limit, code = min(task.limit_seconds, seconds), process.poll()
    if code is None and took < limit:
        return None
    said = f"killed: its {limit:.0f} s were up" if code is None else "passed" if code == 0 else f"failed: exit code {code}"
    return Result(shlex.join([sys.executable, *task.command]), said, took, limit, code is not None or limit == task.limit_seconds, [])


def _log(output: Path, task: Task) -> Path:
    return folder_of(output, task.name).with_suffix(".log")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- All of them


def results(tasks: Sequence[Task], output: Path) -> dict[str, Result]:
    files = {task.name: folder_of(output, task.name).with_suffix(".json") for task in tasks}
    return {name: Result(**json.loads(file.read_text(encoding="utf-8"))) for name, file in files.items() if file.exists()}


def play(tasks: Sequence[Task], output: Path, setting: dict[str, Any], *, minutes: float = MINUTES, again: Sequence[str] = ()) -> bool:
    """Run what has no complete result in `output` yet, and return whether all parts passed. `setting` is what `setting_of` found."""
    from fsdp_tune.core.atomic import write_file, write_json

    began = time.monotonic()
    found = results(tasks, output)
    wanted = [task for task in tasks if task.name not in found or not found[task.name].is_complete or task.name in again]
    checks = [task for task in wanted if not task.measures]  # they may share the device, and nothing else runs beside a measurement
    for together in [*([checks] if checks else []), *([task] for task in wanted if task.measures)]:
        left = 60 * minutes - (time.monotonic() - began)
        if left < LEAST_SECONDS:
            break
        for task, result in zip(together, run_tasks(together, output, left), strict=True):
            found[task.name] = result
            print(f"{task.name}: {result.ended}, {result.seconds:.0f} s", flush=True)
            write_json(folder_of(output, task.name).with_suffix(".json"), asdict(result))
        write_file(output / "report.md", gpu_day_report.markdown(setting, tasks, found, output))
    write_file(output / "report.md", gpu_day_report.markdown(setting, tasks, found, output))
    return all(task.name in found and found[task.name].ended == "passed" for task in tasks)


def setting_of(output: Path) -> dict[str, Any]:
    """What all results of a folder have in common. SystemExit where the folder has results of another device or version."""
    from gpu_runs import find_device

    with tempfile.TemporaryDirectory(prefix="gpu-day-") as place:
        facts, _ = find_device(Path(place))
    facts.pop("free_gib")
    setting = {"commit": gpu.commit(), "versions": gpu.versions(), "device": facts | {"emulated": gpu.IS_EMULATED}}
    file = output / "setting.json"
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8"))) != setting:
        raise SystemExit(f"{output} has results of another day: {before}, and here is {setting}. Name another folder.")
    output.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(setting, indent=1), encoding="utf-8")
    return setting


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder of the results and of report.md")
    parser.add_argument("--part", action="append", default=[], metavar="PART", help="only this part; may be given again")
    parser.add_argument("--again", action="append", default=[], metavar="PART", help="run this part although it has a result")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for this call, of a GPU's time")
    parser.add_argument(
        "--patience", type=float, default=gpu.CPU_PATIENCE, help="times all limits on an emulated GPU; a busy machine needs more"
    )
    parser.add_argument("--needs", action="store_true", help="print the packages that are missing here, and end")
    options = parser.parse_args(arguments)
    if options.needs:
        print(" ".join(gpu.missing_packages()) or "nothing is missing")
        return 0
    if options.output is None:
        parser.error("--output DIR is needed")
    output = options.output.resolve()
    gpu.prepared_environment("cuda", tiny=gpu.IS_EMULATED)
    patience = options.patience if gpu.IS_EMULATED else 1.0
    tasks = tasks_of_a_day(output, patience, tiny=gpu.IS_EMULATED)
    if unknown := sorted({*options.again, *options.part} - {task.name for task in tasks}):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(task.name for task in tasks)}")
    tasks = [task for task in tasks if not options.part or task.name in options.part]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part at work is ended too
    passed = play(tasks, output, setting_of(output), minutes=options.minutes * patience, again=options.again)
    print(output / "report.md")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
