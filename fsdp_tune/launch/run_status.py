"""Read the status of a run from its directory. Changes nothing."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import ExitReason
from fsdp_tune.core.files import open_regular, read_regular
from fsdp_tune.core.ownership import Owner, is_rank_of, live_owner
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.command.next_commands import commands_of_finished, commands_to_resume
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import checkpoint_events, of_newest_definition
from fsdp_tune.run.directory import Checkpoint, RunDir, complete_checkpoints, latest_checkpoint
from fsdp_tune.run.event_parts import CheckpointScore, SpikeRow, shown_scores
from fsdp_tune.run.events import (
    CheckpointEvaluated,
    CheckpointEvaluationFailed,
    TrainStarted,
    number,
    read_event,
)
from fsdp_tune.run.job_files import JobStart, read_attempts
from fsdp_tune.run.launch_files import LaunchRecord
from fsdp_tune.run.metrics_event import SpikeEvent
from fsdp_tune.run.metrics_file import json_objects, metrics_with
from fsdp_tune.run.mirror_state import MirrorState, state_path
from fsdp_tune.run.rank_files import Verdict, read_heartbeat, read_outcome
from fsdp_tune.run.records import Prediction
from fsdp_tune.run.time_left import TimeLeft

TAIL_BYTES = 1 << 18
"""Of metrics.jsonl; lines are a few hundred bytes."""
RUNNING, BUSY, NOT_STARTED = "running", "starting or merging", "not started"
UNKNOWN = "outcome unknown"
"""Of a run that was trained, and whose directory does not have the files by which its ranks report."""
_CONTINUES = (RUNNING, BUSY, NOT_STARTED)
RECENT_LINES = 20
"""Training lines and evaluations whose losses are returned."""
SPIKE_MARKER = b'_spike"'
"""In the lines of `loss_spike` and `gradient_spike`."""
START_MARKER = b'"train_started"'
"""In the line of each start."""
RECENT_SECONDS = 60.0
"""A heartbeat this recent, from a machine whose processes are not visible, counts as alive."""


@dataclass(frozen=True, slots=True)
class RankStatus(JsonAnswer):
    rank: int
    state: str
    exit_code: int | None
    phase: str | None
    step: int
    pid: int | None
    age: str | None
    """Of the last heartbeat."""
    log: str


@dataclass(frozen=True, slots=True)
class RejectedCheckpoint(JsonAnswer):
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Spike(JsonAnswer):
    """A spike of the loss or of the gradient norm."""

    event: str
    step: int
    message: str
    rows: list[SpikeRow]
    """Those of the micro-batches with the highest losses first."""
    rows_total: int
    """Also of those that are not named."""


@dataclass(frozen=True, slots=True)
class MirrorStatus(JsonAnswer):
    """What `checkpoint.mirror` has of a run, as the process that sends wrote it last."""

    url: str
    newest_step: int | None
    """Of the complete checkpoints there."""
    behind: list[str]
    """Checkpoints and models that are complete on this disk and not there, the newest first."""
    left_bytes: int
    """Of these when it was last written."""
    error: str | None
    """Why the last attempt failed."""
    failing: str | None
    """For how long; null: it works."""
    damaged: list[str]
    """Checkpoints and models that are damaged on this disk and therefore not sent, with the reason."""


@dataclass(frozen=True, slots=True)
class SlowRank(JsonAnswer):
    """The rank for which the others have waited for a minute or more."""

    rank: int
    part: str
    """For what: its data, computing or saving."""
    share: float
    """Of a step that it costs."""


@dataclass(frozen=True, slots=True)
class EvaluationLosses(JsonAnswer):
    """Losses of the evaluations of a run. Null: NaN or infinite."""

    last: float | None
    step: int
    """Of the last one."""
    best: float | None
    best_step: int | None
    recent: list[float | None]
    """The last ones, oldest first."""


@dataclass(frozen=True, slots=True)
class EvaluatedCheckpoint(JsonAnswer):
    """Scores of the model of a checkpoint by name, as `evaluation:` has computed them."""

    step: int
    scores: dict[str, CheckpointScore]


@dataclass(frozen=True, slots=True)
class RunStatus(JsonAnswer):
    """The status of a run, and the document of `status RUN --json`."""

    run_dir: str
    state: str
    owner: str | None
    """The process that has the run directory."""
    step: int | None
    total_steps: int | None
    loss: float | None
    last_line_age_seconds: float | None
    ranks: list[RankStatus]
    checkpoint: str | None
    """The newest complete one."""
    rejected_checkpoints: list[RejectedCheckpoint]
    merged: str | None
    problem: str | None
    ways_on: list[str]
    """Next commands, with what each does: they continue the run, or use what a finished one has made."""
    logs: str
    seconds_left: float | None
    """Estimated while ranks run, from the last lines: without first step and saves, with the evaluations to
    come."""
    ends_at: float | None
    """Wall clock at which the run ends if it continues like this; seconds since the epoch."""
    recent_losses: list[float | None]
    """The last ones that were logged, oldest first; null: NaN or infinite."""
    evaluation: EvaluationLosses | None
    """Losses of `data.eval`; null before the first evaluation."""
    evaluated_checkpoints: list[EvaluatedCheckpoint]
    """The last ones, oldest first."""
    evaluation_problem: str | None
    """Why the last evaluation of a checkpoint failed; null: it did not fail."""
    tokens_per_second_per_device: float | None
    peak_reserved_gib: float | None
    """GPU memory of rank 0."""
    planned_reserved_gib: float | None
    """The same, as planned."""
    peak_host_gib: float | None
    slow_rank: SlowRank | None
    """As of the last line."""
    spike: Spike | None
    """The newest one."""
    mirror: MirrorStatus | None
    """Of `checkpoint.mirror`."""
    starts: list[JobStart]
    """By a cluster's engine (`submit`), oldest first."""
    first_machine: str | None = None
    """`HOST:DIRECTORY` of the first machine, whose run directory has the metrics and events; None if this is
    that directory."""

    @property
    def evaluation_lines(self) -> list[str]:
        """The scores of the last evaluated checkpoint, and why no later one has any."""
        lines = [
            f"scores of checkpoint-{each.step}: {shown_scores(each.scores)}"
            for each in self.evaluated_checkpoints[-1:]
        ]
        return [*lines, *([self.evaluation_problem] if self.evaluation_problem is not None else [])]

    @property
    def is_active(self) -> bool:
        """Whether a process works on the run."""
        return self.state in (RUNNING, BUSY)

    @property
    def has_ended(self) -> bool:
        """Whether it was started and no process works on it any more."""
        return self.state not in _CONTINUES


