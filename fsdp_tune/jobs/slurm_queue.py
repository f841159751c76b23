"""Slurm's commands, and the jobs of a run in its queue."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_tune.core.errors import failed_error, usage_error
from fsdp_tune.run.job_files import JobFiles
from fsdp_tune.run.metrics_file import json_objects

CALL_SECONDS = 120.0
"""Limit for a command of the engine."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as the queue shows it."""

    id: str
    state: str
    reason: str

    def __str__(self) -> str:
        return f"job {self.id} is {self.state}" + (
            f" ({self.reason})" if self.reason not in ("", "None") else ""
        )


def already_queued(queued: Sequence[QueuedJob]) -> Exception:
    """Return the usage error for a run that has jobs in the queue."""
    return usage_error(
        "job-queued",
        f"nothing is submitted: {queued[0]}, and trains this run"
        + (f"; so do {len(queued) - 1} more" if queued[1:] else ""),
        ways_out=(
            "`--follow` shows that job until it ends",
            f"`scancel {queued[0].id}` cancels it; a running one saves first",
            "`--again` submits one that starts after it",
        ),
    )


def call_slurm(*command: str) -> str:
    """Return the output of a command of Slurm. Raises: FailedError with its own words; usage error if it is
    not on this machine."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=CALL_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        hint = "run it on a login node of the cluster; `--print` needs no Slurm"
        raise usage_error("no-slurm", f"there is no `{command[0]}` on this machine", hint=hint) from None
    except subprocess.TimeoutExpired:
        said = f"no answer within {CALL_SECONDS:.0f} s"
    else:
        if not done.returncode:
            return done.stdout
        said = done.stderr.strip() or f"exit code {done.returncode}"
    hint = _REMEDIES.get(command[0], "`scontrol ping` shows whether the controller answers")
    raise failed_error("slurm-failed", f"`{command[0]}` failed: {said}", hint=hint)


_REMEDIES = {
    "sbatch": "options of this command, or your lines in the script, set what it names; `sinfo` shows the "
    "partitions"
}


def queued_jobs(files: JobFiles) -> list[QueuedJob]:
    """Return the jobs of this run in the queue, those first that were submitted first.

    They are known by their ids, and by their comment: a command that was killed after `sbatch` has written no
    id.
    """
    try:
        known = {str(line.get("job")) for line in json_objects(files.submitted.read_bytes())}
    except FileNotFoundError:
        known = set[str]()
    return sorted(
        (job for job, comment in _queue() if job.id in known or comment == files.mark),
        key=lambda job: int(job.id),
    )


def job_now(job: str) -> QueuedJob | None:
    """Return a job, also one that has ended a moment ago; None if the controller has forgotten it. Raises:
    FailedError."""
    return next((each for each, _ in _queue("--states=all") if each.id == job), None)


def _queue(*options: str) -> Iterator[tuple[QueuedJob, str]]:
    """Yield the jobs of this user with their comments; those of one array have one id."""
    form = ("--noheader", f"--user={os.geteuid()}", "--format=%A|%T|%r|%k")
    for line in call_slurm("squeue", *form, *options).splitlines():
        number, state, reason, comment = (*line.split("|", 3), "", "", "")[:4]
        yield QueuedJob(number, state, reason), comment.strip()


ENDED = frozenset(
    {
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "BOOT_FAIL",
        "DEADLINE",
        "OUT_OF_MEMORY",
    }
)
