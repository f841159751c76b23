"""What a GPU must be rented for, in order of worth, in minutes: `scripts/gpu-day`.

    scripts/gpu-day --plan-for H200 --output HOME             without a GPU: the plans of all measurements, which cost no paid minute
    scripts/gpu-day --wheels WHEELS --python 3.12             without a GPU: the wheels that a machine with torch and transformers lacks
    scripts/gpu-day --minutes 9 --from HOME --output OUT      on the machine
    scripts/gpu-day --minutes 9 --from OUT --output OUT2      on the next machine of the kind: continues
    python -m tests.cuda scripts/gpu-day --output OUT         all parts with toys, on an emulated GPU: that they can run

A part has at most 90 s, and each of its rows is written as soon as it is measured, to OUT/day.json and
OUT/report.md, which are all that must come back. A row that is out of memory, crashes or hangs keeps its
reason; the row that the end of the time cut is measured by the next call. `--part NAME` (again: more) runs
only these, `--again NAME` repeats one.

PYTHON names the interpreter: a GPU machine has its own torch (2.11 or later), transformers and accelerate.
The rest travels as wheels:

    python3 -m pip install -q --no-index --no-deps --target /tmp/site WHEELS/*.whl
    PYTHON=python3 PYTHONPATH=$PWD:/tmp/site scripts/gpu-day --minutes 9 --from HOME --output OUT
"""  # noqa: E501

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import gpu_state
from gpu_machine import IS_EMULATED, prepare_environment

MINUTES = 9.0
GRACE_SECONDS = 15.0
"""After its time is up, a part may still write what it has; and the last seconds of a call, for its
report."""
LEAST_SECONDS = 15.0
"""With less time left no part begins."""
PATIENCE = 4.0
"""Times all limits on an emulated GPU."""


def play(part: Any, bench: Any, pipe: Connection) -> None:
    """Run a part in its own process. Sends each row when it is measured, and the reason when the part
    ends."""
    from gpu_runs import TimeIsUp

    from fsdp_tune.core.parent_death import die_with_parent

    os.setpgid(0, 0)
    die_with_parent()
    ended: dict[str, Any] = {"ended": None, "is_complete": True}
    try:
        for row in part.rows(bench):
            pipe.send(row)
    except TimeIsUp as cut:
        ended = {"ended": str(cut), "is_complete": False}
    except Exception as error:  # noqa: BLE001  a broken part is a line of the report, and the next one begins
        sys.stderr.write(traceback.format_exc())
        ended |= {"ended": f"{type(error).__name__}: {error}", "message": traceback.format_exc()}
    finally:
        bench.close()
    pipe.send(ended)


def run_part(part: Any, bench: Any, seconds: float, found: dict[str, Any], note: Callable[[], None]) -> None:
    """Fill `found` with the rows of the part, which is killed when its time is long up; `note` after each."""
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
                ended: dict[str, Any] = {"ended": f"its {seconds:.0f} s were up", "is_complete": False}
                break
            row = reader.recv()
            if "ended" in row:
                ended = row
                break
            gpu_state.add_row(found, row)
            note()
    except (EOFError, OSError):  # OSError: in the middle of a row
        process.join(GRACE_SECONDS)
        # from outside: the next call continues it
        was_killed = process.exitcode in (
            -signal.SIGKILL,
            -signal.SIGTERM,
        )
        ended = {"ended": f"its process ended with code {process.exitcode}", "is_complete": not was_killed}
    except BaseException:  # the call is ended
        end(process, 0.0)
        raise
    end(process)
    found |= ended | {"seconds": found["seconds"] + time.monotonic() - started}


def end(process: BaseProcess, patience_seconds: float = 1.0) -> None:
    process.join(patience_seconds)
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)  # what it started dies with it
        # in a call of the driver it cannot be ended, and the others still have their time
        process.join(GRACE_SECONDS)


