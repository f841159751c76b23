"""Contradictions inside `evaluation:`, and between it and what saves checkpoints and chooses the best one.

The rules are part of `rules.contradictions.RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsdp_tune.core.units import shown
from fsdp_tune.recipe.schema.evaluation import EvaluationSet
from fsdp_tune.recipe.schema.keys import Finding, Rule
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import BUILDERS, DataSource
from fsdp_tune.recipe.schema.training_fields import training_value

_KEY = "evaluation.sets"
_LABEL = re.compile(r"[\w.-]+")
_TASK_FILES = (".yaml", ".yml")
_OF_TRAINING = ("weight", "repeats", "loader", "loader_options")
"""Keys of a source that say how often, and by which extension, rows of the training are read."""
_OF_ANSWERS = ("answer", "max_new_tokens")


def sets_are_clear(recipe: Recipe) -> Iterator[Finding]:
    """Scores are named by the label of their set, or by the task: no two may have one name."""
    names = dict.fromkeys(recipe.evaluation.tasks, "evaluation.tasks")
    for task in recipe.evaluation.tasks:
        if not _LABEL.fullmatch(task) or task.lower().endswith(_TASK_FILES):
            message = f"`evaluation.tasks` names `{shown(task)}`, and names of tasks have letters, digits, `_`, `.` and `-`; "
            message += "lm_eval would run the code that a file or folder of tasks names"
            hint = "name a task that lm_eval has; for your own, `lm_eval run --include_path` scores the merged model"
            yield Finding("wrong-value", ("evaluation.tasks",), message, hint)
    for index, entry in enumerate(recipe.evaluation.sets):
        key, label = f"{_KEY}[{index}]", entry.set_label
        if label in names:
            message = f"`{key}` and `{names[label]}` are both named `{shown(label)}`"
            yield Finding("contradiction", (f"{key}.label", key, names[label]), message, f"write `label:` in `{key}`")
        elif not _LABEL.fullmatch(label):
            message = f"`{key}` is named `{shown(label)}`, and names of scores have letters, digits, `_`, `.` and `-`"
            yield Finding("wrong-value", (f"{key}.label", key), message, "write another `label:`")
        names[label] = key
        yield from _keys_of_set(key, entry)


def builder_has_files(key: str, source: DataSource) -> Iterator[Finding]:
    if source.path in BUILDERS and source.data_files is None:
        yield Finding("missing-key", (f"{key}.path",), f"`path: {source.path}` reads files: `{key}.data_files` is missing")


def _keys_of_set(key: str, entry: EvaluationSet) -> Iterator[Finding]:
    yield from builder_has_files(key, entry)
    changed = entry.model_dump(exclude_defaults=True).keys()  # a resolved recipe has every key
    for name in _OF_TRAINING:
        if name in changed:
            yield Finding("contradiction", (f"{key}.{name}",), f"`{key}.{name}` is for training rows", "leave it out")
    if entry.metric != "exact_match":
        for name in _OF_ANSWERS:
            if name in changed:
                message = f"`{key}.{name}` is read by exact_match, and the metric is {entry.metric}"
                yield Finding("contradiction", (f"{key}.{name}", f"{key}.metric"), message, "write `metric: exact_match`, or leave it out")


def evaluation_has_checkpoints(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.evaluation.is_on:
        return
    if training_value(recipe.training, "save_strategy") == "no":
        message = "`evaluation:` evaluates saved checkpoints, and `training.save_strategy` is no"
        yield Finding("contradiction", ("evaluation", "training.save_strategy"), message, "write `save_strategy: steps`")
    if recipe.has_own_directories:
        message = "`evaluation:` reads complete checkpoints, and with `launch.shared_directory: false` no machine has one"
        yield Finding("contradiction", ("evaluation", "launch.shared_directory"), message, "use a shared directory, or leave it out")
    every, save = recipe.evaluation.every, recipe.training.save_steps
    if every is not None and training_value(recipe.training, "save_strategy") == "steps" and isinstance(save, int) and every % save:
        message = (
            f"`evaluation.every: {every}` is not a multiple of `training.save_steps: {save}`, so some of these steps have no checkpoint"
        )
        yield Finding("indivisible", ("evaluation.every", "training.save_steps"), message, f"write a multiple of {save}")


def scores_choose_alone(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what would have to know a score while the run continues, and names of scores that no evaluation has."""
    metric = training_value(recipe.training, "metric_for_best_model")
    key = "training.metric_for_best_model"
    if not recipe.best_by_score:
        if isinstance(metric, str) and "/" in metric:
            known = [*recipe.evaluation.scores, *(f"{task}/…" for task in recipe.evaluation.tasks)]
            message = f"`{key}: {shown(metric)}` is not a score of `evaluation:`"
            yield Finding("contradiction", (key, "evaluation"), message, f"scores are {', '.join(known) or 'those of its sets'}")
        return
    why = f"`{key}: {metric}` is known after its checkpoint was evaluated, while the run continues"
    if recipe.training.early_stopping is not None:
        message = f"{why}, so `training.early_stopping` cannot end the run by it"
        yield Finding("contradiction", ("training.early_stopping", key), message, "leave one of them out")
    if training_value(recipe.training, "save_strategy") == "best":
        message = f"{why}, so `training.save_strategy: best` cannot save by it"
        yield Finding("contradiction", ("training.save_strategy", key), message, "write `save_strategy: steps`")
    if metric not in recipe.evaluation.scores:
        if training_value(recipe.training, "greater_is_better") is None:
            message = f"`{key}: {metric}` is a score of lm_eval, and `training.greater_is_better` is missing"
            hint = "write true for accuracies and matches, false for perplexities, bits_per_byte, brier_score and error rates"
            yield Finding("missing-key", (key,), message, hint)
    else:
        is_match = str(metric).endswith("/exact_match")
        if training_value(recipe.training, "greater_is_better") is (not is_match):
            given, better = ("false", "greater") if is_match else ("true", "smaller")
            message = f"`training.greater_is_better: {given}` would keep the worst checkpoint: `{metric}` is better when it is {better}"
            yield Finding("contradiction", ("training.greater_is_better", key), message, "leave it out")


