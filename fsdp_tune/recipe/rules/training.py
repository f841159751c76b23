"""Contradictions inside `training:`, and between it and `data.eval`; arguments of optimizers.

The rules are part of `rules.contradictions.RULES`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fsdp_tune.core.units import shown
from fsdp_tune.recipe.rules.rates import UNREAD
from fsdp_tune.recipe.rules.trackers import TRACKERS
from fsdp_tune.recipe.schema.keys import Finding, Rule, closest, given, value_of
from fsdp_tune.recipe.schema.optimizers import (
    OPTIMIZER_FIELDS,
    OPTIMIZERS,
    STATE_DTYPE,
    STOCHASTIC,
    TRUE_WORDS,
    optimizer_name,
    optimizer_options,
    pairs_of,
    state_bits,
)
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

_KEY = "training.optim_args"
_KEYS_OF_ALL = {"weight_decay": "training.weight_decay", "lr": "training.learning_rate"}
_KEYS_OF_ADAMW = {
    "betas": "training.adam_beta1` and `training.adam_beta2",
    "beta1": "training.adam_beta1",
    "beta2": "training.adam_beta2",
    "eps": "training.adam_epsilon",
}
"""Arguments of torch's classes that have a key here. In `optim_args` they would have no effect: each parameter group has its own value."""


def optimizer_arguments_exist(recipe: Recipe) -> Iterator[Finding]:
    """Refuse unknown arguments, which transformers would ignore."""
    name = optimizer_name(recipe.training)
    if name not in OPTIMIZERS:
        return  # `training.optim` itself is refused
    arguments = OPTIMIZERS[name].arguments
    for word, value in pairs_of(recipe.training):
        if word not in arguments:
            near, key = closest(word, list(arguments)), _key_of(name, word)
            hint = f"did you mean `{near}`?" if near else f"it takes {', '.join(arguments) or 'nothing'}"
            hint = f"write `{key}`" if key else hint
            yield Finding("wrong-value", (_KEY,), f"`{_KEY}` has `{shown(word)}`, which `training.optim: {name}` does not take", hint)
            continue
        try:
            arguments[word].read(value or "")
        except ValueError:
            given = "has no value" if value is None else f"is `{shown(value)}`"
            yield Finding("wrong-value", (_KEY,), f"`{_KEY}`: `{word}` {given}; it takes {arguments[word].description}", f'"{word}=…"')


def _key_of(optimizer: str, argument: str) -> str | None:
    """Return the key of the recipe that sets an argument of torch's class."""
    keys = _KEYS_OF_ALL | (_KEYS_OF_ADAMW if optimizer.startswith("adamw") or optimizer == "muon" else {})
    return keys.get(argument)


def optimizer_reads_its_options(recipe: Recipe) -> Iterator[Finding]:
    """Refuse fields of TrainingArguments that do not change the arguments of the optimizer's class.

    `model.optim.trial` finds what the class itself refuses or ignores.
    """
    name = optimizer_name(recipe.training)
    if name not in OPTIMIZERS or any(optimizer_arguments_exist(recipe)):
        return
    for field in OPTIMIZER_FIELDS:
        key = f"training.{field}"
        changed = recipe.training.model_copy(update={field: object()})
        if given(recipe, key) and value_of(recipe, key) is not None and optimizer_options(changed) == optimizer_options(recipe.training):
            yield Finding(UNREAD, (key, "training.optim"), f"`training.optim: {name}` does not read `{key}`", "leave it out")


def _given(recipe: Recipe) -> dict[str, str]:
    """Return the arguments as text, of any optimizer, valid or not."""
    return {word: value or "" for word, value in pairs_of(recipe.training)}


def rounds_stochastically(recipe: Recipe) -> bool:
    """Return whether bf16 weights keep, on average, updates that are smaller than their last bit."""
    return _given(recipe).get(STOCHASTIC, "false").lower() in TRUE_WORDS


