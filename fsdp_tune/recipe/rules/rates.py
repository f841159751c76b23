"""Rules on the schedule of the learning rate: its arguments exist and are read, and the rate does over the
run what its kind says.

The schedule is computed step by step (`recipe.schedule`), at most at some thousand steps. An argument is read
if another value of it changes a rate; the same holds for the warm-up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from fsdp_tune.core.units import shown
from fsdp_tune.recipe.schedule import (
    LEVEL_KINDS,
    SCHEDULE_ARGUMENTS,
    Rates,
    nominal_steps,
    rates,
    sampled_steps,
    schedule_arguments,
    schedule_of,
    warmup_steps,
)
from fsdp_tune.recipe.schema.keys import Finding, Rule, closest
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

UNREAD = "unread-option"
"""Code of a finding about an option that has no effect on the run. An import leaves such an option out."""
_ARGUMENTS, _KIND, _WARMUP = (
    "training.lr_scheduler_kwargs",
    "training.lr_scheduler_type",
    "training.warmup_steps",
)
_SCHEDULE_KEYS = (_ARGUMENTS, _KIND)
_NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Exactly one of them is needed."""
_SHAPES = ("linear", "cosine", "1-sqrt")
_WORDS = ("warmup_type", "decay_type")
_COUNTS = ("num_decay_steps", "num_stable_steps", "timescale")
_WAVES = {"cosine_with_restarts": 1.0}
"""Highest `num_cycles` of a schedule that only falls; of the others it is 0.5, their default."""
_OWN_PEAK = "cosine_warmup_with_min_lr"
"""Begins its fall one step early, so that it may peak below the rate, and ends it a step before the
others."""


def warmup_ends(recipe: Recipe) -> Iterator[Finding]:
    steps, warmup = training_value(recipe.training, "max_steps"), recipe.training.warmup_steps
    if 0 < steps <= warmup and warmup >= 1:
        message = (
            f"`{_WARMUP}: {warmup:g}` is at least `training.max_steps: {steps}`: the learning rate would "
            "never be reached"
        )
        yield Finding("contradiction", (_WARMUP, "training.max_steps"), message, "warm up for fewer steps")


def arguments_exist(recipe: Recipe) -> Iterator[Finding]:
    kind, arguments = _kind(recipe), training_value(recipe.training, "lr_scheduler_kwargs")
    takes, needs = SCHEDULE_ARGUMENTS.get(kind), _NEEDS.get(kind, ())
    if isinstance(arguments, str):
        yield Finding(
            "wrong-value",
            (_ARGUMENTS,),
            f"`{_ARGUMENTS}` is text; it takes a mapping",
            f"write {_as_mapping(arguments)}",
        )
        return
    if takes is None:
        return  # `training.lr_scheduler_type` itself is refused
    words: list[str] = list(arguments or {})
    for word in words:
        if word not in takes:
            near = closest(word, list(takes))
            hint = f"did you mean `{near}`?" if near else f"it takes {', '.join(takes) or 'no arguments'}"
            message = f"`{_ARGUMENTS}` has `{shown(word)}`, which `{_KIND}: {kind}` does not take"
            yield Finding("wrong-value", _SCHEDULE_KEYS, message, hint)
    found = [word for word in needs if word in words]
    if needs and not found:
        message = f"`{_KIND}: {kind}` needs {' or '.join(f'`{name}`' for name in needs)} in `{_ARGUMENTS}`"
        yield Finding("missing-key", _SCHEDULE_KEYS[::-1], message)
    if len(found) > 1:
        message = (
            f"`{_ARGUMENTS}` has {' and '.join(f'`{name}`' for name in found)}, which both set the "
            "lowest learning rate"
        )
        yield Finding("contradiction", _SCHEDULE_KEYS, message, "leave one of them out")


