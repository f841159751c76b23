"""Schedules of the learning rate: their arguments, and the rates that they give over the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_tune.recipe.findings import Finding, Rule
from fsdp_tune.recipe.scalars import shown
from fsdp_tune.recipe.schedule import Rates, nominal_steps, rates, schedule_arguments
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.keys import closest
from fsdp_tune.recipe.schema.training_fields import training_value


def warmup_ends(recipe: Recipe) -> Iterator[Finding]:
    steps, warmup = training_value(recipe.training, "max_steps"), recipe.training.warmup_steps
    if 0 < steps <= warmup and warmup >= 1:
        message = f"`training.warmup_steps: {warmup:g}` is at least `training.max_steps: {steps}`: the learning rate would never be reached"
        yield Finding("contradiction", ("training.warmup_steps", "training.max_steps"), message, "warm up for fewer steps")


SCHEDULE_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "constant": (),
    "constant_with_warmup": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
}
"""Arguments of transformers' schedules, which its `get_scheduler` passes on or, for constant ones, ignores."""
_SCHEDULE_NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Exactly one of them is needed."""
_SCHEDULE_KEYS = ("training.lr_scheduler_kwargs", "training.lr_scheduler_type")


def schedule_has_its_arguments(recipe: Recipe) -> Iterator[Finding]:
    kind, arguments = training_value(recipe.training, "lr_scheduler_type"), training_value(recipe.training, "lr_scheduler_kwargs")
    takes, needs = SCHEDULE_ARGUMENTS.get(kind), _SCHEDULE_NEEDS.get(kind, ())
    if isinstance(arguments, str) or takes is None:
        return
    words: list[str] = list(arguments or {})
    for word in words:
        if word not in takes:
            near = closest(word, list(takes))
            hint = f"did you mean `{near}`?" if near else f"it takes {', '.join(takes) or 'no arguments'}"
            message = f"`{_SCHEDULE_KEYS[0]}` has `{shown(word)}`, which `{_SCHEDULE_KEYS[1]}: {kind}` does not take"
            yield Finding("wrong-value", _SCHEDULE_KEYS, message, hint)
    found = [word for word in needs if word in words]
    if needs and not found:
        message = f"`{_SCHEDULE_KEYS[1]}: {kind}` needs {' or '.join(f'`{name}`' for name in needs)} in `{_SCHEDULE_KEYS[0]}`"
        yield Finding("missing-key", _SCHEDULE_KEYS[::-1], message)
    if len(found) > 1:
        message = f"`{_SCHEDULE_KEYS[0]}` has {' and '.join(f'`{name}`' for name in found)}, which both set the lowest learning rate"
        yield Finding("contradiction", _SCHEDULE_KEYS, message, "leave one of them out")


_WORDS = ("warmup_type", "decay_type")
_COUNTS = ("num_decay_steps", "num_stable_steps", "timescale")
_WAVES = {"cosine_with_restarts": 1.0}
"""Highest `num_cycles` of a schedule that only falls; of the others it is 0.5, their default."""
_OWN_PEAK = "cosine_warmup_with_min_lr"
"""Begins its fall one step early, so that it may peak below the rate."""


def schedule_arguments_are_numbers(recipe: Recipe) -> Iterator[Finding]:
    for word, value in _known_arguments(recipe).items():
        if word in _WORDS:
            continue
        wanted = "a whole number of steps" if word in _COUNTS else "a number"
        if not _is_number(value) or (word in _COUNTS and (value < (word == "timescale") or value != int(value))):
            message = f"`{_SCHEDULE_KEYS[0]}` has `{word}: {shown(str(value))}`, which is not {wanted}"
            yield Finding("wrong-value", _SCHEDULE_KEYS, message, f"write {wanted}{', above 0' if word == 'timescale' else ''}")


def _known_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments that the schedule takes; others are found elsewhere."""
    takes = SCHEDULE_ARGUMENTS.get(training_value(recipe.training, "lr_scheduler_type"), ())
    return {word: value for word, value in schedule_arguments(recipe).items() if word in takes}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def schedule_keeps_to_the_rate(recipe: Recipe) -> Iterator[Finding]:
    """Compute the learning rate over the run. Where its steps depend on the data, see `schedule_of_steps`."""
    steps = training_value(recipe.training, "max_steps")
    yield from schedule_of_steps(recipe, steps if steps > 0 else nominal_steps(recipe))