def optimizer_limits(recipe: Recipe) -> Iterator[Finding]:
    name, in_blocks = optimizer_name(recipe.training), state_bits(recipe.training) is not None
    if rounds_stochastically(recipe) and recipe.model.dtype != "bf16":
        message = f"`{STOCHASTIC}=true` rounds parameters that are stored in bf16, and `model.dtype` is {recipe.model.dtype}"
        yield Finding("contradiction", (_KEY, "model.dtype"), message, "write `model.dtype: bf16`, or leave it out")
    lean = [word for word in (STATE_DTYPE, STOCHASTIC) if word in _given(recipe)]
    if recipe.fsdp.version == 1 and recipe.is_sharded and (in_blocks or lean):
        # The flat parameters of FSDP1 do not keep the offsets of tensors, and its checkpoints of state support no blocks.
        key, what = ("training.optim", f"`training.optim: {name}`") if in_blocks else (_KEY, f"`{lean[0]}`")
        message = f"{what} needs FSDP2, and the recipe sets `fsdp.version: 1`"
        yield Finding("contradiction", (key, "fsdp.version"), message, "use `fsdp.version: 2`")
    if recipe.fsdp.version == 1 and recipe.is_sharded and name in OPTIMIZERS and OPTIMIZERS[name].needs_shapes:
        message = f"`training.optim: {name}` needs FSDP2: `fsdp.version: 1` joins the parameters of a unit in one flat tensor without rows"
        yield Finding("contradiction", ("training.optim", "fsdp.version"), message, "use `fsdp.version: 2`")
    if name == "muon" and recipe.lora is not None and recipe.lora.target_parameters:
        message = (
            "`training.optim: muon` with `lora.target_parameters` is not supported: PEFT keeps the factors of all experts in one matrix"
        )
        yield Finding("contradiction", ("training.optim", "lora.target_parameters"), message, "use `optim: adamw_torch_fused`")
    if in_blocks and recipe.fsdp.state_dict_type == "FULL_STATE_DICT":
        message = (
            f"`training.optim: {name}` keeps blocks with a scale each, and `fsdp.state_dict_type: FULL_STATE_DICT` writes plain tensors"
        )
        yield Finding("contradiction", ("training.optim", "fsdp.state_dict_type"), message, "use SHARDED_STATE_DICT")
    if in_blocks and rounds_stochastically(recipe) and (recipe.is_hybrid or not recipe.is_sharded):
        message = (
            f"`{STOCHASTIC}=true` under `training.optim: {name}` draws independently on each rank, and the replicas of "
            f"`fsdp.sharding_strategy: {recipe.fsdp.sharding_strategy}` would drift apart"
        )
        hint = "use FULL_SHARD or SHARD_GRAD_OP, or `optim: adamw_torch_fused`, which draws the same on all ranks"
        yield Finding("contradiction", (_KEY, "fsdp.sharding_strategy"), message, hint)


def parameter_groups_change_something(recipe: Recipe) -> Iterator[Finding]:
    key = "training.parameter_groups"
    for index, group in enumerate(recipe.training.parameter_groups):
        if not group.match:
            yield Finding("wrong-value", (key,), f"`{key}[{index}].match` is empty", 'write patterns of names, such as `["*.layers.0.*"]`')
        if group.learning_rate is None and group.weight_decay is None:
            message = f"`{key}[{index}]` sets neither `learning_rate` nor `weight_decay`"
            yield Finding("missing-key", (key,), message, "set one of them, or leave the entry out")


OPTIMIZER_RULES: tuple[Rule, ...] = (
    optimizer_arguments_exist,
    optimizer_reads_its_options,
    optimizer_limits,
    parameter_groups_change_something,
)


def evaluation_has_data(recipe: Recipe) -> Iterator[Finding]:
    training = recipe.training
    if recipe.data.eval is not None:
        return
    needs = {
        f"eval_strategy: {training.eval_strategy}": training.eval_strategy in {"steps", "epoch"},
        "early_stopping": bool(training.early_stopping),
        "load_best_model_at_end": bool(training_value(training, "load_best_model_at_end")) and not recipe.best_by_score,
        "eval_on_start": bool(training_value(training, "eval_on_start")),
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
    if recipe.data.eval is None or not (training.early_stopping or loads_best) or recipe.best_by_score:
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
    metric, is_greater = (training_value(recipe.training, name) for name in ("metric_for_best_model", "greater_is_better"))
    if metric is None and is_greater:
        message = "`training.greater_is_better: true` would keep the worst checkpoint: without `metric_for_best_model`, eval_loss chooses"
        hint = "leave it out, or name the metric"
        yield Finding("contradiction", ("training.greater_is_better", "training.metric_for_best_model"), message, hint)
    if metric is None or recipe.data.eval is None or recipe.best_by_score:
        return
    measured = measured_metrics(recipe, recipe.data.eval_labels)
    if metric.removeprefix("eval_") not in measured:
        message = f"`training.metric_for_best_model: {shown(metric)}` is not measured"
        keys, hint = ("training.metric_for_best_model", "data.eval"), f"measured are {', '.join(measured)}"
        yield Finding("contradiction", keys, message, hint)
    elif is_better_when_smaller(metric) and is_greater:
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


def dft_is_of_plain_targets(recipe: Recipe) -> Iterator[Finding]:
    """The weight of a token is the probability of its target, which a smoothed loss does not give; Liger's kernel returns only the sum."""
    if recipe.training.loss != "dft":
        return
    smoothing = training_value(recipe.training, "label_smoothing_factor")
    if smoothing:
        message = f"`training.loss: dft` weights a token by its target, and `label_smoothing_factor: {smoothing}` has no single target"
        keys = ("training.loss", "training.label_smoothing_factor")
        yield Finding("contradiction", keys, message, "leave `label_smoothing_factor` out")
    if recipe.kernels.loss == "liger":
        message = "`kernels.loss: liger` returns only the sum of the losses, and `training.loss: dft` weights each token"
        yield Finding("contradiction", ("kernels.loss", "training.loss"), message, "write `kernels: {loss: chunked}`, or leave it at auto")


TRAINING_RULES: tuple[Rule, ...] = (
    *(evaluation_has_data, best_model_is_evaluated, best_metric_is_measured),
    *(trackers_are_known, token_budget_fits, push_is_of_the_merged_model, dft_is_of_plain_targets),
)
