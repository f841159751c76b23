"""The process that scores one checkpoint (`jobs/checkpoint_scores.py`): it is started, watched and ended, and its outcome is an event.

The command starts it next to the ranks or after them, and with `evaluation.when: between_steps` the first rank starts it while all wait.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.devices import only_visible, visible_devices
from fsdp_tune.core.errors import Problem
from fsdp_tune.core.processes import QUIET_LIBRARIES
from fsdp_tune.core.units import format_seconds, parse_seconds
from fsdp_tune.launch.command.accelerate import clean
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import scratch_of, warnings_of_scores
from fsdp_tune.run.directory import Checkpoint, RunDir
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.event_parts import CheckpointScore
from fsdp_tune.run.events import CheckpointEvaluated, CheckpointEvaluationFailed

if TYPE_CHECKING:
    import psutil

SCORE = (sys.executable, "-P", "-m", "fsdp_tune.jobs.checkpoint_scores")
LOW_PRIORITY = "low-priority"
LOG = "evaluation.log"
WATCH_SECONDS = 0.2
"""Interval at which its owner looks whether it `has_ended`."""
LOOK_SECONDS = 1.0
"""Interval of the search for processes that it has started, which reads the list of all."""
Outcome = CheckpointEvaluated | CheckpointEvaluationFailed
Scored = tuple[dict[str, CheckpointScore], list[str]]
"""Scores by name, and warnings about them."""


@dataclass(frozen=True, slots=True)
class EvaluationDevice:
    """Where checkpoints are scored: `--device` of `evaluate`, and the variables that show it only those GPUs."""

    kind: str
    variables: dict[str, str] = field(default_factory=dict[str, str])
    ranks_compute: bool = False
    """Whether the ranks compute meanwhile, so that the evaluation has a lower priority. Ranks that wait for it would wait longer."""

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"


def evaluation_device(recipe: Recipe, *, after_ranks: bool = False) -> EvaluationDevice:
    """Return the devices of the ranks of the first machine, which they have left or wait on; alongside ranks that compute, its GPUs that
    no rank uses, else its CPU. GPUs that are in neither set may belong to another program."""
    ranks_compute = not after_ranks and recipe.evaluation.when == "alongside"
    if recipe.launch.device == "cpu":
        return EvaluationDevice("cpu", ranks_compute=ranks_compute)
    count = recipe.local_world_size
    if not ranks_compute:
        return EvaluationDevice("auto", only_visible(os.environ, slice(count)))
    if recipe.launch.device != "cuda" or len(visible_devices(os.environ)) <= count:
        return EvaluationDevice("cpu", ranks_compute=True)
    return EvaluationDevice("cuda", only_visible(os.environ, slice(count, None)), ranks_compute=True)


class ScoringProcess:
    """Scores a checkpoint from its creation on. `end` must be called.

    `from_rank`: it is started by a rank, and has none of the variables and none of the cores that the launcher gave that rank.
    """

    def __init__(self, run: RunDir, recipe: Recipe, checkpoint: Checkpoint, device: EvaluationDevice, *, from_rank: bool = False) -> None:
        self._run, self._recipe, self._checkpoint = run, recipe, checkpoint
        self._began, self._began_at = LIVED.now(), time.time()
        self._log, self._from_rank = run.logs / LOG, from_rank
        self._found: Scored | Problem | None = None
        self._child: subprocess.Popen[str] | None = None
        self._below: list[psutil.Process] = []
        """Processes that it has started, as of `_looked_at`. They use the device too, and a killed child leaves them."""
        self._looked_at = self._began
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by `end`; a pipe takes 64 KiB
        command = [*SCORE, str(run.path), str(checkpoint.step), device.kind, *([LOW_PRIORITY] if device.ranks_compute else [])]
        of_rank = {"OMP_NUM_THREADS", *recipe.launch.env} if from_rank else set[str]()
        inherited = {name: value for name, value in clean(os.environ)[0].items() if name not in of_rank}
        variables = {**inherited, **QUIET_LIBRARIES, **device.variables}
        try:
            with DISK.open_private(self._log, "ab") as errors:
                self._child = children.start(command, variables, stdin=subprocess.DEVNULL, stdout=self._output, stderr=errors)
            if from_rank and sys.platform == "linux":  # its launcher has the cores of the command
                with suppress(OSError):
                    os.sched_setaffinity(self._child.pid, os.sched_getaffinity(os.getppid()))
        except OSError as error:
            self._found = Problem("evaluation-failed", f"its process could not be started: {error}")

    def has_ended(self) -> bool:
        """Return whether there are scores, or a reason why there are none: `evaluation.timeout` is one."""
        if self._found is not None or self._child is None:
            return True
        limit_seconds = parse_seconds(self._recipe.evaluation.timeout)
        if children.has_ended(self._child):
            children.end(self._child, self._below)
            self._output.seek(0)
            self._found = _read(self._output.read(), self._child.returncode, self._log)
        elif LIVED.now() - self._began > limit_seconds:
            message = f"it took more than {format_seconds(limit_seconds)} (`evaluation.timeout`)"
            self._found = Problem("evaluation-timeout", message)
        elif LIVED.now() - self._looked_at > LOOK_SECONDS:
            self._below, self._looked_at = children.descendants(self._child), LIVED.now()
        return self._found is not None

    def outcome(self) -> Outcome:
        """Return the event, once it `has_ended`."""
        assert self._found is not None
        seconds = time.time() - self._began_at
        waited = seconds if self._from_rank else None
        step, identity, record = self._checkpoint.step, self._checkpoint.manifest.identity, EvaluationRecord.read(self._run.evaluation_json)
        if isinstance(self._found, Problem):
            command = record.command if record is not None else None
            return CheckpointEvaluationFailed(step, identity, self._found.code, self._found.message, command, waited)
        scores, warnings = self._found
        definition = record.definition if record is not None else None
        warnings = [*warnings, *warnings_of_scores(self._run, self._recipe, scores)]
        return CheckpointEvaluated(step, identity, seconds, scores, definition, warnings, waited)

    def end(self) -> None:
        """Leave no process and no file of it, finished or not."""
        if self._child is not None:
            children.end(self._child, self._below)
        self._output.close()
        with suppress(OSError):
            shutil.rmtree(scratch_of(self._run, self._recipe.evaluation), ignore_errors=True)


def _read(text: str, code: int, log: Path) -> Scored | Problem:
    try:
        line: dict[str, Any] = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        why = children.describe_failure(code, "") if code < 0 else f"its process ended with exit code {code}, see {log}"
        return Problem("evaluation-failed", why)
    if "problem" in line:
        return Problem.from_dict(line["problem"])
    warnings: list[str] = line.get("warnings", [])
    if not line["scores"]:
        return Problem("evaluation-failed", "; ".join(["it has no scores", *warnings]))
    return {name: CheckpointScore(**score) for name, score in line["scores"].items()}, warnings
