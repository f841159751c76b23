"""The learning rate over a run, computed from the recipe: transformers' schedules as plain functions of the
step.

The formulas are those of transformers 5.24 (`optimization.py`), which training uses; a test compares them for
every kind and argument.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

Schedule = Callable[[int], float]
"""The learning rate after some steps, as a share of `training.learning_rate`."""
_EXACT_STEPS = 10_000
"""Runs of at most so many steps are looked at step by step, longer ones at as many steps and around each
change of phase."""
_NOMINAL_STEPS = 1_000
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rates of the first group of parameters over a run. Steps count from 1, as in its log: step
    n is the n-th update."""

    steps: int
    start: float
    peak: float
    peak_step: int
    """The first step at the peak."""
    end: float
    """Of the last step."""
    after: float
    """What the schedule reaches after the last step. No update uses it, and torch computes it."""
    lowest: float
    """Of these all."""
    idle_steps: int
    """Updates at the end whose rate is 0."""
    rises_at: int | None
    """The first step after the peak at which the rate is higher than before; None if it never is."""
    ends_rising: bool
    """Whether the last step, as one after the peak, has a higher rate than the step before it."""

    def __str__(self) -> str:
        rises = self.peak_step > 1
        peak = f"{self.peak:.3g} at step {self.peak_step:,}" if rises else f"{self.peak:.3g}"
        start = f"{self.start:.3g} → " if rises else ""
        return f"rate: {start}{peak} → {self.end:.3g} at step {self.steps:,}"


def rate_line(recipe: Recipe, steps: int | None) -> str:
    """Return the line on the rates of a run for users; `steps` None: they depend on data that is not
    prepared."""
    if steps is None:
        return (
            f"rate: at most {recipe.training.learning_rate:.3g}; the steps are known after the data is "
            "prepared"
        )
    found = rates(recipe, steps)
    return (
        str(found)
        if found is not None
        else f"rate: {training_value(recipe.training, 'lr_scheduler_type')}, which depends on losses"
    )


def warmup_steps(warmup: float, steps: int) -> int:
    """Return the steps of warm-up as `TrainingArguments.get_warmup_steps` counts them: below 1, a share of
    all `steps`."""
    return int(warmup) if warmup >= 1 else math.ceil(steps * warmup)


