"""The computed learning rates are those of transformers, for each kind, its arguments, and lengths of warm-up
and run."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from transformers.optimization import get_scheduler

from fsdp_tune.recipe.schedule import nominal_steps, rate_line, rates, schedule_of, warmup_steps
from fsdp_tune.recipe.schema.recipe import Recipe

RATE = 3e-4
ARGUMENTS = {
    "linear": [{}],
    "constant": [{}],
    "constant_with_warmup": [{}],
    "cosine": [{}, {"num_cycles": 0.3}, {"num_cycles": 2}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"lr_end": 1e-5, "power": 2}, {"power": 0.5}],
    "inverse_sqrt": [{}, {"timescale": 7}],
    "cosine_with_min_lr": [{"min_lr": 1e-5}, {"min_lr_rate": 0.1}, {"min_lr_rate": 0.2, "num_cycles": 1}],
    "cosine_warmup_with_min_lr": [{"min_lr": 1e-5}, {"min_lr_rate": 0.1, "warmup_lr_rate": 0.01}],
    "warmup_stable_decay": [
        {"num_decay_steps": 4},
        {"num_decay_steps": 5, "num_stable_steps": 6, "min_lr_ratio": 0.1},
        {"num_decay_steps": 4, "warmup_type": "cosine", "decay_type": "linear"},
        {"num_decay_steps": 4, "warmup_type": "1-sqrt", "decay_type": "1-sqrt", "min_lr_ratio": 0.2},
    ],
}


def recipe_of(kind: str, arguments: dict[str, object], warmup: float = 0, **training: object) -> Recipe:
    given = {"lr_scheduler_type": kind, "warmup_steps": warmup, "learning_rate": RATE, **training}
    return Recipe.model_validate(
        {"training": given | ({"lr_scheduler_kwargs": arguments} if arguments else {})}
    )


def test_every_kind_of_transformers_is_compared():
    from fsdp_tune.recipe.schedule import SCHEDULE_ARGUMENTS

    assert set(ARGUMENTS) == set(SCHEDULE_ARGUMENTS)
    assert {name for cases in ARGUMENTS.values() for case in cases for name in case} == {
        n for ns in SCHEDULE_ARGUMENTS.values() for n in ns
    }


@pytest.mark.parametrize(
    ("kind", "arguments"), [(kind, each) for kind, cases in ARGUMENTS.items() for each in cases]
)
def test_rates_are_those_of_transformers(kind, arguments):
    for warmup, steps in itertools.product((0, 1, 5, 0.2), (13, 40)):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = get_scheduler(kind, optimizer, warmup_steps(warmup, steps), steps, arguments)
        ours = schedule_of(recipe_of(kind, arguments, warmup), steps)
        assert ours is not None
        found = [ours(step) for step in range(steps + 1)]
        assert found == pytest.approx([theirs.lr_lambdas[0](step) for step in range(steps + 1)], abs=1e-12)


def test_line_has_start_peak_and_end():
    recipe = recipe_of("cosine_with_min_lr", {"min_lr_rate": 0.1}, 100, learning_rate=2e-5)
    assert rate_line(recipe, 1000) == "rate: 0 → 2e-05 at step 101 → 2e-06 at step 1,000"
    assert rate_line(recipe_of("linear", {}), 10) == "rate: 0.0003 → 3e-05 at step 10"
    assert "known after the data is prepared" in rate_line(recipe, None)
    assert "depends on losses" in rate_line(recipe_of("reduce_lr_on_plateau", {}), 10)


def test_steps_of_the_line_are_those_of_the_log():
    """A log names an update by its number, from 1, with the rate that it used."""
    recipe, parameter = recipe_of("cosine", {}, 3), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    scheduler, logged = get_scheduler("cosine", optimizer, 3, 12), {}
    for step in range(1, 13):
        logged[step] = optimizer.param_groups[0]["lr"]
        parameter.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    found = rates(recipe, 12)
    assert found is not None
    assert (found.start, found.peak, found.end) == pytest.approx(
        (logged[1], logged[found.peak_step], logged[12])
    )
    assert found.peak_step == max(logged, key=logged.__getitem__) == 4


def test_long_run_is_looked_at_where_its_phases_change():
    recipe = recipe_of("warmup_stable_decay", {"num_decay_steps": 1}, 700_001, learning_rate=1.0)
    found = rates(recipe, 5_000_000)
    assert found is not None
    assert found.after == 0.0
    assert (found.peak, found.peak_step, found.end, found.idle_steps) == (1.0, 700_002, 1.0, 0)


def test_nominal_run_has_room_for_the_phases():
    recipe = recipe_of("warmup_stable_decay", {"num_decay_steps": 4000}, 2000)
    assert nominal_steps(recipe) >= 4000 + 2000
    for warmup, steps in ((2000, 4000 + 100 + 2000), (0.5, 2 * (4000 + 100))):
        assert (
            nominal_steps(
                recipe_of("warmup_stable_decay", {"num_decay_steps": 4000, "num_stable_steps": 100}, warmup)
            )
            == steps
        )
