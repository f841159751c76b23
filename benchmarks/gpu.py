"""Everything that a single GPU can show, in one command and under nine minutes: speed, memory against `plan`, kernels, numbers.

    python benchmarks/gpu.py --output DIR                        DIR/gpu.json and DIR/gpu.md, written anew after every row
    python benchmarks/gpu.py --output DIR --part memory          one part (again: more)
    python benchmarks/gpu.py --output DIR --device cpu --tiny    every part that a CPU can play, with toys: that it can run
    python -m tests.cuda python benchmarks/gpu.py --output DIR --tiny    the same on an emulated GPU

Parts go by value, each in a process of its own with a time of its own; what is out of memory, crashes or hangs is a row with its reason.
`--seconds` bounds the whole: where it is too little, each part has its share.

A GPU machine has its own torch (2.11 or later), transformers and accelerate; without a network the rest travels as wheels. There, from
the root of this repository, with the wheels in WHEELS:

    python3 -m pip install -q --no-index --no-deps --target /tmp/site WHEELS/*.whl
    PYTHONPATH=$PWD:/tmp/site python3 benchmarks/gpu.py --output OUT

`--needs` prints the packages of pyproject.toml that the Python at hand lacks; what these need in turn travels too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 520.0
GRACE_SECONDS = 15.0
"""After its time is up, a part may still write down what it has."""
CPU_PATIENCE = 4.0
"""Times the budgets, which are for a GPU's machine."""
IS_EMULATED = "EMULATED_CUDA" in os.environ
VERSIONS = ("torch", "transformers", "accelerate", "peft", "torchao", "flash-attn", "liger-kernel", "triton")


def missing_packages() -> list[str]:
    """Names in `dependencies` of pyproject.toml, and what the tests for a GPU need, that are not installed here."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [requirement.split(">")[0].split("=")[0].strip() for requirement in wanted]
    return [name for name in [*names, "pytest", "hypothesis", "torchao"] if _version(name) is None]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    return {name: found for name in VERSIONS if (found := _version(name))} | {"Python": sys.version.split()[0]}


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


# ---- One part in its process


def play(part: Any, bench: Any, pipe: Connection) -> None:
    """In the part's process: sends each row as it comes, and at the end None, or why there are no more."""
    from gpu_report import with_errors

    from fsdp_tune.core.parent_death import die_with_parent

    os.setpgid(0, 0)
    die_with_parent()
    reason: str | None = None
    try:
        for row in part.rows(bench):
            pipe.send(row if bench.tiny else with_errors(row))
    except Exception as error:  # noqa: BLE001  a broken part is a line of the report, and the next one begins
        sys.stderr.write(traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
    finally:
        if "tracing" in vars(bench):
            bench.tracing.close()
    pipe.send({"ended": reason})


def run_part(part: Any, bench: Any, seconds: float, found: dict[str, Any], note: Callable[[], None]) -> None:
    """Fills `found` with the rows of the part, which is killed when its time is long up; `note` after each."""
    started = time.monotonic()
    bench.run.left = lambda: started + seconds - time.monotonic()
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=play, args=(part, bench, writer))
    process.start()
    writer.close()
    try:
        while True:
            if not reader.poll(max(0.0, started + seconds + GRACE_SECONDS - time.monotonic())):
                found["reason"] = f"its {seconds:.0f} s were up"
                break
            row = reader.recv()
            if "ended" in row:
                found["reason"] = row["ended"]
                break
            found["rows"].append(row)
            found["seconds"] = time.monotonic() - started
            note()
    except EOFError:
        process.join(GRACE_SECONDS)
        found["reason"] = f"its process ended with code {process.exitcode}"
    end(process)
    found["seconds"] = time.monotonic() - started


def end(process: BaseProcess) -> None:
    process.join(1.0)
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)  # what it started dies with it
        process.join()


# ---- The command


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="directory of gpu.json and gpu.md")
    parser.add_argument("--part", action="append", help="only this part; may be given again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toys; what a CPU and an emulated GPU need")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="for everything")
    parser.add_argument("--patience", type=float, default=CPU_PATIENCE, help="times the budgets of parts under --tiny")
    parser.add_argument("--needs", action="store_true", help="print the packages that are missing here, and end")
    options = parser.parse_args(arguments)
    if options.output is None and not options.needs:
        parser.error("--output DIR is needed")
    if (options.device == "cpu" or IS_EMULATED) and not options.tiny:
        parser.error("a CPU and an emulated GPU play toys: --tiny")
    return options


def prepared_environment(device: str, *, tiny: bool) -> None:
    """Before torch is imported, here and in every process that is started here; as the launcher sets it."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode of the wheels each process compiles them again
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of numpy do not survive a fork
    if device == "cuda":
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if tiny:
        os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))  # the models of tests/gpu


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    options = options_of(arguments)
    if options.needs:
        print(" ".join(missing_packages()) or "nothing is missing")
        return 0
    prepared_environment(options.device, tiny=options.tiny)
    import gpu_report
    from gpu_parts import PARTS, Bench
    from gpu_runs import Runner, find_device, warm_up

    from fsdp_tune.core.gpus import detect, find_hardware

    unknown = sorted(set(options.part or []) - {part.name for part in PARTS})
    if unknown:
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    warm_up()
    with tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as place:
        folder = Path(place)
        facts, forks = ({"name": "a CPU"}, True) if options.device == "cpu" else find_device(folder)
        known = None if options.device == "cpu" else detect(facts["name"])
        hardware = known or find_hardware("A100-80GB")
        document: dict[str, Any] = {
            "command": shlex.join(["benchmarks/gpu.py", *(sys.argv[1:] if arguments is None else arguments)]),
            "commit": commit(),
            "versions": versions(),
            "device": facts | {"emulated": IS_EMULATED},
            "forks": forks,
            "planned_for": hardware.name if known or options.tiny else f"{hardware.name}, because {facts['name']} is not in the table",
            "tiny": options.tiny,
            "limit_seconds": options.seconds,
            "seconds": 0.0,
            "parts": {},
        }

        def note() -> None:
            document["seconds"] = time.monotonic() - began
            gpu_report.write(document, PARTS, options.output)

        wanted = [part for part in PARTS if not options.part or part.name in options.part]
        for number, part in enumerate(wanted):
            left = options.seconds - GRACE_SECONDS - (time.monotonic() - began)
            found = document["parts"][part.name] = {"rows": [], "seconds": 0.0, "reason": None}
            if left < GRACE_SECONDS:
                found["reason"] = "not begun: no time was left"
            else:
                own = folder / part.name
                own.mkdir()
                patience = options.patience if options.tiny else 1.0
                run = Runner(own, options.device, None if options.device == "cpu" else facts["name"], forks, left=lambda: 0.0)
                run.at_most_seconds *= patience
                share = part.budget_seconds / sum(each.budget_seconds for each in wanted[number:])
                seconds = min(part.budget_seconds * patience, share * left)
                run_part(part, Bench(run, hardware, tiny=options.tiny), seconds, found, note)
            note()
            reasons = sum(1 for row in found["rows"] if row.get("reason"))
            print(f"{part.name}: {len(found['rows']) - reasons} rows, {reasons} without figures, {found['seconds']:.0f} s", flush=True)
        print(json.dumps(gpu_report.summary(document), indent=1, ensure_ascii=False))
    print(f"{options.output / gpu_report.MARKDOWN_NAME}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
