"""Traces many recipes for one import of torch: each in a process of its own, forked after the import.

    python -m fsdp_tune.trace.many < jobs.json

`jobs.json`: [{"recipe": …, "exact": false, "vocabulary": null, "output": "/cache/KEY.npz"}, …]. For each job, as it ends, one line:
{"job": 0, "problems": []}. A job whose model is refused has its problems there and writes no file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from fsdp_tune.errors import FsdpTuneError, Problem
from fsdp_tune.recipe.schema import Recipe

AT_ONCE = 2
"""A trace is bound by Python, and its host may have to prepare data meanwhile."""


def trace_one(job: dict[str, Any]) -> list[Problem]:
    """Writes the trace of one job; returns what kept it from that."""
    from fsdp_tune.trace.run import trace_recipe

    recipe = Recipe.model_validate(job["recipe"])
    try:
        trace = trace_recipe(recipe, exact=job["exact"], vocabulary=job["vocabulary"])
    except FsdpTuneError as error:
        return list(error.problems)
    except Exception as error:  # noqa: BLE001  what torch or the model's code does not take is this recipe's, not the whole search's
        traceback.print_exc()
        return [Problem("trace-failed", f"the step could not be traced: {type(error).__name__}: {str(error).splitlines()[0]}")]
    trace.save(Path(job["output"]))
    return []


def run_all(jobs: list[dict[str, Any]], at_once: int) -> None:
    importlib.import_module("fsdp_tune.trace.run")  # before the forks: the import is the long part
    running: dict[int, tuple[int, int]] = {}
    for index, job in enumerate(jobs):
        if len(running) >= at_once:
            _reap(running)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(job, writer)
        os.close(writer)
        running[child] = (index, reader)
    while running:
        _reap(running)


def _child(job: dict[str, Any], writer: int) -> None:
    code = 1
    try:
        with contextlib.redirect_stdout(sys.stderr), os.fdopen(writer, "w") as file:
            json.dump([problem.as_dict() for problem in trace_one(job)], file)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(running: dict[int, tuple[int, int]]) -> None:
    child, status = os.wait()
    index, reader = running.pop(child)
    with os.fdopen(reader) as file:
        text = file.read()
    crashed = Problem("trace-failed", f"the process that traced ended with status {os.waitstatus_to_exitcode(status)}")
    problems: list[dict[str, Any]] = json.loads(text) if text else [crashed.as_dict()]
    sys.stdout.write(json.dumps({"job": index, "problems": problems}) + "\n")
    sys.stdout.flush()


def main() -> None:
    run_all(json.load(sys.stdin), AT_ONCE)


if __name__ == "__main__":
    main()