def schedule_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return `training.lr_scheduler_kwargs`; empty if they are not a mapping, which a rule refuses."""
    arguments: object = training_value(recipe.training, "lr_scheduler_kwargs")
    return cast("dict[str, object]", arguments) if isinstance(arguments, dict) else {}


def nominal_steps(recipe: Recipe) -> int:
    """Return a number of steps for a run whose own depends on its data: long enough for each phase of its
    schedule."""
    given, warmup = schedule_arguments(recipe), recipe.training.warmup_steps
    phases = sum(
        value for name in ("num_stable_steps", "num_decay_steps") if isinstance(value := given.get(name), int)
    )
    if "num_stable_steps" in given:  # all phases have a length
        return math.ceil(phases / (1 - warmup)) if warmup < 1 else int(warmup + phases)
    return int(phases + 2 * (warmup if warmup >= 1 else 0) + _NOMINAL_STEPS)


def rates(recipe: Recipe, steps: int) -> Rates | None:
    """Return the rates of a run of `steps`, or None for a schedule that is not a function of the step.

    Raises: ValueError, ArithmeticError or TypeError where transformers would, in the ranks.
    """
    learning_rate = recipe.training.learning_rate
    schedule = schedule_of(recipe, steps)
    if schedule is None:
        return None
    # A schedule takes the number of updates so far: 0 in the first step.
    used = {step: schedule(step - 1) for step in sampled_steps(recipe, steps)}
    peak = max(used.values())
    peak_step = next(step for step, factor in used.items() if factor >= peak - _TINY)
    later = [(step, factor) for step, factor in used.items() if step >= peak_step]
    rising = [late for (_, before), (late, factor) in pairwise(later) if factor > before + _TINY]
    idle = next((steps - step for step, factor in reversed(used.items()) if factor > 0), steps)
    after = schedule(steps)
    first, highest, last, beyond, lowest = (
        learning_rate * value for value in (used[1], peak, used[steps], after, min(after, *used.values()))
    )
    rises_at = rising[0] if rising else None
    return Rates(
        steps, first, highest, peak_step, last, beyond, lowest, idle, rises_at, ends_rising=steps in rising
    )


def sampled_steps(recipe: Recipe, steps: int) -> list[int]:
    """Return the steps that describe the schedule of a run of `steps`, in order: all of a short run, else
    some of each phase."""
    warmup, arguments = warmup_steps(recipe.training.warmup_steps, steps), schedule_arguments(recipe)
    if steps <= _EXACT_STEPS:
        return list(range(1, steps + 1))
    lengths = [
        value
        for name in ("num_stable_steps", "num_decay_steps")
        if isinstance(value := arguments.get(name), int)
    ]
    turns = {
        warmup,
        *(warmup + length for length in lengths),
        *(steps - length for length in lengths),
        warmup + sum(lengths),
        steps,
    }
    near = {turn + offset for turn in turns for offset in (-2, -1, 0, 1, 2)}
    every = {step * steps // _EXACT_STEPS for step in range(_EXACT_STEPS)}
    return sorted({1, steps} | {step for step in near | every if 1 <= step <= steps})


def schedule_of(recipe: Recipe, steps: int) -> Schedule | None:
    """Return the schedule of a run of `steps`; None if its kind is not a function of the step. Raises as
    `rates`."""
    build = _SCHEDULES.get(str(training_value(recipe.training, "lr_scheduler_type")))
    if build is None:
        return None
    learning_rate = recipe.training.learning_rate
    return build(
        _Run(warmup_steps(recipe.training.warmup_steps, steps), steps, learning_rate),
        **schedule_arguments(recipe),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    warmup: int
    steps: int
    learning_rate: float

    def warmed(self, after: Schedule) -> Schedule:
        """Return a schedule that rises in a line from 0 over the warm-up, and is `after` from then on."""
        return lambda step: step / max(1, self.warmup) if step < self.warmup else after(step)

    def progress(self, step: int) -> float:
        return (step - self.warmup) / max(1, self.steps - self.warmup)


def _constant(_: _Run) -> Schedule:
    return lambda _: 1.0


def _constant_with_warmup(run: _Run) -> Schedule:
    return run.warmed(lambda _: 1.0)


def _linear(run: _Run) -> Schedule:
    return run.warmed(lambda step: max(0.0, 1.0 - run.progress(step)))


def _cosine(run: _Run, num_cycles: float = 0.5) -> Schedule:
    return run.warmed(lambda step: max(0.0, _wave(num_cycles, run.progress(step))))


def _cosine_with_restarts(run: _Run, num_cycles: float = 1) -> Schedule:
    def after(step: int) -> float:
        progress = run.progress(step)
        return (
            0.0
            if progress >= 1.0
            else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0))))
        )

    return run.warmed(after)


def _polynomial(run: _Run, lr_end: float = 1e-7, power: float = 1.0) -> Schedule:
    if not run.learning_rate > lr_end:
        raise ValueError(f"lr_end ({lr_end:g}) must be below the learning rate ({run.learning_rate:g})")

    def after(step: int) -> float:
        if step > run.steps:
            return lr_end / run.learning_rate
        remaining = 1 - (step - run.warmup) / (run.steps - run.warmup)
        return ((run.learning_rate - lr_end) * remaining**power + lr_end) / run.learning_rate

    return run.warmed(after)


def _inverse_sqrt(run: _Run, timescale: int | None = None) -> Schedule:
    scale = timescale if timescale is not None else run.warmup or 10_000
    return run.warmed(lambda step: 1.0 / math.sqrt((step + scale - run.warmup) / scale))


def _cosine_with_min_lr(
    run: _Run, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> Schedule:
    floor = _floor(run, min_lr, min_lr_rate)
    return run.warmed(lambda step: max(0.0, _wave(num_cycles, run.progress(step)) * (1 - floor) + floor))


def _cosine_warmup_with_min_lr(
    run: _Run,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Schedule:
    floor = _floor(run, min_lr, min_lr_rate)

    def factor(step: int) -> float:
        if step < run.warmup:
            if warmup_lr_rate is None:
                return (step + 1.0) / max(1.0, run.warmup)
            return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, run.warmup - 1)
        progress = (step - run.warmup + 1.0) / max(1.0, run.steps - run.warmup)
        return max(0.0, _wave(num_cycles, progress) * (1 - floor) + floor)

    return factor


def _warmup_stable_decay(
    run: _Run,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
) -> Schedule:
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: _wave(num_cycles, progress),
        "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
    }
    rises: dict[str, Callable[[float], float]] = shapes | {"cosine": partial(_wave, 0.5)}
    for name, value in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if value not in shapes:
            raise ValueError(f"{name} is `{value}`; there are {', '.join(shapes)}")
    stable = num_stable_steps if num_stable_steps is not None else run.steps - run.warmup - num_decay_steps

    def factor(step: int) -> float:
        if step < run.warmup:
            return max(
                0.0, rises[warmup_type](1.0 - step / max(1, run.warmup)) * (1.0 - min_lr_ratio) + min_lr_ratio
            )
        if step < run.warmup + stable:
            return 1.0
        if step < run.warmup + stable + num_decay_steps:
            progress = (step - run.warmup - stable) / max(1, num_decay_steps)
            return max(0.0, shapes[decay_type](progress) * (1.0 - min_lr_ratio) + min_lr_ratio)
        return min_lr_ratio

    return factor


def _wave(num_cycles: float, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def _floor(run: _Run, min_lr: float | None, min_lr_rate: float | None) -> float:
    """Return the lowest rate as a share of the learning rate. Exactly one of the two is given; a rule of the
    recipe refuses others."""
    return min_lr / run.learning_rate if min_lr is not None else float(min_lr_rate or 0.0)


_SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "linear": _linear,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}

SCHEDULE_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    kind: tuple(inspect.signature(build).parameters)[1:] for kind, build in _SCHEDULES.items()
}
"""Arguments of each kind, which are those of transformers' functions; its `get_scheduler` ignores any for the
constant ones."""
LEVEL_KINDS = ("constant", "constant_with_warmup")
"""Kinds that do not fall."""
