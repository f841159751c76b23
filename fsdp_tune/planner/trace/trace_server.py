"""Trace recipes for another process: torch is imported once, and each core has a worker whose torch caches
stay warm.

    python -m fsdp_tune.planner.trace.trace_server

A job is a line on stdin: {"job": 0, "recipe": …, "exact": false, "vocabulary": null, "output":
"/cache/KEY.npz"}. Its result is a line on stdout: {"job": 0, "problems": []}. A job that cannot be traced
lists its problems and writes no file. Jobs are accepted until stdin ends; unfinished ones are then abandoned.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fsdp_tune.core.devices import available_cores
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.planner.trace.trace_recipe import trace_recipe
from fsdp_tune.recipe.continued_adapter import without_adapter
from fsdp_tune.recipe.schema.recipe import Recipe

MOST_WORKERS = 8


STDIN, STDOUT, STDERR = 0, 1, 2


def trace_one(job: dict[str, Any]) -> list[Problem]:
    """Write the trace of one job. Return its problems, [] on success."""

    recipe = without_adapter(Recipe.model_validate(job["recipe"]))
    try:
        trace = trace_recipe(recipe, exact=job["exact"], vocabulary=job["vocabulary"])
    except FsdpTuneError as error:
        return list(error.problems)
    except Exception as error:  # noqa: BLE001  a failure of torch or the model's code must not end the search
        traceback.print_exc()
        name = type(error).__name__
        why = f"{name}: {first_line(error)}" if str(error).strip() else name
        return [Problem("trace-failed", f"the step could not be traced: {why}")]
    try:
        trace.save(Path(job["output"]))
    except OSError as error:
        return [Problem("trace-failed", f"the trace could not be written: {error}")]
    return []


class Worker:
    """A forked process that traces jobs one by one."""

    def __init__(self, others: list[Worker]) -> None:
        self.connection: Connection
        self.connection, theirs = Pipe()  # pyright: ignore[reportAttributeAccessIssue]  POSIX only
        self.job: int | None = None
        self.process = os.fork()
        if self.process == 0:
            for other in (*others, self):  # otherwise a worker would keep the connection of another one open
                other.connection.close()
            _work(theirs)  # pyright: ignore[reportArgumentType]
        theirs.close()

    def start(self, job: dict[str, Any]) -> None:
        self.job = job["job"]
        self.connection.send(job)

    def result(self) -> dict[str, Any]:
        """Return the result of the finished job. Raises: EOFError if the worker died."""
        job, self.job = self.job, None
        return {"job": job, "problems": self.connection.recv()}


def _work(connection: Connection) -> None:
    """Trace jobs until the connection closes; never returns."""
    os.dup2(STDERR, STDOUT)  # output of a model must not mix with results
    try:
        while True:
            connection.send([problem.as_dict() for problem in trace_one(connection.recv())])
    except (EOFError, KeyboardInterrupt):
        pass
    finally:
        sys.stderr.flush()
        os._exit(0)


class Server:
    """Distributes jobs to workers; a worker is created only when a job waits for one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: deque[dict[str, Any]] = deque()
        self.workers: list[Worker] = []
        self._text = b""

    def run(self) -> None:
        while True:
            ready = wait([STDIN, *(worker.connection for worker in self.workers if worker.job is not None)])
            for worker in [worker for worker in self.workers if worker.connection in ready]:
                self._answer(worker)
            if STDIN in ready and not self._read():
                break
            self._start()
        for worker in self.workers:
            worker.connection.close()

    def _read(self) -> bool:
        """Read jobs from stdin. Return False at its end."""
        part = os.read(STDIN, 1 << 16)
        *lines, self._text = (self._text + part).split(b"\n")
        self.waiting += map(json.loads, lines)
        return bool(part)

    def _start(self) -> None:
        while self.waiting:
            idle = next((worker for worker in self.workers if worker.job is None), None)
            if idle is None and len(self.workers) >= self.most:
                return
            if idle is None:
                idle = Worker(self.workers)
                self.workers.append(idle)
            idle.start(self.waiting.popleft())

    def _answer(self, worker: Worker) -> None:
        job = worker.job
        try:
            answer = worker.result()
        except EOFError:
            self.workers.remove(worker)
            status = os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1])
            crashed = Problem("trace-failed", f"the process that traced ended with status {status}")
            answer = {"job": job, "problems": [crashed.as_dict()]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    Server(min(MOST_WORKERS, available_cores())).run()
    sys.stderr.flush()
    os._exit(0)  # skips torch's exit handlers, which take half a second


if __name__ == "__main__":
    main()