def schedule_of_steps(recipe: Recipe, steps: int) -> Iterator[Finding]:
    """Yield what is wrong with the rates of a run of `steps`: they raise, exceed the rate, never reach it, or are 0 or below."""
    arguments, kind = training_value(recipe.training, "lr_scheduler_kwargs"), training_value(recipe.training, "lr_scheduler_type")
    sound = not any(schedule_has_its_arguments(recipe)) and not any(schedule_arguments_are_numbers(recipe)) and not any(warmup_ends(recipe))
    if not sound or isinstance(arguments, str) or steps <= 1:  # one step with a warm-up is a trial, at a rate of 0
        return
    keys = (*_SCHEDULE_KEYS, "training.learning_rate") if arguments else _SCHEDULE_KEYS[1:]
    try:
        found = rates(recipe, steps)
    except (ValueError, ArithmeticError, TypeError) as error:
        message = f"`{_SCHEDULE_KEYS[1]}: {kind}` with these arguments is not a schedule: {error}"
        yield Finding("wrong-value", keys, message, _lower(arguments))
        return
    if found is not None and (wrong := _wrong_rates(recipe, found)):
        yield Finding("wrong-schedule", keys, f"over {steps:,} steps the learning rate {wrong} ({found})", _lower(arguments))


def _wrong_rates(recipe: Recipe, found: Rates) -> str | None:
    """Return what is wrong with rates, if anything."""
    peak, kind = recipe.training.learning_rate, training_value(recipe.training, "lr_scheduler_type")
    cycles = _known_arguments(recipe).get("num_cycles", 0)
    if found.peak > peak * (1 + 1e-9) or found.start > peak * (1 + 1e-9) or found.end > peak * (1 + 1e-9):
        return f"rises to {max(found.peak, found.start, found.end):.3g}, above `training.learning_rate: {peak:.3g}`"
    if found.lowest < 0:
        return f"falls to {found.lowest:.3g}, below 0"
    if found.peak < peak * (0.5 if kind == _OWN_PEAK else 1 - 1e-9):
        return f"never reaches `training.learning_rate: {peak:.3g}`"
    if found.rises_at is not None and abs(cycles) <= _WAVES.get(kind, 0.5):
        return f"rises again at step {found.rises_at:,}, after its peak"
    if found.idle_steps > 1 and peak > 0:
        return f"is 0 for the last {found.idle_steps:,} steps, which train nothing"
    return None


def _lower(arguments: Mapping[str, Any] | None) -> str:
    """Return a hint on the arguments that are given."""
    given = arguments or {}
    for name, hint in (
        ("min_lr", "`min_lr` is a learning rate below the highest; a share of it is `min_lr_rate`, for example 0.1"),
        ("min_lr_rate", "`min_lr_rate` is a share of the learning rate, from 0 to 1"),
        ("lr_end", "`lr_end` is a learning rate below the highest"),
        ("warmup_lr_rate", "`warmup_lr_rate` is a share of the learning rate, from 0 to 1"),
        (
            "num_decay_steps",
            "warm-up, `num_stable_steps` and `num_decay_steps` are at most the steps of the run; `min_lr_ratio` is from 0 to 1",
        ),
        ("power", "`power` is above 0"),
    ):
        if name in given:
            return hint
    return "correct the arguments of the schedule"


SCHEDULE_RULES: tuple[Rule, ...] = (*(warmup_ends, schedule_has_its_arguments, schedule_arguments_are_numbers, schedule_keeps_to_the_rate),)
"""Part of `rules.RULES`."""
