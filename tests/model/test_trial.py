"""An optimizer is tried before a run: options that its class refuses, or that no update reads, are
problems."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.optim import trial
from fsdp_tune.model.optim.trial import optimizer_problems
from fsdp_tune.recipe.rules.training import optimizer_reads_its_options
from fsdp_tune.recipe.schema.optimizers import OPTIMIZER_FIELDS, OPTIMIZERS
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.recipes import recipe_of

GIVEN = {
    "momentum": "0.9", "dampening": "0.1", "nesterov": "true", "alpha": "0.9", "eps": "1e-6", "lr_decay": "0.1", "centered": "true",  # noqa: E501
    "ns_steps": "4",
    "ns_coefficients": "3/-4/2", "adjust_lr_fn": "original", "state_dtype": "bf16", "block_size": "128", "bf16_stochastic_round": "true",  # noqa: E501
}  # fmt: skip
BELONGS = {("sgd", "nesterov"): "momentum=0.9", ("sgd", "dampening"): "momentum=0.9"}
"""Options that are read with another one."""


def tried(optim: str, args: str | None = None, **training: Any) -> Recipe:
    dtype = "bf16" if args and "round" in args else "fp32"
    return recipe_of(
        {"from_config": {"model_type": "gpt2"}, "dtype": dtype},
        training={"optim": optim, "optim_args": args, **training},
    )


def codes(optim: str, args: str) -> list[str]:
    return [problem.code for problem in optimizer_problems(tried(optim, args))]


@pytest.mark.parametrize(
    ("optim", "option"), [(name, each) for name in OPTIMIZERS for each in OPTIMIZERS[name].arguments]
)
def test_each_option_is_read_with_the_one_that_it_belongs_to(optim: str, option: str) -> None:
    needed = BELONGS.get((optim, option))
    args = f"{option}={GIVEN[option]}"
    assert codes(optim, f"{args},{needed}" if needed else args) == []
    if needed:
        assert codes(optim, args) != []


@pytest.mark.parametrize(
    ("optim", "args", "code", "words"),
    [
        ("sgd", "nesterov=true", "wrong-value", "Nesterov momentum requires a momentum"),
        ("sgd", "nesterov=true,momentum=0.9,dampening=0.5", "wrong-value", "zero dampening"),
        ("sgd", "momentum=-1", "wrong-value", "Invalid momentum"),
        ("rmsprop", "alpha=-0.5", "wrong-value", "Invalid alpha"),
        ("sgd", "dampening=0.5", "unread-option", "`dampening=0.5`"),
        ("sgd", "nesterov=false", "unread-option", "`nesterov=false`"),
        ("sgd", "momentum=0,dampening=0.5", "unread-option", "`dampening=0.5`"),
    ],
)
def test_option_that_is_refused_or_unread_is_a_problem_of_the_inspection(
    optim: str, args: str, code: str, words: str
) -> None:
    recipe = tried(optim, args).model_copy(update={"model": recipe_of().model})
    [problem] = find_facts(recipe).problems
    assert (problem.code, problem.where.key) == (code, "training.optim_args")
    assert words in problem.message
    assert problem.hint


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_fields_that_a_recipe_refuses_are_those_that_change_no_update(optim: str) -> None:
    values: dict[str, tuple[Any, Any]] = {
        "adam_beta1": (0.9, 0.5), "adam_beta2": (0.999, 0.9), "adam_epsilon": (1e-8, 1.0), "optim_target_modules": (["a"], ["b"])  # noqa: E501
    }  # fmt: skip
    assert set(values) == set(OPTIMIZER_FIELDS)
    for field, pair in values.items():
        one, other = (trial._trained_values(tried(optim, **{field: value})) for value in pair)
        is_refused = any(optimizer_reads_its_options(tried(optim, **{field: pair[0]})))
        assert is_refused is not trial._differ(one, other), field
