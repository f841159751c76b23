"""The scores of a run's checkpoints (`evaluation:`): which are known, which checkpoint is the best by one,
and which must be kept.

metrics.jsonl alone has them, as events that name the checkpoint by the identity of its manifest, and what was
computed by its definition (`EvaluationRecord`). A checkpoint of another attempt has another identity, and a
changed set another definition: neither has a score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.recipe.schema.evaluation import CheckpointEvaluation
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import Checkpoint, RunDir, complete_checkpoints
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.event_parts import CheckpointScore
from fsdp_tune.run.events import CheckpointEvaluated, CheckpointEvaluationFailed, read_event
from fsdp_tune.run.manifest import digest
from fsdp_tune.run.metrics_file import metrics_with

SCRATCH = ".evaluation"
"""Folder of the run with the model that is being evaluated."""
_MARKER = b'"checkpoint_evaluat'
"""In the lines of both events."""


@dataclass(frozen=True, slots=True)
class BestScore:
    checkpoint: Checkpoint
    value: float


def checkpoint_events(run: RunDir) -> list[CheckpointEvaluated | CheckpointEvaluationFailed]:
    """Return the events of evaluated checkpoints in metrics.jsonl, oldest first."""
    found = map(read_event, metrics_with(run.metrics_jsonl, _MARKER))
    return [event for event in found if isinstance(event, CheckpointEvaluated | CheckpointEvaluationFailed)]


def of_newest_definition(events: Iterable[CheckpointEvaluated]) -> list[CheckpointEvaluated]:
    """Return the events that can be compared with the newest one: those of other rows, metrics or tasks have
    the same names."""
    every = list(events)
    return [event for event in every if event.definition == every[-1].definition]


@dataclass(frozen=True, slots=True)
class CheckpointScores:
    """What metrics.jsonl has of the current evaluations of checkpoints, by the identity of the checkpoint."""

    evaluated: dict[str, CheckpointEvaluated]
    """Those of the current definition."""
    failed: dict[str, CheckpointEvaluationFailed]
    """Those of the current start of the run; the others are tried again."""

    @classmethod
    def read(cls, run: RunDir) -> CheckpointScores:
        """Without evaluation.json, as in runs of earlier versions, the definition is that of the newest
        scores."""
        events, record = checkpoint_events(run), EvaluationRecord.read(run.evaluation_json)
        scored = [event for event in events if isinstance(event, CheckpointEvaluated)]
        definition = record.definition if record is not None else scored[-1].definition if scored else None
        return cls(
            {event.checkpoint: event for event in scored if event.definition == definition},
            {
                event.checkpoint: event
                for event in events
                if isinstance(event, CheckpointEvaluationFailed)
                and (record is None or event.command == record.command)
            },
        )

    @property
    def settled(self) -> set[str]:
        """Those that this start does not evaluate again: with scores, or with a failure that names the
        command of this start."""
        return {
            *self.evaluated,
            *(identity for identity, event in self.failed.items() if event.command is not None),
        }

    def best(self, name: str, complete: Sequence[Checkpoint], *, is_greater: bool) -> BestScore | None:
        """Return the best of the complete checkpoints by a score, of equal ones the earliest; None if none
        has the score as a number."""
        known = [
            BestScore(each, event.scores[name].value)
            for each in complete
            if (event := self.evaluated.get(each.manifest.identity)) is not None
            and name in event.scores
            and math.isfinite(event.scores[name].value)
        ]
        sign = 1.0 if is_greater else -1.0
        return max(known, key=lambda each: (sign * each.value, -each.checkpoint.step), default=None)


def best_by_score(run: RunDir, recipe: Recipe, complete: Sequence[Checkpoint]) -> BestScore | None:
    """Return the best of the complete checkpoints by `training.metric_for_best_model`; None if it is not a
    score, or none has it."""
    return _best(CheckpointScores.read(run), recipe, complete) if recipe.best_by_score else None


def better_by_score(
    run: RunDir, recipe: Recipe, complete: Sequence[Checkpoint], steps: Sequence[int]
) -> Checkpoint | None:
    """Return the best of the complete checkpoints by a score, if it is better than those of `steps` whose
    score is a number, and whose files may be gone; None if none is."""
    if not recipe.best_by_score:
        return None
    known = CheckpointScores.read(run)
    best = _best(known, recipe, complete)
    if best is None or best.checkpoint.step in steps:
        return None
    name, is_greater = _metric(recipe)
    sign = 1 if is_greater else -1
    before = [
        event.scores[name].value
        for event in known.evaluated.values()
        if event.step in steps and name in event.scores and math.isfinite(event.scores[name].value)
    ]
    return best.checkpoint if all(sign * best.value > sign * value for value in before) else None


def _best(known: CheckpointScores, recipe: Recipe, complete: Sequence[Checkpoint]) -> BestScore | None:
    name, is_greater = _metric(recipe)
    return known.best(name, complete, is_greater=is_greater)


def _metric(recipe: Recipe) -> tuple[str, bool]:
    """Return the score that chooses the best checkpoint, and whether the greatest is the best."""
    name = training_value(recipe.training, "metric_for_best_model")
    return str(name), bool(training_value(recipe.training, "greater_is_better"))


def checkpoints_to_evaluate(run: RunDir, evaluation: CheckpointEvaluation) -> list[Checkpoint]:
    """Return the complete checkpoints of evaluated steps, oldest first, with or without scores."""
    return [
        each
        for each in reversed(complete_checkpoints(run, elsewhere=None)[0])
        if evaluation.evaluates(each.step)
    ]


def kept_for_scores(run: RunDir, recipe: Recipe) -> set[int]:
    """Return the steps of the complete checkpoints that a rotation must keep: those to be evaluated, and the
    best of the evaluated ones.

    While the best is wanted and not known, because evaluations failed or have no such score, all of them are
    kept: any may be the best.
    """
    if not recipe.evaluation.is_on:
        return set()
    complete, known = complete_checkpoints(run, elsewhere=None)[0], CheckpointScores.read(run)
    due = [each for each in complete if recipe.evaluation.evaluates(each.step)]
    identities = known.evaluated.keys() | known.failed.keys()
    best = _best(known, recipe, complete) if recipe.best_by_score else None
    if recipe.best_by_score and best is None:
        return {each.step for each in due}
    waiting = {each.step for each in due if each.manifest.identity not in identities}
    return waiting | ({best.checkpoint.step} if best is not None else set())


def scratch_of(run: RunDir, evaluation: CheckpointEvaluation) -> Path:
    """Return the folder of this run's models while they are evaluated."""
    return (
        run.path / SCRATCH
        if evaluation.scratch_dir is None
        else Path(evaluation.scratch_dir) / f"{run.name}-{digest(str(run.path.resolve()))}{SCRATCH}"
    )


def warnings_of_scores(run: RunDir, recipe: Recipe, scores: Mapping[str, CheckpointScore]) -> list[str]:
    """Return a warning if the first scores lack the one that chooses the best checkpoint: a task's scores are
    not known before."""
    name = training_value(recipe.training, "metric_for_best_model")
    if not recipe.best_by_score or name in scores or CheckpointScores.read(run).evaluated:
        return []
    kept = "every evaluated checkpoint is kept, and none is the best"
    return [
        f"there is no score `{name}` (`training.metric_for_best_model`), only {', '.join(scores)}: "
        f"while none has it, {kept}"
    ]
