"""Schedules whose learning rate is not what their names say, and options that change no rate, are refused."""

from __future__ import annotations

import pytest

from fsdp_tune.recipe.rules.rates import schedule_of_steps
from tests.recipe.loading import load_with, one_problem, problems_with

RUN = "training: {learning_rate: 2.0e-5, max_steps: 6, "
REFUSED = [
    ("lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 0.1}", "rises to 0.1"),
    ("lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 2}", "rises to 4e-05"),
    (
        "lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: -1}",
        "not a number of 0 or more",
    ),
    ("lr_scheduler_type: cosine_warmup_with_min_lr, lr_scheduler_kwargs: {min_lr: 0.1}", "rises to"),
    (
        "lr_scheduler_type: cosine_warmup_with_min_lr, warmup_steps: 3, lr_scheduler_kwargs: "
        "{min_lr: 0, warmup_lr_rate: 4}",
        "rises to 8e-05",
    ),
    ("lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 30}", "never reaches"),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, min_lr_ratio: 3}",
        "rises to",
    ),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, "
        "min_lr_ratio: -0.5}",
        "not a number of 0 or more",
    ),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 1, "
        "num_stable_steps: 1}",
        "last 4 steps",
    ),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, decay_type: slow}",
        "`decay_type: slow`, which is not one of",
    ),
    ("lr_scheduler_type: polynomial, lr_scheduler_kwargs: {lr_end: 1.0}", "must be below"),
    ("lr_scheduler_type: polynomial, lr_scheduler_kwargs: {power: -1}", "not a number of 0 or more"),
    ("lr_scheduler_type: polynomial, lr_scheduler_kwargs: {lr_end: -1}", "not a number of 0 or more"),
    ("lr_scheduler_type: inverse_sqrt, lr_scheduler_kwargs: {timescale: 0}", "whole number of steps"),
    ("lr_scheduler_type: inverse_sqrt, lr_scheduler_kwargs: {timescale: 2.5}", "whole number of steps"),
    ("lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycles: many}", "not a number"),
    ("lr_scheduler_type: linear, warmup_steps: 0.95", "never reaches"),
    ("lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycles: 0}", "does not fall"),
    ("lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycles: 1.0}", "rises at its end"),
    ("lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycles: 2}", "rises at its end"),
    ("lr_scheduler_type: cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 0}", "does not fall"),
    (
        "lr_scheduler_type: cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: -1}",
        "not a number of 0 or more",
    ),
    ("lr_scheduler_type: polynomial, lr_scheduler_kwargs: {power: 0}", "does not fall"),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 4, "
        "num_stable_steps: 40}",
        "does not fall",
    ),
    ("lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 0}", "does not fall"),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, min_lr_ratio: 1}",
        "does not fall",
    ),
    ("lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 2.0e-5}", "does not fall"),
    (
        "lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: -0.1}",
        "not a number of 0 or more",
    ),
    ("lr_scheduler_type: constant, warmup_steps: 2", "has no warm-up"),
    ("lr_scheduler_type: constant, warmup_steps: 0.1", "has no warm-up"),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, "
        "decay_type: linear, num_cycles: 2}",
        "`num_cycles: 2`, which changes no rate",
    ),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 2, "
        "warmup_type: cosine}",
        "without a warm-up",
    ),
    (
        "lr_scheduler_type: cosine_warmup_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1, "
        "warmup_lr_rate: 0.1}",
        "without a warm-up",
    ),
    ("lr_scheduler_type: cosine, lr_scheduler_kwargs: '{\"num_cycles\": 0.5}'", "is text"),
]


@pytest.mark.parametrize(("training", "says"), REFUSED)
def test_schedule_is_refused(training, says):
    problem = one_problem(problems_with(f"{RUN}{training}}}"))
    assert problem.code in ("wrong-schedule", "wrong-value", "unread-option")
    assert problem.where.line == 3
    assert says in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    "training",
    [
        "lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_cycles: 1.5}",
        "lr_scheduler_type: cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 2}",
        "lr_scheduler_type: cosine_warmup_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1}",
        "lr_scheduler_type: warmup_stable_decay, warmup_steps: 2, lr_scheduler_kwargs: {num_decay_steps: 2}",
        "lr_scheduler_type: warmup_stable_decay, warmup_steps: 2, lr_scheduler_kwargs: "
        "{num_decay_steps: 3, warmup_type: cosine}",
        "lr_scheduler_type: cosine_warmup_with_min_lr, warmup_steps: 1, lr_scheduler_kwargs: "
        "{min_lr_rate: 0.1, warmup_lr_rate: 0.1}",
        "lr_scheduler_type: constant, warmup_steps: 0",
        "lr_scheduler_type: linear, warmup_steps: 5",
        "lr_scheduler_type: inverse_sqrt, warmup_steps: 2",
        "lr_scheduler_type: polynomial, lr_scheduler_kwargs: {power: 2}",
        "lr_scheduler_type: constant",
        "warmup_steps: 0.03",
    ],
)
def test_sound_schedule_is_accepted(training):
    load_with(f"{RUN}{training}}}")


def test_phases_of_a_run_by_epochs_are_judged_in_a_run_of_their_length():
    phases = "lr_scheduler_kwargs: {num_decay_steps: 400, num_stable_steps: 5000}"
    for warmup in (0, 100, 0.03):
        load_with(f"training: {{lr_scheduler_type: warmup_stable_decay, warmup_steps: {warmup}, {phases}}}")


def test_schedule_of_a_run_whose_steps_the_data_decide_is_checked_again():
    """Ten steps of decay fit into the nominal run of a recipe by epochs, not into one of six steps."""
    training = (
        "{learning_rate: 1.0e-3, lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: "
        "{num_decay_steps: 10}}"
    )
    recipe = load_with(f"training: {training}").recipe
    assert list(schedule_of_steps(recipe, 600)) == []
    (finding,) = schedule_of_steps(recipe, 6)
    assert finding.code == "wrong-schedule"
    assert "over 6 steps the learning rate never reaches" in finding.message
