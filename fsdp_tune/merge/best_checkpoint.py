"""Which checkpoint of a run is the best: by a score of `evaluation:`, or by a metric of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_tune.core.errors import Where, failed_error, usage_error
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.checkpoint_scores import CheckpointScores, best_by_score
from fsdp_tune.run.directory import Checkpoint, RunDir, best_so_far
from fsdp_tune.run.metrics_file import read_metrics

BY_VALUE = ("the highest ", "the lowest ")
"""Beginnings of the reason for a checkpoint that was chosen by a score, or by a metric of metrics.jsonl."""
BY_TRAINER = "the best by the trainer's metric"
"""Beginning of the reason for one that the trainer chose while it trained."""


def best_checkpoint(run: RunDir, recipe: Recipe | None, complete: list[Checkpoint]) -> tuple[Checkpoint, str]:
    """Return the trainer's best checkpoint (`metric_for_best_model`), else the best of it among the saved
    steps, or of `eval_loss`."""
    by_step = {checkpoint.step: checkpoint for checkpoint in complete}
    if recipe is not None and recipe.best_by_score:
        return _best_by_score(run, recipe, complete)
    best = best_so_far(complete[0].path)
    if best is not None and best.step in by_step:
        return by_step[best.step], f"{BY_TRAINER} ({best.metric}) among {len(complete)} complete checkpoints"
    name, is_greater = _best_metric(recipe)
    values = {
        line["step"]: line[name]
        for line in read_metrics(run)
        if line.get("step") in by_step and isinstance(line.get(name), (int, float))
    }
    if not values:
        raise usage_error(
            "merge-no-best",
            "no evaluation of a saved step is recorded, so no checkpoint is the best",
            where=Where(str(run.metrics_jsonl)),
            hint="choose one with `--step N`",
        )
    chosen = (max if is_greater else min)(values, key=lambda step: values[step])
    kind = "highest" if is_greater else "lowest"
    return by_step[
        chosen
    ], f"the {kind} {name} ({values[chosen]:.6g}) among {len(complete)} complete checkpoints"


def best_of_trainer(complete: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the complete checkpoint that the trainer has as the best in the newest one, which is the first;
    None if it has none, or that one is gone."""
    best = best_so_far(complete[0].path)
    return next((each for each in complete if best is not None and each.step == best.step), None)


def _best_by_score(run: RunDir, recipe: Recipe, complete: list[Checkpoint]) -> tuple[Checkpoint, str]:
    """Return the best checkpoint by a score of `evaluation:`. Raises: FailedError if no complete checkpoint
    has it."""
    name = training_value(recipe.training, "metric_for_best_model")
    if (best := best_by_score(run, recipe, complete)) is None:
        scored = CheckpointScores.read(run).evaluated
        found = dict.fromkeys(
            each for one in complete if (event := scored.get(one.manifest.identity)) for each in event.scores
        )
        message = f"no complete checkpoint has the score `{name}`, so none is the best"
        message += f"; their scores are {', '.join(found)}" if found else "; none of them has scores"
        hint = "choose one with `--step N`; `fsdp-tune status` shows the scores, and why evaluations failed"
        raise failed_error("merge-no-best", message, where=Where(str(run.metrics_jsonl)), hint=hint)
    kind = "highest" if training_value(recipe.training, "greater_is_better") else "lowest"
    return best.checkpoint, f"the {kind} {name} ({best.value:.6g}) among {len(complete)} complete checkpoints"


def _best_metric(recipe: Recipe | None) -> tuple[str, bool]:
    """Return the metric of a resolved recipe that chooses the best checkpoint, as metrics.jsonl names it, and
    whether greater is better; `eval_loss` without one."""
    if recipe is None:
        return "eval_loss", False
    name = str(training_value(recipe.training, "metric_for_best_model") or "loss")
    return f"eval_{name.removeprefix('eval_')}", bool(training_value(recipe.training, "greater_is_better"))
