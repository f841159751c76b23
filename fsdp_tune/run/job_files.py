"""The files that a job of a cluster's engine leaves next to the run directory, and the ledger of its starts.

They are in `RUN.submit`: the run directory does not exist before the first start, and `--overwrite` moves it
away.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.files import read_regular
from fsdp_tune.run.events import number
from fsdp_tune.run.manifest import digest
from fsdp_tune.run.metrics_file import json_objects

ENDED_BY_SLURM = "ended by Slurm"
"""In the ledger: the job was cancelled, or Slurm starts it again by itself."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What submitting a run leaves next to its directory."""

    output_dir: Path

    @property
    def folder(self) -> Path:
        return self.output_dir.with_name(f"{self.output_dir.name}.submit")

    @property
    def script(self) -> Path:
        return self.folder / "job.sbatch"

    @property
    def lock(self) -> Path:
        return self.folder / "submit.lock"

    @property
    def submitted(self) -> Path:
        """Ids of the jobs, a JSON object a line."""
        return self.folder / "submitted.jsonl"

    @property
    def attempts(self) -> Path:
        """The ledger: the job appends a JSON object at each start and each end."""
        return self.folder / "attempts.jsonl"

    def log(self, job: str) -> Path:
        """Return the output of a job and of all its tasks, of all its starts."""
        return self.folder / f"slurm-{job}.out"

    def recipe(self, name: str, text: str) -> Path:
        """Return the copy of the recipe that the job trains by, so that a change of the file is not picked up
        by a later start.

        A copy is never changed: an earlier job may still be in the queue.
        """
        return self.folder / "recipe" / digest(text, size=4) / name

    @property
    def mark(self) -> str:
        """A word that names this run directory to the engine."""
        return f"fsdp-tune:{digest(str(self.output_dir))}"


@dataclass(frozen=True, slots=True)
class JobStart(JsonAnswer):
    """A start of a run by a cluster's engine."""

    job: str
    start: int
    """Of this job, from 0: requeued jobs keep their id."""
    nodes: str
    started_at: float
    """Wall clock, seconds."""
    ended_at: float | None
    """Null: it runs, or was killed with its node."""
    exit_code: int | None
    first_step: int
    """Of the newest complete checkpoint at the start."""
    last_step: int | None
    """The same at its end."""
    then: str | None
    """What the job did at its end: finished, requeued, not requeued, stopped, or `ended by Slurm`."""


def read_attempts(output_dir: Path) -> list[JobStart]:
    """Return the starts of a run by an engine, oldest first; [] if it was never submitted."""
    try:
        lines = json_objects(read_regular(JobFiles(output_dir).attempts))
    except OSError:
        return []
    found: dict[tuple[str, int], JobStart] = {}
    for line in lines:
        key = (str(line.get("job")), _whole(line.get("start")) or 0)
        if line.get("event") == "started":
            started_at, first_step = number(line.get("time")) or 0.0, _whole(line.get("step")) or 0
            found[key] = JobStart(
                *key, str(line.get("nodes") or ""), started_at, None, None, first_step, None, None
            )
        elif line.get("event") == "ended" and (start := found.get(key)) is not None:
            found[key] = JobStart(
                *key,
                start.nodes,
                start.started_at,
                number(line.get("time")),
                _whole(line.get("exit_code")),
                start.first_step,
                _whole(line.get("step")),
                str(line.get("then") or ""),
            )
    return list(found.values())


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
