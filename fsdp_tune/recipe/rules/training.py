"""Contradictions inside `training:`, and between it and `data.eval`. Part of `rules.RULES`."""

from __future__ import annotations

from fsdp_tune.recipe.findings import Finding, Rule, given
from fsdp_tune.recipe.scalars import shown
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.keys import closest
from fsdp_tune.recipe.schema.training_fields import training_value


def warmup_ends(recipe: Recipe) -> Finding | None:
    steps, warmup = training_value(recipe.training, "max_steps"), recipe.training.warmup_steps
    if steps > 0 and warmup >= 1 and warmup >= steps:
        message = (
            f"`training.warmup_steps: {warmup:g}` leaves nothing of `training.max_steps: {steps}`: the learning rate would never be reached"
        )
        return Finding("contradiction", ("training.warmup_steps", "training.max_steps"), message, "warm up for fewer steps")
    return None


def evaluation_needs_data(recipe: Recipe) -> Finding | None:
    if recipe.data.eval is not None:
        return None
    hint = "give `data.eval`, for example `{fraction: 0.01}`"
    if recipe.training.eval_strategy in {"steps", "epoch"}:
        message = f"`training.eval_strategy: {recipe.training.eval_strategy}` evaluates, and there is no `data.eval`"
        return Finding("contradiction", ("training.eval_strategy", "data.eval", "data"), message, hint)
    for key in ("early_stopping", "load_best_model_at_end", "eval_on_start"):
        value = recipe.training.early_stopping if key == "early_stopping" else training_value(recipe.training, key)
        if value:
            return Finding(
                "contradiction",
                (f"training.{key}", "data.eval", "data"),
                f"`training.{key}` needs evaluations, and there is no `data.eval`",
                hint,
            )
    if training_value(recipe.training, "save_strategy") == "best":
        return Finding(
            "contradiction",
            ("training.save_strategy",),
            "`training.save_strategy: best` needs evaluations, and there is no `data.eval`",
            hint,
        )
    return None


def best_model_is_measured(recipe: Recipe) -> Finding | None:
    """Every evaluation must come with a save: the best evaluated step is else one without a checkpoint."""
    training = recipe.training
    loads_best = bool(training_value(training, "load_best_model_at_end"))
    if recipe.data.eval is None or not (training.early_stopping or loads_best):
        return None
    if training.eval_strategy == "no":
        wants = "early_stopping" if training.early_stopping else "load_best_model_at_end"
        message = f"`training.{wants}` needs evaluations, and `training.eval_strategy` is no"
        return Finding("contradiction", (f"training.{wants}", "training.eval_strategy"), message, "write `eval_strategy: auto`")
    return _every_evaluation_is_saved(recipe) if loads_best else None


def _every_evaluation_is_saved(recipe: Recipe) -> Finding | None:
    training = recipe.training
    save, eval_steps = training_value(training, "save_strategy"), training_value(training, "eval_steps")
    needs = "`training.load_best_model_at_end` needs a save with every evaluation"
    if save == "best":
        return None
    if save == "no":
        keys = ("training.save_strategy", "training.load_best_model_at_end")
        return Finding("contradiction", keys, f"{needs}, and `save_strategy` is no", "write `save_strategy: steps`")
    if training.eval_strategy not in {"auto", save}:
        keys = ("training.eval_strategy", "training.save_strategy")
        return Finding("contradiction", keys, f"{needs}, and `save_strategy` is {save}", "write `eval_strategy: auto`")
    if save == "steps" and eval_steps not in (None, training.save_steps):
        message = f"{needs}: `eval_steps` is {eval_steps:g}, and `save_steps` is {training.save_steps:g}"
        return Finding("contradiction", ("training.eval_steps", "training.save_steps"), message, "write the same number for both")
    return None


def best_metric_is_measured(recipe: Recipe) -> Finding | None:
    metric = training_value(recipe.training, "metric_for_best_model")
    if metric is None or recipe.data.eval is None:
        return None
    labels = [source.label for source in recipe.data.eval if source.label] if isinstance(recipe.data.eval, list) else []
    measured = ["loss", "eval_loss", *(f"eval_{label}_loss" for label in labels), *(f"{label}_loss" for label in labels)]
    if metric not in measured:
        message = f"`training.metric_for_best_model: {shown(metric)}` is not measured: evaluation is by loss"
        names = ", ".join(measured)
        return Finding("contradiction", ("training.metric_for_best_model", "data.eval"), message, f"measured are {names}")
    if training_value(recipe.training, "greater_is_better"):
        message = "`training.greater_is_better: true` would keep the worst: a loss is better when it is smaller"
        return Finding("contradiction", ("training.greater_is_better", "training.metric_for_best_model"), message, "leave it out")
    return None


