"""Try the optimizer of a recipe on a few values before a run: its class accepts the options, and its updates
depend on each of them.

The optimizer is created as for training and takes some steps with fixed gradients. An option is read if the
values after these steps differ when the option has another value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fsdp_tune.core.errors import Problem, Where
from fsdp_tune.core.units import shown
from fsdp_tune.model.optim.optimizer import create_optimizer
from fsdp_tune.model.shard.local import TORCH_DTYPE
from fsdp_tune.recipe.rules.rates import UNREAD
from fsdp_tune.recipe.schema.optimizers import OPTIMIZERS, optimizer_name, pairs_of
from fsdp_tune.recipe.schema.recipe import Recipe

_KEY = "training.optim_args"
_STEPS = 4
_WIDTH = 64
"""Of the matrix that is trained: torchao keeps moments in blocks from 4,096 elements on."""
_RATE = 0.01
_OTHER_VALUES = (
    "0.5",
    "0.25",
    "16",
    "32",
    "3",
    "1000",
    "true",
    "false",
    "fp32",
    "bf16",
    "match_rms_adamw",
    "original",
    "3/-4/2",
    "2/-1.5/0.5",
)
"""Texts of which each argument of each optimizer takes at least two."""


def optimizer_problems(recipe: Recipe) -> list[Problem]:
    """Return a problem for options that the class of the optimizer refuses, or for each of
    `training.optim_args` that no update reads."""
    name, given = optimizer_name(recipe.training), pairs_of(recipe.training)
    try:
        trained = _trained_values(recipe)
    except (ValueError, RuntimeError, TypeError) as error:
        message = f"`training.optim: {name}` refuses its options: {error}"
        return [
            Problem(
                "wrong-value",
                message,
                Where(key=_KEY if given else "training.optim"),
                "change or leave out the option named here",
            )
        ]
    found: list[Problem] = []
    for at, (option, value) in enumerate(given):
        if not any(_differ(trained, other) for other in _values_with_others(recipe, at)):
            message = (
                f"`{_KEY}` has `{option}={shown(str(value))}`, and no update of `training.optim: {name}` "
                "depends on it with these options"
            )
            found.append(
                Problem(
                    UNREAD, message, Where(key=_KEY), "leave it out, or add the option that it belongs to"
                )
            )
    return found


def _values_with_others(recipe: Recipe, at: int) -> Iterator[list[torch.Tensor]]:
    """Yield the values that are trained with each other value that the argument at an index takes, and that
    the class accepts."""
    given = pairs_of(recipe.training)
    name, value = given[at]
    read = OPTIMIZERS[optimizer_name(recipe.training)].arguments[name].read
    for text in _OTHER_VALUES:
        changed = [*given[:at], (name, text), *given[at + 1 :]]
        words = ",".join(f"{option}={each}" for option, each in changed)
        try:
            if read(text) != read(value or ""):
                update = {"training": recipe.training.model_copy(update={"optim_args": words})}
                yield _trained_values(recipe.model_copy(update=update))
        except (ValueError, RuntimeError, TypeError):
            continue  # not a value of this argument, or not with the others


def _differ(values: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return any(not torch.equal(one, other) for one, other in zip(values, others, strict=True))


def _trained_values(recipe: Recipe) -> list[torch.Tensor]:
    """Return a matrix and a vector after some steps. Raises: as the class of the optimizer."""
    rate = {"learning_rate": _RATE, "parameter_groups": []}
    plain = recipe.model_copy(update={"training": recipe.training.model_copy(update=rate), "lora": None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # also of stochastic rounding
        module = nn.Linear(_WIDTH, _WIDTH, dtype=TORCH_DTYPE[recipe.model.dtype])
        optimizer = create_optimizer(plain, module, frozenset({"weight"}))
        for _ in range(_STEPS):
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]
