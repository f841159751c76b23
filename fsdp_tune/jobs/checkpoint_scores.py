"""Score the model of one checkpoint of a run, in a process of its own.

`python -m fsdp_tune.jobs.checkpoint_scores RUN STEP DEVICE [low-priority]`

Merges the checkpoint as `merge-checkpoint --step STEP` does, into a directory that is removed at the end, and
evaluates the model that the run ships, with `merge.quantise` the quantised one, as `evaluate` does. Prints
one JSON line: `{"scores": {name: {"value", "low", "high", "rows"}}, "warnings": […]}`, or `{"problem": {…}}`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

from fsdp_tune.answer.find_model import find_model
from fsdp_tune.answer.tasks_request import TasksRequest
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.errors import FsdpTuneError, failed_error
from fsdp_tune.core.processes import QUIET_LIBRARIES, JsonChild
from fsdp_tune.jobs.evaluate import CheckpointResults, device_of, evaluate_checkpoint
from fsdp_tune.jobs.evaluated_recipes import options_of_set
from fsdp_tune.jobs.options import DeviceKind
from fsdp_tune.jobs.results import merge_checkpoint
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.launch.scoring import LOW_PRIORITY
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import scratch_of
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.event_parts import CheckpointScore

TASKS = (sys.executable, "-P", "-m", "fsdp_tune.answer.tasks")
_NICENESS = 10
"""Ranks that compute on the CPU keep their priority."""
_FIRST_OUT_OF_MEMORY = "1000"
"""If the host has no memory left, the kernel kills this process and its children, and not a rank."""


def score_checkpoint(
    run: RunDir, step: int, device: DeviceKind
) -> tuple[dict[str, CheckpointScore], list[str]]:
    """Return the scores of a checkpoint by name as evaluation.json defines them, and warnings about them.
    Raises: FsdpTuneError."""
    record, recipe = EvaluationRecord.read(run.evaluation_json), read_resolved(run)
    if record is not None:  # a finished run keeps its recipe.json
        recipe = recipe.model_copy(update={"evaluation": record.section})
    folder = scratch_of(run, recipe.evaluation)
    shutil.rmtree(folder, ignore_errors=True)  # of an evaluation that was killed
    DISK.mkdir(folder)
    try:
        exports = recipe.lora is not None and recipe.merge.adapter == "adapter"
        output = folder / f"checkpoint-{step}-model"
        options = MergeOptions(
            output=output, step=step, verify="quick", adapter=exports, quantise=recipe.ships_quantised
        )
        merged = merge_checkpoint(run.path, options)
        model = merged.output if merged.quantised is None else merged.quantised.path
        scores, warnings = (
            _score_sets(run, model, recipe, device, record) if recipe.evaluation.sets else ({}, [])
        )
        if recipe.evaluation.tasks:
            scores |= _score_tasks(model, recipe, device)
        return _numbers(scores, warnings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _numbers(
    scores: dict[str, CheckpointScore], warnings: list[str]
) -> tuple[dict[str, CheckpointScore], list[str]]:
    """Leave out scores that are NaN or infinity, which have no order, with a warning for each."""
    left_out = [
        f"`{name}` is {score.value}, so it is left out"
        for name, score in scores.items()
        if not math.isfinite(score.value)
    ]
    kept = {
        name: replace(score, low=_number(score.low), high=_number(score.high))
        for name, score in scores.items()
    }
    return {name: score for name, score in kept.items() if math.isfinite(score.value)}, [*warnings, *left_out]


def _number(bound: float | None) -> float | None:
    return bound if bound is not None and math.isfinite(bound) else None


def _score_sets(
    run: RunDir, model: Path, recipe: Recipe, device: DeviceKind, record: EvaluationRecord | None
) -> tuple[dict[str, CheckpointScore], list[str]]:
    sets = {each.set_label: each for each in recipe.evaluation.sets}
    results = evaluate_checkpoint(
        run, model, {label: options_of_set(each, recipe, device) for label, each in sets.items()}
    )
    if record is not None:
        _refuse_changed_rows(results, record)
    scores: dict[str, CheckpointScore] = {}
    for label, result in results.sets.items():
        estimates = {sets[label].metric: result.metric} | (
            {} if result.loss is None else {"loss": result.loss}
        )
        scores |= {
            f"{label}/{name}": CheckpointScore(each.value, each.low, each.high, result.rows)
            for name, each in estimates.items()
        }
    return scores, [notice.message for notice in results.notices]


def _refuse_changed_rows(results: CheckpointResults, record: EvaluationRecord) -> None:
    """Raises: FailedError if a set has other rows than at the start, so that its scores could not be compared
    with earlier ones."""
    changed = [label for label, found in results.rows.items() if record.rows.get(label) != found]
    if changed:
        message = (
            f"the rows of `{changed[0]}` are not those that the start of the run read, so its scores are "
            "of other rows"
        )
        raise failed_error(
            "evaluation-failed",
            message,
            hint="start the run again: all its checkpoints are then scored on the new rows",
        )


def _score_tasks(model: Path, recipe: Recipe, device: DeviceKind) -> dict[str, CheckpointScore]:
    found, evaluation = find_model(str(model)), recipe.evaluation
    request = TasksRequest(
        weights=found.weights,
        adapter=found.adapter,
        tasks=list(evaluation.tasks),
        rows=evaluation.task_rows,
        batch_size=evaluation.batch_size,
        device=device_of(device),
        trust_remote_code=recipe.model.trust_remote_code,
    )
    with JsonChild(TASKS, os.environ | QUIET_LIBRARIES) as child:
        child.send(request.as_json(), is_last=True)
        if (line := child.receive()) is None:
            message = f"lm_eval could not run {', '.join(evaluation.tasks)}: {child.failure()}"
            raise failed_error(
                "evaluation-failed", message, hint="see its documentation for what a task needs"
            )
        return {name: CheckpointScore(**score) for name, score in line["scores"].items()}


def main() -> None:
    run, step, device = RunDir(Path(sys.argv[1])), int(sys.argv[2]), cast(DeviceKind, sys.argv[3])
    if LOW_PRIORITY in sys.argv[4:]:
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text(_FIRST_OUT_OF_MEMORY)
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            scores, warnings = score_checkpoint(run, step, device)
            line: dict[str, object] = {
                "scores": {name: score.as_dict() for name, score in scores.items()},
                "warnings": warnings,
            }
        except FsdpTuneError as error:
            line = {"problem": error.problems[0].as_dict()}
    output.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
