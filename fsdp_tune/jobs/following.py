"""Follow a job of Slurm to its end."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from io import FileIO
from pathlib import Path

from fsdp_tune.core.errors import ExitCode, FailedError
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.slurm_queue import ENDED, QueuedJob, job_now
from fsdp_tune.jobs.submit import SubmitAnswer
from fsdp_tune.run.job_files import ENDED_BY_SLURM, JobFiles, read_attempts

POLL_SECONDS = 2.0
UNREACHABLE_SECONDS = 900.0
"""A controller that is restarted answers within minutes. The job does not need it meanwhile."""


def follow_job(answer: SubmitAnswer, observer: Observer) -> SubmitAnswer:
    """Report the state of a job and the lines of its log until it ends; a requeued job has not ended. Return
    the answer with its end.

    Raises: FailedError if the controller does not answer for `UNREACHABLE_SECONDS`; usage error without
    Slurm's commands.
    """
    job, files = str(answer.job), JobFiles(Path(answer.run_dir))
    with closing(_Log(files.log(job), observer)) as log:
        return _followed(answer, files, log)


def _followed(answer: SubmitAnswer, files: JobFiles, log: _Log) -> SubmitAnswer:
    job = str(answer.job)
    shown: QueuedJob | None = None
    answered_at = time.monotonic()
    while True:
        try:
            now, answered_at = job_now(job), time.monotonic()
        except FailedError:  # no answer, which says nothing about the job
            if time.monotonic() - answered_at > UNREACHABLE_SECONDS:
                raise
            log.show()
            time.sleep(POLL_SECONDS)
            continue
        log.show()
        if now is not None and now != shown:
            log.observer.message(str(now))
            shown = now
        if now is None or now.state in ENDED:
            log.show()
            state, code = _end_of(files, job, now.state if now is not None else "no longer known to Slurm")
            return replace(answer, state=state, exit_code=code)
        time.sleep(POLL_SECONDS)


def _end_of(files: JobFiles, job: str, state: str) -> tuple[str, int]:
    last = next((start for start in reversed(read_attempts(files.output_dir)) if start.job == job), None)
    # what came after it is not in the ledger
    if last is None or last.exit_code is None or last.then == "requeued":
        return state, ExitCode.OK if state == "COMPLETED" else ExitCode.FAILED
    return state if last.then == ENDED_BY_SLURM else str(last.then), last.exit_code


class _Log:
    """The new lines of a job's output, which does not exist before its start; one that has no end is shown
    last."""

    def __init__(self, path: Path, observer: Observer) -> None:
        self._path, self.observer = path, observer
        self._file: FileIO | None = None
        self._rest = b""

    def show(self) -> None:
        if self._file is None:
            try:
                self._file = FileIO(str(self._path))
            except FileNotFoundError:
                return
        *lines, self._rest = (self._rest + self._file.readall()).split(b"\n")
        for line in lines:
            self.observer.message(line.decode("utf-8", "replace"))

    def close(self) -> None:
        if self._rest:
            self.observer.message(self._rest.decode("utf-8", "replace"))
        if self._file is not None:
            self._file.close()