def run_parts(
    parts: Sequence[Any],
    day: dict[str, Any],
    make_bench: Callable[[Any, frozenset[str]], Any],
    output: Path,
    ends_at: float,
    times: float,
) -> None:
    """Run what has no complete result in `day` yet, until the monotonic time `ends_at`. `times`: the limits
    of the parts are for a GPU."""
    for part in parts:
        found = day["parts"].setdefault(part.name, gpu_state.empty_part())
        left = ends_at - time.monotonic()
        if found["is_complete"]:
            continue
        if left < LEAST_SECONDS:
            break
        before = len(gpu_state.measured(found))
        bench = make_bench(part, gpu_state.measured(found))
        run_part(
            part, bench, min(part.budget_seconds * times, left), found, lambda: gpu_state.write(day, output)
        )
        rows = gpu_state.measured(found)
        print(
            f"{part.name}: {len(rows) - before} rows more, {found['seconds']:.0f} s; "
            f"{found['ended'] or 'complete'}",
            flush=True,
        )
        gpu_state.write(day, output)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder of day.json and report.md")
    parser.add_argument(
        "--from", type=Path, dest="earlier", metavar="DIR", help="folder of an earlier call, to be continued"
    )
    parser.add_argument("--plan-for", metavar="GPU", help="only plan for this GPU; starts nothing")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="only download the wheels that a GPU machine lacks"
    )
    parser.add_argument(
        "--python",
        default=f"{sys.version_info.major}.{sys.version_info.minor}",
        help="version of that machine's Python",
    )
    parser.add_argument(
        "--part", action="append", default=[], metavar="PART", help="only this part; may be given again"
    )
    parser.add_argument(
        "--again", action="append", default=[], metavar="PART", help="measure this part again"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call, its start included")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        help="times all limits on an emulated GPU; a busy machine needs more",
    )
    parser.add_argument("--tiny", action="store_true", help="toys, as on an emulated GPU")
    options = parser.parse_args(arguments)
    if options.output is None and options.wheels is None:
        parser.error("--output DIR is needed")
    from gpu_parts import PARTS

    if unknown := sorted({*options.again, *options.part} - {part.name for part in PARTS}):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    options = options_of(arguments)
    if options.wheels is not None:
        from gpu_machine import download_wheels

        return download_wheels(options.wheels, options.python)
    tiny = options.tiny or IS_EMULATED
    prepare_environment(tiny=tiny)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part at work is ended too
    from gpu_parts import PARTS, Bench
    from gpu_runs import PlansOnly, Runner, find_device, warm_up

    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.core.gpus import detect, find_hardware

    times = options.patience if tiny else 1.0
    output = options.output.resolve()
    day = gpu_state.read(output, options.earlier)
    gpu_state.forget(day, options.again)
    parts = [part for part in PARTS if not options.part or part.name in options.part]
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as place:
        folder = Path(place)
        if options.plan_for is not None:
            try:
                hardware = find_hardware(options.plan_for)
            except FsdpTuneError as error:
                raise SystemExit(
                    f"--plan-for: {error.problems[0].message}. {error.problems[0].hint}"
                ) from error
            gpu_state.plan_for(day, hardware.name)
            planner = PlansOnly(folder, hardware.device_names[0])
            for part in (part for part in parts if part.has_plans):
                with Bench(planner, hardware, tiny, plans_ahead=True) as bench:
                    for row in part.rows(bench):
                        gpu_state.add_plan(day["parts"].setdefault(part.name, gpu_state.empty_part()), row)
                gpu_state.write(day, output)
            return 0
        warm_up()
        facts, forks = find_device(folder)
        hardware = detect(facts["name"]) or find_hardware("A100-80GB")
        gpu_state.begin_call(
            day, facts, hardware.name, options.minutes, tiny=tiny, start_seconds=time.monotonic() - began
        )

        def make_bench(part: Any, done: frozenset[str]) -> Any:
            own = folder / part.name
            own.mkdir()
            run = Runner(own, facts["name"], forks, at_most_seconds=Runner.at_most_seconds * times)
            return Bench(run, hardware, tiny, done=done, plans=gpu_state.plans(day, part.name))

        run_parts(parts, day, make_bench, output, began + 60 * options.minutes * times - GRACE_SECONDS, times)
        day["calls"][-1]["seconds"] = time.monotonic() - began
        gpu_state.write(day, output)
    print(output / gpu_state.REPORT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