def _as_mapping(text: str) -> str:
    """Return the mapping in a JSON text, which transformers would read, as YAML; an example if there is
    none."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return "a mapping, such as `{num_cycles: 0.5}`"
    return (
        "`{"
        + ", ".join(f"{name}: {value}" for name, value in cast("dict[str, object]", found).items())
        + "}`, without quotes"
    )


def arguments_are_in_range(recipe: Recipe) -> Iterator[Finding]:
    """Each argument is a finite number of 0 or more, a whole number of steps, or the name of a shape."""
    for word, value in _known_arguments(recipe).items():
        if word in _WORDS:
            is_right, wanted, hint = (
                value in _SHAPES,
                f"one of {', '.join(_SHAPES)}",
                f"write {', '.join(_SHAPES[:-1])} or {_SHAPES[-1]}",
            )
        elif word in _COUNTS:
            least = int(word == "timescale")
            is_right, wanted = (
                _is_number(value) and value >= least and value == int(value),
                "a whole number of steps",
            )
            hint = f"write {wanted}, {least} or more"
        else:
            is_right, wanted, hint = (
                _is_number(value) and value >= 0,
                "a number of 0 or more",
                _hint({word: value}),
            )
        if not is_right:
            message = f"`{_ARGUMENTS}` has `{word}: {shown(str(value))}`, which is not {wanted}"
            yield Finding("wrong-value", _SCHEDULE_KEYS, message, hint)


def _kind(recipe: Recipe) -> str:
    return str(training_value(recipe.training, "lr_scheduler_type"))


def _known_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments that the schedule takes; others are found elsewhere."""
    takes = SCHEDULE_ARGUMENTS.get(_kind(recipe), ())
    return {word: value for word, value in schedule_arguments(recipe).items() if word in takes}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def schedule_is_as_given(recipe: Recipe) -> Iterator[Finding]:
    """Compute the learning rate over the run. Where its steps depend on the data, see `schedule_of_steps`."""
    steps = training_value(recipe.training, "max_steps")
    wrong = list(schedule_of_steps(recipe, steps if steps > 0 else nominal_steps(recipe)))
    yield from wrong or _unread_options(recipe)


def _is_sound(recipe: Recipe) -> bool:
    return not any(any(rule(recipe)) for rule in (arguments_exist, arguments_are_in_range, warmup_ends))


def schedule_of_steps(recipe: Recipe, steps: int) -> Iterator[Finding]:
    """Yield what is wrong with the rates of a run of `steps`: they raise, exceed the rate, never reach it, do
    not fall, or are below 0."""
    arguments = schedule_arguments(recipe)
    if not _is_sound(recipe) or steps <= 1:  # one step with a warm-up is a trial, at a rate of 0
        return
    keys = (*_SCHEDULE_KEYS, "training.learning_rate") if arguments else _SCHEDULE_KEYS[1:]
    try:
        found = rates(recipe, steps)
    except (ValueError, ArithmeticError, TypeError) as error:
        message = f"`{_KIND}: {_kind(recipe)}` with these arguments is not a schedule: {error}"
        yield Finding("wrong-value", keys, message, _hint(arguments))
        return
    if found is not None and (wrong := _wrong_rates(recipe, found)):
        yield Finding(
            "wrong-schedule",
            keys,
            f"over {steps:,} steps the learning rate {wrong} ({found})",
            _hint(arguments),
        )


def _wrong_rates(recipe: Recipe, found: Rates) -> str | None:
    """Return what is wrong with rates, if anything."""
    peak, kind = recipe.training.learning_rate, _kind(recipe)
    cycles = _known_arguments(recipe).get("num_cycles", 0)
    if (highest := max(found.peak, found.after)) > peak * (1 + 1e-9):
        return f"rises to {highest:.3g}, above `training.learning_rate: {peak:.3g}`"
    if found.lowest < 0:
        return f"falls to {found.lowest:.3g}, below 0"
    if found.peak < peak * (0.5 if kind == _OWN_PEAK else 1 - 1e-9):
        return f"never reaches `training.learning_rate: {peak:.3g}`"
    # A warm-up that takes all steps but the last leaves none to fall in.
    if (
        kind not in LEVEL_KINDS
        and peak > 0
        and warmup_steps(recipe.training.warmup_steps, found.steps) < found.steps - 1
    ):
        if found.end >= found.peak * (1 - 1e-12):
            return f"does not fall: the last step has {found.end:.3g}, the highest rate"
        if found.ends_rising or (kind != _OWN_PEAK and found.after > found.end * (1 + 1e-9)):
            return "rises at its end"
    if found.rises_at is not None and cycles <= _WAVES.get(kind, 0.5):
        return f"rises again at step {found.rises_at:,}, after its peak"
    if found.idle_steps > 1 and peak > 0:
        return f"is 0 for the last {found.idle_steps:,} steps, which train nothing"
    return None


