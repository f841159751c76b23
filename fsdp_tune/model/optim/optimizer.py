"""Create the optimizer of a recipe: the one that transformers' Trainer would create for the same arguments.

The planner creates the same optimizer, so that its state and its temporaries are those of a run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.optimization import Adafactor

from fsdp_tune.model.optim.accumulation import round_before_step, sum_gradients_in_fp32, sums_need_fp32
from fsdp_tune.model.optim.adafactor import ShardedAdafactor
from fsdp_tune.model.optim.adamw import AdamW
from fsdp_tune.model.optim.lean_adamw import LeanAdamW
from fsdp_tune.model.optim.muon import ORTHOGONAL, Muon, orthogonalised_names
from fsdp_tune.model.optim.torchao_adamw import torchao_class, with_plain_rates
from fsdp_tune.model.parameters import TORCH_DTYPE
from fsdp_tune.model.step import parameter_groups
from fsdp_tune.model.torchao_tensors import refresh_scales
from fsdp_tune.recipe.rules.precision import gathers_in_fp8
from fsdp_tune.recipe.schema import Recipe, Training
from fsdp_tune.recipe.schema.optimizers import (
    BLOCK,
    DEFAULT_BLOCK,
    MUON_DEFAULTS,
    STOCHASTIC,
    matching_group,
    optimizer_arguments,
    optimizer_name,
    state_bits,
    state_dtype,
)
from fsdp_tune.recipe.schema.training_fields import training_value


def build_optimizer(recipe: Recipe, wrapped: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
    """Create the optimizer for the trained parameters of `wrapped`, with weight decay for the names in `decayed`."""
    optimizer = _build(recipe, wrapped, decayed)
    if sums_need_fp32(recipe):
        sum_gradients_in_fp32(wrapped)
        if not isinstance(optimizer, LeanAdamW):  # which computes on fp32 copies
            round_before_step(optimizer)
    if gathers_in_fp8(recipe):
        optimizer.register_step_post_hook(lambda *_: refresh_scales(wrapped))
    return optimizer


def _build(recipe: Recipe, wrapped: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
    training = recipe.training
    kind, options = optimizer_of(training)
    matrices = orthogonalised_names(wrapped, decayed) if kind is Muon else None
    groups = parameter_groups(wrapped, lambda name: _options_of(recipe, name, decayed, matrices))
    if kind is Adafactor:
        return ShardedAdafactor(groups, lr=training.learning_rate)
    if state_bits(training) is not None:
        return with_plain_rates(kind)(groups, **options)
    if not options.get("fused") or kind is Muon:
        return kind(groups, **options)
    given = optimizer_arguments(training)
    if not given:
        return AdamW(groups, **options)
    kept_in = TORCH_DTYPE[state_dtype(training, recipe.model.dtype)]
    return LeanAdamW(groups, **options, state_dtype=kept_in, rounds_parameters=given.get(STOCHASTIC, False), seed=training.seed)


def _options_of(recipe: Recipe, name: str, decayed: frozenset[str], matrices: frozenset[str] | None) -> dict[str, Any]:
    """Return the options of the group of a parameter: those of the first of `training.parameter_groups` that matches, or the recipe's.

    In LoRA+ (arXiv:2402.12354) the learning rate of every B is `lora.lr_ratio` times that of A. `matrices` are the names for Muon.
    """
    own = matching_group(recipe.training, name)
    rate, decay = (None, None) if own is None else (own.learning_rate, own.weight_decay)
    if decay is None:
        decay = float(training_value(recipe.training, "weight_decay")) if name in decayed else 0.0
    if recipe.lora is not None and recipe.lora.lr_ratio != 1.0 and (".lora_B." in name or ".lora_embedding_B." in name):
        rate = (recipe.training.learning_rate if rate is None else rate) * recipe.lora.lr_ratio
    options = {"weight_decay": decay} | ({} if rate is None else {"lr": rate})
    return options if matrices is None else options | {ORTHOGONAL: name in matrices}


def optimizer_of(training: Training) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return class and keyword arguments of `training.optim`, as `Trainer.get_optimizer_cls_and_kwargs` does."""
    name = optimizer_name(training)
    options: dict[str, Any] = {"lr": training.learning_rate}
    given = optimizer_arguments(training)
    if name in _OTHERS:
        return _OTHERS[name], options | given
    if name == "adafactor":
        return Adafactor, options | {"scale_parameter": False, "relative_step": False}
    options["betas"] = (training_value(training, "adam_beta1"), training_value(training, "adam_beta2"))
    options["eps"] = training_value(training, "adam_epsilon")
    if bits := state_bits(training):
        return torchao_class(bits), {**options, BLOCK: given.get(BLOCK, DEFAULT_BLOCK), STOCHASTIC: given.get(STOCHASTIC, False)}
    if name == "muon":
        return Muon, options | {"fused": True, "muon": MUON_DEFAULTS | given}
    return torch.optim.AdamW, options | ({"fused": True} if name == "adamw_torch_fused" else {})


_OTHERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
