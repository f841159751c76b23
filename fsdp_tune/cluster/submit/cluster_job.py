"""A run as a job of a cluster: what an engine needs for it, and how long before its end it gets a signal to
stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_tune.core.units import format_bytes, format_seconds
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.events import CheckpointSaved, number, read_event
from fsdp_tune.run.job_files import JobFiles

LEAST_LEAD_SECONDS = 120
"""Also for a model that is saved in a moment: signals and file systems of clusters may be late by tens of
seconds."""
UNKNOWN_LEAD_SECONDS = 600
UNMEASURED_BYTES_PER_SECOND = 100e6
"""A shared file system that has much else to do."""
STOP_STEPS = 3
"""After a signal the ranks finish at most two more steps, and the one that they are in."""
MEASURED_LINES = 50
"""The last saves, evaluations and steps that are counted."""
MARGIN = 2.0


@dataclass(frozen=True, slots=True)
class Lead:
    """How long before the end of its time a job is told to stop, and the arithmetic of it."""

    seconds: int
    reason: str


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """A run of a sweep."""

    output_dir: Path
    arguments: tuple[str, ...]
    """What differs from those of the other runs."""


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A run for an engine. `gpus_per_machine` 0: on CPUs."""

    name: str
    program: tuple[str, ...]
    """The words that start `fsdp-tune` on a machine of the job."""
    arguments: tuple[str, ...]
    """Train, continuing from the newest complete checkpoint; the same on each machine, which has one task."""
    output_dir: Path
    """The run directory, absolute. All machines see it."""
    working_directory: Path
    """Where relative paths of the recipe start."""
    machines: int
    gpus_per_machine: int
    lead: Lead
    cpus_per_machine: int | None = None
    time_limit: str | None = None
    """As the engine writes it."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    chooses_port: bool = False
    """Whether the first machine's port is left to the engine: jobs that share a node must differ."""
    tasks: tuple[ArrayTask, ...] = ()
    """Runs of a sweep, each in a job of its own; `output_dir` is then the directory that they are in."""
    max_stalled_starts: int = 3
    """Starts in a row without a new checkpoint after which the job is not started again."""

    @property
    def files(self) -> JobFiles:
        return JobFiles(self.output_dir)


def cores_of_machine(recipe: Recipe) -> int:
    """Return the cores of each machine: one for each rank and each of its loaders. Slurm's default is one for
    all of them."""
    loaders = int(training_value(recipe.training, "dataloader_num_workers") or 0)
    return recipe.local_world_size * (1 + loaders)


def measured_lead(lines: Sequence[Mapping[str, object]]) -> Lead | None:
    """Return the lead from the metrics of an earlier start of the run; None if it has saved no checkpoint."""
    # Earlier versions wrote `seconds` without the stall.
    saves = [
        max(event.seconds, event.stall_seconds)
        for line in lines
        if isinstance(event := read_event(line), CheckpointSaved)
    ]
    saves = saves[-MEASURED_LINES:]
    if not saves:
        return None
    step = max(_last([number(line.get("step_seconds")) for line in lines]), default=0.0)
    evaluation = max(_last([number(line.get("eval_seconds")) for line in lines]), default=0.0)
    parts = [
        f"{MARGIN:g} × {format_seconds(max(saves))} (slowest of {len(saves)} saves)",
        f"{STOP_STEPS} steps of {format_seconds(step)}",
        *([f"an evaluation of {format_seconds(evaluation)}"] if evaluation else []),
    ]
    return _lead(MARGIN * max(saves) + STOP_STEPS * step + evaluation, " + ".join(parts))


def _last(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None][-MEASURED_LINES:]


def estimated_lead(checkpoint_bytes: float | None) -> Lead:
    """Return the lead of a run that has saved nothing yet, from the size of its checkpoint, or for an unknown
    size."""
    if checkpoint_bytes is None:
        return Lead(UNKNOWN_LEAD_SECONDS, "no save was measured, and the size of a checkpoint is unknown")
    rate = f"{UNMEASURED_BYTES_PER_SECOND / 1e6:.0f} MB/s"
    reason = f"{MARGIN:g} × {format_bytes(checkpoint_bytes)} at {rate} (no save was measured yet)"
    return _lead(MARGIN * checkpoint_bytes / UNMEASURED_BYTES_PER_SECOND, reason)


def _lead(seconds: float, reason: str) -> Lead:
    if seconds < LEAST_LEAD_SECONDS:
        return Lead(LEAST_LEAD_SECONDS, f"{reason}, and at least {LEAST_LEAD_SECONDS} s")
    return Lead(round(seconds), reason)