def best_is_not_merged(recipe: Recipe) -> Iterator[Finding]:
    """A metric alone keeps the best checkpoint. In other metrics that is transformers' meaning; scores have no other use."""
    key, loads = "training.metric_for_best_model", "training.load_best_model_at_end"
    if recipe.best_by_score and recipe.merge.at_end and not training_value(recipe.training, "load_best_model_at_end"):
        message = f"`{key}` keeps the best checkpoint, and without `{loads}` the last one is merged at the end"
        yield Finding("best-not-merged", (key,), message, f"`--set {loads}=true` merges the best one")


def best_is_evaluated(recipe: Recipe, steps: int) -> Iterator[Finding]:
    """Yield a mistake if `evaluation.every` leaves out every checkpoint of a run of `steps`, so that none could be the best."""
    every = recipe.evaluation.every
    if recipe.best_by_score and every is not None and every > steps:
        message = f"the run has {steps:,} steps, and `evaluation.every: {every}` evaluates no checkpoint of them, so none is the best"
        yield Finding("contradiction", ("evaluation.every", "training.metric_for_best_model"), message, f"write {steps} or less")


def best_is_evaluated_in_time(recipe: Recipe) -> Iterator[Finding]:
    """Require saves of known steps where `evaluation.every` chooses among them and the best one is wanted."""
    strategy, save = training_value(recipe.training, "save_strategy"), recipe.training.save_steps
    if recipe.best_by_score and recipe.evaluation.every is not None and (strategy == "epoch" or (strategy == "steps" and save < 1)):
        saves = "save_strategy: epoch" if strategy == "epoch" else f"save_steps: {save:g}"
        message = f"`evaluation.every` chooses the steps to evaluate, and with `training.{saves}` no saved step may be one of them"
        keys = ("evaluation.every", f"training.{saves.partition(':')[0]}")
        yield Finding("contradiction", keys, message, "leave `every` out, or write `save_steps` as a number of steps")
    if (steps := training_value(recipe.training, "max_steps")) > 0:
        yield from best_is_evaluated(recipe, steps)


def evaluation_keys_are_read(recipe: Recipe) -> Iterator[Finding]:
    evaluation = recipe.evaluation
    if evaluation.task_rows is not None and not evaluation.tasks:
        yield Finding("contradiction", ("evaluation.task_rows",), "`evaluation.task_rows` limits tasks, and there are none", "leave it out")
    lonely = [name for name, value in evaluation.model_dump(exclude_defaults=True).items() if value and name != "task_rows"]
    if lonely and not evaluation.is_on:
        message = f"`evaluation.{lonely[0]}` is set, and there is nothing to evaluate"
        hint = "add `sets: [{path: test.jsonl}]`, or leave the section out"
        yield Finding("missing-key", (f"evaluation.{lonely[0]}", "evaluation"), message, hint)


EVALUATION_RULES: tuple[Rule, ...] = (
    sets_are_clear,
    evaluation_has_checkpoints,
    scores_choose_alone,
    best_is_evaluated_in_time,
    evaluation_keys_are_read,
)