def _hint(arguments: Mapping[str, object]) -> str:
    """Return a hint on the arguments that are given."""
    for name, hint in (
        (
            "min_lr",
            "`min_lr` is a learning rate below the highest; a share of it is `min_lr_rate`, for example 0.1",
        ),
        ("min_lr_rate", "`min_lr_rate` is a share of the learning rate, from 0 to 1"),
        ("lr_end", "`lr_end` is a learning rate below the highest"),
        ("warmup_lr_rate", "`warmup_lr_rate` is a share of the learning rate, from 0 to 1"),
        (
            "num_cycles",
            "`num_cycles` counts waves: 0.5 of a cosine is one fall, 1.5 ends low too; of restarts "
            "it is a whole number from 1",
        ),
        (
            "num_decay_steps",
            "warm-up, `num_stable_steps` and `num_decay_steps` (2 or more) are at most the steps of "
            "the run; `min_lr_ratio` is below 1",
        ),
        ("power", "`power` is above 0"),
    ):
        if name in arguments:
            return hint
    return "correct the arguments of the schedule"


def _unread_options(recipe: Recipe) -> Iterator[Finding]:
    """Yield a warm-up and arguments of which no value changes a rate, in a run with room for each phase."""
    if not _is_sound(recipe) or _kind(recipe) not in SCHEDULE_ARGUMENTS:
        return
    kind, arguments, warmup = _kind(recipe), schedule_arguments(recipe), recipe.training.warmup_steps
    if warmup > 0 and not _changes_rates(
        recipe, {"warmup_steps": 2 * warmup if warmup >= 1 else warmup / 2}, {"warmup_steps": 0}
    ):
        hint = (
            "write `constant_with_warmup`, or leave the warm-up out" if kind == "constant" else "leave it out"
        )
        yield Finding(
            UNREAD, (_WARMUP, _KIND), f"`{_KIND}: {kind}` has no warm-up, and `{_WARMUP}` is {warmup:g}", hint
        )
    for name, value in arguments.items():
        others = _SHAPES if name in _WORDS else (0, 1, value / 2, 2 * value + 1)
        if not _changes_rates(
            recipe, *({"lr_scheduler_kwargs": arguments | {name: other}} for other in others)
        ):
            message = (
                f"`{_ARGUMENTS}` has `{name}: {value}`, which changes no rate of `{_KIND}: {kind}` with "
                "these arguments"
            )
            message += "" if warmup else " and without a warm-up"
            yield Finding(UNREAD, _SCHEDULE_KEYS, message, "leave it out")


def _changes_rates(recipe: Recipe, *changes: Mapping[str, Any]) -> bool:
    """Return whether one of these changes of `training:` gives other rates."""
    steps = nominal_steps(recipe)
    at = sampled_steps(recipe, steps)
    rate = schedule_of(recipe, steps)
    assert rate is not None, "it is a function of the step"
    for change in changes:
        try:
            other = schedule_of(
                recipe.model_copy(update={"training": recipe.training.model_copy(update=change)}), steps
            )
            if other is not None and any(rate(step - 1) != other(step - 1) for step in at):
                return True
        except (ValueError, ArithmeticError, TypeError):
            continue  # not a schedule, which shows nothing
    return False


RATE_RULES: tuple[Rule, ...] = (warmup_ends, arguments_exist, arguments_are_in_range, schedule_is_as_given)
"""Part of `rules.contradictions.RULES`."""