@dataclass(frozen=True, slots=True)
class DirectoryStatus(JsonAnswer):
    """The status of each run in a directory, and the document of `status DIR --json`."""

    directory: str
    runs: list[RunStatus]

    @property
    def is_active(self) -> bool:
        return any(run.is_active for run in self.runs)


def run_status(run: RunDir) -> RunStatus:
    recipe = read_resolved(run)
    world_size = recipe.world_size
    elsewhere = _machines_elsewhere(run, recipe.launch.num_machines)
    ranks = [
        _rank_status(run, rank, is_elsewhere=rank // recipe.local_world_size in elsewhere)
        for rank in range(world_size)
    ]
    verdict = Verdict.read(run.outcome_json)
    outcomes = [outcome for rank in range(world_size) if (outcome := read_outcome(run, rank)) is not None]
    problems = [outcome.problem.message for outcome in outcomes if outcome.problem is not None]
    checkpoint, rejected = latest_checkpoint(run, elsewhere=None)
    owner = live_owner(run.lock)
    lines = last_lines(run.metrics_jsonl)
    logged = _training_lines(lines)
    losses = [number(line["loss"]) for line in logged]
    is_copy = not run.logs.is_dir() and (
        checkpoint is not None or bool(rejected) or any("step" in line for line in lines)
    )
    state = _state(owner, ranks, verdict, is_copy=is_copy)
    scored, evaluation_problem = _scores(run)
    total_steps = _total_steps(run.metrics_jsonl, lines)
    left, at = _time_left(lines, total_steps), max(rank.step for rank in ranks)
    return RunStatus(
        run_dir=str(run.path),
        state=state,
        owner=str(owner) if owner is not None else None,
        step=max((line["step"] for line in lines if isinstance(line.get("step"), int)), default=None),
        total_steps=total_steps,
        loss=losses[-1] if losses else None,
        last_line_age_seconds=_age(run.metrics_jsonl),
        ranks=ranks,
        checkpoint=str(checkpoint.path) if checkpoint else None,
        rejected_checkpoints=[RejectedCheckpoint(str(bad.path), bad.reason) for bad in rejected],
        merged=str(run.merged) if run.merged.is_dir() else None,
        problem=verdict.problem.message if verdict and verdict.problem else next(iter(problems), None),
        ways_on=[] if state in _CONTINUES else _next_commands(run, recipe, state, checkpoint),
        logs=str(run.logs),
        seconds_left=left.seconds_left(at) if state == RUNNING else None,
        ends_at=left.ends_at(at) if state == RUNNING else None,
        recent_losses=losses,
        evaluation=_evaluation(run.metrics_jsonl),
        evaluated_checkpoints=scored,
        evaluation_problem=evaluation_problem,
        tokens_per_second_per_device=number(logged[-1].get("tokens_per_second_per_device"))
        if logged
        else None,
        peak_reserved_gib=_highest(logged, "peak_reserved_gib"),
        planned_reserved_gib=_planned(run),
        peak_host_gib=_highest(logged, "peak_host_gib"),
        slow_rank=_slow_rank(logged),
        spike=newest_spike(run.metrics_jsonl),
        mirror=_mirror_status(run, recipe.checkpoint.mirror),
        starts=read_attempts(run.path),
        first_machine=_first_machine(run),
    )


def _scores(run: RunDir) -> tuple[list[EvaluatedCheckpoint], str | None]:
    """Return the evaluated checkpoints by the newest definition of the scores, and why the last evaluation
    failed."""
    evaluated = checkpoint_events(run)[-RECENT_LINES:]
    scored = [each for each in evaluated if isinstance(each, CheckpointEvaluated)]
    failed = [each.problem for each in evaluated[-1:] if isinstance(each, CheckpointEvaluationFailed)]
    found = [EvaluatedCheckpoint(each.step, each.scores) for each in of_newest_definition(scored)]
    return found, next(iter(failed), None)


def _first_machine(run: RunDir) -> str | None:
    record = LaunchRecord.read(run.launch_json)
    first = record.facts.get("first_machine") if record is not None else None
    return f"{first['host']}:{first['directory']}" if first else None


def _slow_rank(logged: list[dict[str, Any]]) -> SlowRank | None:
    """Return the slow rank of the last line of a step; None if it names none."""
    line = logged[-1] if logged else {}
    try:
        return SlowRank(int(line["slow_rank"]), str(line["slow_rank_part"]), float(line["slow_rank_share"]))
    except (KeyError, TypeError, ValueError):
        return None


def _mirror_status(run: RunDir, url: str | None) -> MirrorStatus | None:
    if url is None:
        return None
    state = MirrorState.read(state_path(run, 0)) or MirrorState(f"{url.rstrip('/')}/{run.name}")
    local = [
        each.path.name
        for each in complete_checkpoints(run, elsewhere=None)[0]
        if each.step > (state.newest_step or 0)
    ]
    behind = [*local, *(name for name in state.waiting if name not in local and (run.path / name).is_dir())]
    failing = (
        format_seconds(max(0.0, time.time() - state.failed_since)) if state.failed_since is not None else None
    )
    return MirrorStatus(
        state.url,
        state.newest_step,
        behind,
        state.left_bytes,
        state.error,
        failing,
        list(state.refused.values()),
    )


def newest_spike(path: Path) -> Spike | None:
    """Return the last event of a spike in metrics.jsonl, or None."""
    events = map(read_event, reversed(metrics_with(path, SPIKE_MARKER)))
    found = next((event for event in events if isinstance(event, SpikeEvent)), None)
    return (
        Spike(found.name, found.step, found.message, found.rows or [], found.rows_total or 0)
        if found is not None
        else None
    )


def _evaluation(path: Path) -> EvaluationLosses | None:
    """Return the evaluation losses in metrics.jsonl, or None."""
    lines = [
        line
        for line in metrics_with(path, b'"eval_loss"')
        if "event" not in line and isinstance(line.get("step"), int)
    ]
    values = [(number(line.get("eval_loss")), int(line["step"])) for line in lines]
    if not values:
        return None
    finite = [each for each in values if each[0] is not None]
    best = min(finite, key=lambda each: each[0] or 0.0, default=(None, None))
    last, step = values[-1]
    return EvaluationLosses(last, step, best[0], best[1], [value for value, _ in values[-RECENT_LINES:]])


def _training_lines(lines: list[dict[str, object]]) -> list[dict[str, Any]]:
    """Return the last `RECENT_LINES` lines of logged steps."""
    return [line for line in lines if "loss" in line and isinstance(line.get("step"), int)][-RECENT_LINES:]


def _highest(lines: list[dict[str, object]], name: str) -> float | None:
    return max((value for line in lines if (value := number(line.get(name))) is not None), default=None)


def _planned(run: RunDir) -> float | None:
    plan = Prediction.read(run.plan_json)
    return plan.peak_reserved_gib if plan is not None else None


def _time_left(lines: list[dict[str, object]], total_steps: int | None) -> TimeLeft:
    """Return the estimate from the last lines of metrics.jsonl."""
    found = TimeLeft(total_steps)
    for line in lines:
        found.add(line)
    return found


def _state(owner: Owner | None, ranks: list[RankStatus], verdict: Verdict | None, *, is_copy: bool) -> str:
    """Return the state. `is_copy`: there are traces of training, and no logs/, which has the files of the
    ranks. With logs/ that has none of them, `train --no-start` has prepared the run to be continued."""
    if any(rank.state == "live" for rank in ranks):
        return RUNNING
    if owner is not None:
        return BUSY
    if verdict is not None:
        return verdict.reason.value
    reasons = {rank.state for rank in ranks if rank.exit_code is not None}
    if reasons:  # started manually: no supervisor judged it
        return reasons.pop() if len(reasons) == 1 else " and ".join(sorted(reasons))
    if any(rank.pid for rank in ranks):
        return "died without an outcome"
    return UNKNOWN if is_copy else NOT_STARTED


def _next_commands(run: RunDir, recipe: Recipe, state: str, checkpoint: Checkpoint | None) -> list[str]:
    if state != ExitReason.FINISHED.value:
        return list(commands_to_resume(run, checkpoint))
    return commands_of_finished(run, recipe)


def _rank_status(run: RunDir, rank: int, *, is_elsewhere: bool) -> RankStatus:
    beat, outcome = read_heartbeat(run, rank), read_outcome(run, rank)
    age_seconds = _age(run.rank_heartbeat(rank))
    if outcome is not None:
        state = outcome.reason.value
    elif beat is None:
        state = "not started"
    elif is_rank_of(run.path, rank, beat.pid):
        state = "live"
    else:
        state = (
            "live elsewhere"
            if is_elsewhere and age_seconds is not None and age_seconds < RECENT_SECONDS
            else "gone"
        )
    return RankStatus(
        rank=rank,
        state=state,
        exit_code=outcome.exit_code if outcome else None,
        phase=beat.phase if beat and outcome is None else None,
        step=beat.step if beat else 0,
        pid=beat.pid if beat else None,
        age=format_seconds(age_seconds) if age_seconds is not None else None,
        log=str(run.rank_log(rank)),
    )


def _machines_elsewhere(run: RunDir, count: int) -> set[int]:
    """Return the machines of a run over `count` machines other than this one, whose processes are not visible
    here."""
    try:
        raw: Any = json.loads(read_regular(run.machines_json))
        return {
            int(machine)
            for machine, host in raw.items()
            if int(machine) < count > 1 and host != socket.gethostname()
        }
    except (OSError, ValueError, AttributeError):
        return set()


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the last lines of a JSON Lines file, without torn ones."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return json_objects(file.read(TAIL_BYTES))
    except FileNotFoundError:
        return []


def _total_steps(path: Path, last: list[dict[str, object]]) -> int | None:
    """Return the steps of the newest start: among the `last` lines of the file, or else in the file."""
    for lines in (last, metrics_with(path, START_MARKER)):
        for line in reversed(lines):
            if isinstance(event := read_event(line), TrainStarted):
                return event.total_steps
    return None
