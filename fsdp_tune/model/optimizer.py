"""The optimizer of a recipe: what transformers' Trainer would make of the same arguments, without the Trainer.

The planner creates the same one, so that its state and its temporaries are what a run will have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_tune.model.adamw import AdamW
from fsdp_tune.model.step import parameter_groups
from fsdp_tune.recipe.schema import Recipe, Training
from fsdp_tune.recipe.training_fields import training_value


def build_optimizer(recipe: Recipe, wrapped: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
    """Over the trained parameters of `wrapped`; weight decay on those whose names are in `decayed`."""
    training = recipe.training
    kind, options = optimizer_of(training)
    kind = AdamW if options.get("fused") else kind
    return kind(parameter_groups(wrapped, float(training_value(training, "weight_decay")), decayed), **options)


def optimizer_of(training: Training) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Class and keyword arguments of `training.optim`, as `Trainer.get_optimizer_cls_and_kwargs` gives them."""
    name = training_value(training, "optim") or "adamw_torch_fused"
    given = _optim_args(training_value(training, "optim_args"))
    options: dict[str, Any] = {"lr": training.learning_rate}
    if name in ("adamw_torch_fused", "adamw_torch"):
        betas = (training_value(training, "adam_beta1"), training_value(training, "adam_beta2"))
        fused = {"fused": True} if name == "adamw_torch_fused" else {}
        return torch.optim.AdamW, {**options, "betas": betas, "eps": training_value(training, "adam_epsilon"), **fused}
    kind, numbers, switches = _OTHERS[name]
    options |= {key: float(given[key]) for key in numbers if key in given}
    options |= {key: given[key].lower() in ("true", "1", "yes") for key in switches if key in given}
    return kind, options


_OTHERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, ("momentum", "dampening", "weight_decay"), ("nesterov",)),
    "adagrad": (torch.optim.Adagrad, ("lr_decay", "weight_decay", "eps"), ()),
    "rmsprop": (torch.optim.RMSprop, ("momentum", "alpha", "eps", "weight_decay"), ("centered",)),
}


def _optim_args(text: str | None) -> dict[str, str]:
    """`momentum=0.9, nesterov=true` of `training.optim_args`."""
    return dict(part.split("=", 1) for part in text.replace(" ", "").split(",")) if text else {}
