"""Contradictions inside `training:`, and between it and `data.eval`. Part of `rules.RULES`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fsdp_tune.recipe.findings import Finding, Rule, given
from fsdp_tune.recipe.rules.trackers import TRACKERS
from fsdp_tune.recipe.scalars import shown
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.keys import closest
from fsdp_tune.recipe.schema.training_fields import training_value


def evaluation_has_data(recipe: Recipe) -> Iterator[Finding]:
    training = recipe.training
    if recipe.data.eval is not None:
        return
    needs = {
        f"eval_strategy: {training.eval_strategy}": training.eval_strategy in {"steps", "epoch"},
        "early_stopping": bool(training.early_stopping),
        **{key: bool(training_value(training, key)) for key in ("load_best_model_at_end", "eval_on_start")},
        "save_strategy: best": training_value(training, "save_strategy") == "best",
    }
    if what := next((what for what, is_set in needs.items() if is_set), None):
        keys = (f"training.{what.partition(':')[0]}", "data.eval", "data")
        hint = "give `data.eval`, for example `{fraction: 0.01}`"
        yield Finding("contradiction", keys, f"`training.{what}` needs evaluations, and there is no `data.eval`", hint)


def best_model_is_evaluated(recipe: Recipe) -> Iterator[Finding]:
    """Every evaluation must come with a save; otherwise the best evaluated step may have no checkpoint."""
    training = recipe.training
    loads_best, save = bool(training_value(training, "load_best_model_at_end")), training_value(training, "save_strategy")
    if recipe.data.eval is None or not (training.early_stopping or loads_best):
        return
    if training.eval_strategy == "no":
        key = "training.early_stopping" if training.early_stopping else "training.load_best_model_at_end"
        message = f"`{key}` needs evaluations, and `training.eval_strategy` is no"
        yield Finding("contradiction", (key, "training.eval_strategy"), message, "write `eval_strategy: auto`")
        return
    if not loads_best or save == "best":
        return
    needs, eval_steps = "`training.load_best_model_at_end` needs a save with every evaluation", training_value(training, "eval_steps")
    if save == "no":
        keys = ("training.save_strategy", "training.load_best_model_at_end")
        yield Finding("contradiction", keys, f"{needs}, and `save_strategy` is no", "write `save_strategy: steps`")
    elif training.eval_strategy not in {"auto", save}:
        keys = ("training.eval_strategy", "training.save_strategy")
        yield Finding("contradiction", keys, f"{needs}, and `save_strategy` is {save}", "write `eval_strategy: auto`")
    elif save == "steps" and eval_steps not in (None, training.save_steps):
        message = f"{needs}: `eval_steps` is {eval_steps:g}, and `save_steps` is {training.save_steps:g}"
        yield Finding("contradiction", ("training.eval_steps", "training.save_steps"), message, "write the same number for both")


def best_metric_is_measured(recipe: Recipe) -> Iterator[Finding]:
    metric = training_value(recipe.training, "metric_for_best_model")
    if metric is None or recipe.data.eval is None:
        return
    measured = measured_metrics(recipe, recipe.data.eval_labels)
    if metric.removeprefix("eval_") not in measured:
        message = f"`training.metric_for_best_model: {shown(metric)}` is not measured"
        keys, hint = ("training.metric_for_best_model", "data.eval"), f"measured are {', '.join(measured)}"
        yield Finding("contradiction", keys, message, hint)
    elif is_better_when_smaller(metric) and training_value(recipe.training, "greater_is_better"):
        message = f"`training.greater_is_better: true` would keep the worst checkpoint: `{metric}` is better when it is smaller"
        yield Finding("contradiction", ("training.greater_is_better", "training.metric_for_best_model"), message, "leave it out")


def measured_metrics(recipe: Recipe, labels: Collection[str]) -> list[str]:
    """Return the names of what evaluations measure, without `eval_`: over all sets, then of the sets `labels` if the recipe has several."""
    names, is_one = ["loss", "perplexity", *recipe.extensions.metrics], len(recipe.data.eval_labels) == 1
    return [*names, *(f"{label}_{name}" for label in labels for name in names if not is_one)]


def is_better_when_smaller(metric: str) -> bool:
    """Return whether a metric is a loss or a perplexity. A user's metric is taken for one by the same endings."""
    return metric.endswith(("loss", "perplexity"))


