"""The scores of a run's checkpoints (`evaluation:`): which are known, which checkpoint is the best by one, and which must be kept.

metrics.jsonl alone has them, as events that name the checkpoint by the identity of its manifest. A checkpoint that was replaced by one of
another attempt has another identity, so it has no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import Checkpoint, RunDir, complete_checkpoints
from fsdp_tune.run.events import CheckpointEvaluated, CheckpointEvaluationFailed, read_event
from fsdp_tune.run.metrics_file import metrics_with

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


@dataclass(frozen=True, slots=True)
class CheckpointScores:
    """What metrics.jsonl has of the evaluations of checkpoints, by the identity of the checkpoint."""

    evaluated: dict[str, CheckpointEvaluated]
    failed: dict[str, CheckpointEvaluationFailed]

    @classmethod
    def read(cls, run: RunDir) -> CheckpointScores:
        found = cls({}, {})
        for event in checkpoint_events(run):
            if isinstance(event, CheckpointEvaluated):
                found.evaluated[event.checkpoint] = event
            else:
                found.failed[event.checkpoint] = event
        return found

    def best(self, name: str, complete: Sequence[Checkpoint], *, is_greater: bool) -> BestScore | None:
        """Return the best of the complete checkpoints by a score, of equal ones the earliest; None if none has the score."""
        known = [
            BestScore(each, event.scores[name].value)
            for each in complete
            if (event := self.evaluated.get(each.manifest.identity)) is not None and name in event.scores
        ]
        sign = 1.0 if is_greater else -1.0
        return max(known, key=lambda each: (sign * each.value, -each.checkpoint.step), default=None)


def best_by_score(run: RunDir, recipe: Recipe, complete: Sequence[Checkpoint]) -> BestScore | None:
    """Return the best of the complete checkpoints by `training.metric_for_best_model`; None if it is not a score, or none has it."""
    if not recipe.best_by_score:
        return None
    name, is_greater = training_value(recipe.training, "metric_for_best_model"), training_value(recipe.training, "greater_is_better")
    return CheckpointScores.read(run).best(str(name), complete, is_greater=bool(is_greater))


def kept_for_scores(run: RunDir, recipe: Recipe) -> set[int]:
    """Return the steps of the complete checkpoints that a rotation must keep: those to be evaluated, and the best of the evaluated ones."""
    if not recipe.evaluation.is_on:
        return set()
    complete, known = complete_checkpoints(run, elsewhere=None)[0], CheckpointScores.read(run)
    identities = known.evaluated.keys() | known.failed.keys()
    waiting = {each.step for each in complete if recipe.evaluation.evaluates(each.step) and each.manifest.identity not in identities}
    best = best_by_score(run, recipe, complete)
    return waiting | ({best.checkpoint.step} if best is not None else set())