_SCHEDULE_NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}


def schedule_has_its_arguments(recipe: Recipe) -> Finding | None:
    kind, given_arguments = training_value(recipe.training, "lr_scheduler_type"), training_value(recipe.training, "lr_scheduler_kwargs")
    needs = _SCHEDULE_NEEDS.get(kind, ())
    if not needs or isinstance(given_arguments, str) or set(needs) & set(given_arguments or {}):
        return None
    message = f"`training.lr_scheduler_type: {kind}` needs {' or '.join(f'`{name}`' for name in needs)} in `training.lr_scheduler_kwargs`"
    return Finding("missing-key", ("training.lr_scheduler_type", "training.lr_scheduler_kwargs"), message)


# transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK, with the module that each imports.
TRACKERS = {
    "azure_ml": "azureml",
    "clearml": "clearml",
    "codecarbon": "codecarbon",
    "comet_ml": "comet_ml",
    "dagshub": "dagshub",
    "dvclive": "dvclive",
    "flyte": "flytekit",
    "kubeflow": "kubeflow",
    "mlflow": "mlflow",
    "neptune": "neptune",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}


def trackers_are_known(recipe: Recipe) -> Finding | None:
    for name in recipe.training.report_to:
        if name not in TRACKERS:
            near = closest(name, list(TRACKERS))
            hint = f"did you mean `{near}`?" if near else f"there are {', '.join(TRACKERS)}"
            if "," in name:
                hint = f"write a list: `[{', '.join(shown(part.strip()) for part in name.split(','))}]`"
            elif name == "all":
                hint = "name each one, for example `[tensorboard, wandb]`: a run must not report to whatever is installed"
            message = f"`training.report_to` names the tracker `{shown(name)}`, which transformers does not know"
            return Finding("wrong-value", ("training.report_to",), message, hint)
    return None


TOKENS_KEY = "training.per_device_train_batch_tokens"


def token_budget_fits(recipe: Recipe) -> Finding | None:
    """A budget is of whole rows of `max_length`: then a forward of such rows is the largest there is, and that is what is planned."""
    training, longest = recipe.training, recipe.data.max_length
    budget = training.per_device_train_batch_tokens
    if budget is None:
        return None
    if recipe.data.packing:
        message = (
            f"`{TOKENS_KEY}: {budget}` cuts batches by length, and with `data.packing: true` all rows are as long as `data.max_length`"
        )
        return Finding("contradiction", (TOKENS_KEY, "data.packing"), message, "keep one: packing leaves fewer slots to padding")
    if training.global_batch_size is None:
        message = (
            f"`{TOKENS_KEY}: {budget}` says how a step is cut, and nothing says how large it is: `training.global_batch_size` is missing"
        )
        return Finding("missing-key", (TOKENS_KEY, "training"), message, "write it, in sequences: the learning rate goes by it")
    if budget % longest:
        below, above = budget // longest * longest, -(-budget // longest) * longest
        small = ": the longest row would not fit" if budget < longest else ""
        message = f"`{TOKENS_KEY}: {budget}` is no multiple of `data.max_length: {longest}`{small}"
        hint = f"write {f'{below} or ' if below else ''}{above}"
        return Finding("indivisible", (TOKENS_KEY, "data.max_length"), message, hint)
    rows = budget // longest
    if given(recipe, "training.per_device_train_batch_size") and training.per_device_train_batch_size != rows:
        message = f"`{TOKENS_KEY}: {budget}` is {rows} rows of {longest} tokens, and more that are shorter; "
        message += f"`training.per_device_train_batch_size` says {training.per_device_train_batch_size}"
        return Finding(
            "contradiction", ("training.per_device_train_batch_size", TOKENS_KEY), message, f"leave one of the two out, or write {rows}"
        )
    return None


TRAINING_RULES: tuple[Rule, ...] = (
    warmup_ends,
    evaluation_needs_data,
    best_model_is_measured,
    best_metric_is_measured,
    schedule_has_its_arguments,
    trackers_are_known,
    token_budget_fits,
)