def trackers_are_known(recipe: Recipe) -> Iterator[Finding]:
    for name in recipe.training.report_to:
        if name in TRACKERS:
            continue
        near = closest(name, list(TRACKERS))
        hint = f"did you mean `{near}`?" if near else f"there are {', '.join(TRACKERS)}"
        if "," in name:
            hint = f"write a list: `[{', '.join(shown(part.strip()) for part in name.split(','))}]`"
        elif name == "all":
            hint = "list the trackers, for example `[tensorboard, wandb]`: `all` would depend on the installed packages"
        message = f"`training.report_to` names the tracker `{shown(name)}`, which transformers does not have"
        yield Finding("wrong-value", ("training.report_to",), message, hint)


TOKENS_KEY = "training.per_device_train_batch_tokens"


def token_budget_fits(recipe: Recipe) -> Iterator[Finding]:
    """Require a multiple of `max_length`: a forward pass of rows of that length is then the largest one, which `plan` predicts."""
    training, longest = recipe.training, recipe.data.max_length
    budget, rows = training.per_device_train_batch_tokens, training.per_device_train_batch_size
    if budget is None:
        return
    if recipe.data.packing:
        message = (
            f"`{TOKENS_KEY}: {budget}` forms batches by length, and with `data.packing: true` every row is as long as `data.max_length`"
        )
        yield Finding("contradiction", (TOKENS_KEY, "data.packing"), message, "keep one: packing leaves fewer slots to padding")
    elif training.global_batch_size is None:
        message = f"`{TOKENS_KEY}: {budget}` limits a micro-batch, and the size of a step is unset: `training.global_batch_size` is missing"
        yield Finding("missing-key", (TOKENS_KEY, "training"), message, "write it, in sequences: the learning rate depends on it")
    elif budget % longest:
        below, above = budget // longest * longest, -(-budget // longest) * longest
        small = ": the longest row would not fit" if budget < longest else ""
        message = f"`{TOKENS_KEY}: {budget}` is not a multiple of `data.max_length: {longest}`{small}"
        yield Finding("indivisible", (TOKENS_KEY, "data.max_length"), message, f"write {f'{below} or ' if below else ''}{above}")
    elif given(recipe, "training.per_device_train_batch_size") and rows != budget // longest:
        message = f"`{TOKENS_KEY}: {budget}` holds {budget // longest} rows of {longest} tokens, and more of shorter ones; "
        message += f"`training.per_device_train_batch_size` is {rows}"
        keys = ("training.per_device_train_batch_size", TOKENS_KEY)
        yield Finding("contradiction", keys, message, f"leave one of the two out, or write {budget // longest}")


def push_is_of_the_merged_model(recipe: Recipe) -> Iterator[Finding]:
    """Refuse settings of the Trainer's uploads, which are of checkpoints: the merged model is uploaded once, at the end."""
    training = recipe.training
    if not training.push_to_hub:
        return
    once = "`training.push_to_hub` uploads the merged model once, at the end"
    if given(recipe, "training.hub_strategy") and training_value(training, "hub_strategy") != "end":
        message = f"{once}, and `training.hub_strategy` is {training_value(training, 'hub_strategy')}"
        yield Finding("contradiction", ("training.hub_strategy", "training.push_to_hub"), message, "write `end`, or leave it out")
    if training_value(training, "hub_always_push"):
        yield Finding("contradiction", ("training.hub_always_push", "training.push_to_hub"), once, "leave `hub_always_push` out")
    if not recipe.merge.at_end:
        message = f"{once}, and `merge.at_end` is false"
        hint = "leave one of the two out; `fsdp-tune push RUN` uploads later"
        yield Finding("contradiction", ("training.push_to_hub", "merge.at_end"), message, hint)


TRAINING_RULES: tuple[Rule, ...] = (
    *(evaluation_has_data, best_model_is_evaluated, best_metric_is_measured),
    *(trackers_are_known, token_budget_fits, push_is_of_the_merged_model),
)
