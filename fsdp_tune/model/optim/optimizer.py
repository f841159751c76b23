"""Create the optimizer of a recipe: the one that transformers' Trainer would create for the same arguments.

The planner creates the same optimizer, so that its state and its temporaries are those of a run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_tune.model.kernels.float8_weights import refresh_scales
from fsdp_tune.model.loading.construct import TORCH_DTYPE
from fsdp_tune.model.optim.accumulation import round_gradients, sum_gradients_in_fp32, sums_need_fp32
from fsdp_tune.model.optim.lean_adamw import LeanAdamW
from fsdp_tune.model.optim.torchao_adamw import torchao_class, with_plain_rates
from fsdp_tune.model.shard.local import local_part
from fsdp_tune.model.step import parameter_groups, plain_name
from fsdp_tune.recipe.rules.precision import gathers_in_fp8
from fsdp_tune.recipe.schema import Recipe, Training
from fsdp_tune.recipe.schema.optimizers import (
    BLOCK,
    DEFAULT_BLOCK,
    STOCHASTIC,
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
            optimizer.register_step_pre_hook(round_gradients)
    if gathers_in_fp8(recipe):
        optimizer.register_step_post_hook(lambda *_: refresh_scales(wrapped))
    return optimizer


def _build(recipe: Recipe, wrapped: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
    training = recipe.training
    kind, options = optimizer_of(training)
    groups = parameter_groups(wrapped, float(training_value(training, "weight_decay")), decayed, _own_rates(recipe, wrapped))
    if state_bits(training) is not None:
        return with_plain_rates(kind)(groups, **options)
    if not options.get("fused"):
        return kind(groups, **options)
    given = optimizer_arguments(training)
    if not given:
        return AdamW(groups, **options)
    kept_in = TORCH_DTYPE[state_dtype(training, recipe.model.dtype)]
    return LeanAdamW(groups, **options, state_dtype=kept_in, rounds_parameters=given.get(STOCHASTIC, False), seed=training.seed)


def _own_rates(recipe: Recipe, wrapped: nn.Module) -> dict[str, float]:
    """Return the learning rates of LoRA+ (arXiv:2402.12354): that of every B is `lora.lr_ratio` times that of A."""
    if recipe.lora is None or recipe.lora.lr_ratio == 1.0:
        return {}
    rate = recipe.training.learning_rate * recipe.lora.lr_ratio
    return {name: rate for name in map(plain_name, dict(wrapped.named_parameters())) if ".lora_B." in name or ".lora_embedding_B." in name}


def optimizer_of(training: Training) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return class and keyword arguments of `training.optim`, as `Trainer.get_optimizer_cls_and_kwargs` does."""
    name = optimizer_name(training)
    options: dict[str, Any] = {"lr": training.learning_rate}
    given = optimizer_arguments(training)
    if name in _OTHERS:
        return _OTHERS[name], options | given
    options["betas"] = (training_value(training, "adam_beta1"), training_value(training, "adam_beta2"))
    options["eps"] = training_value(training, "adam_epsilon")
    if bits := state_bits(training):
        return torchao_class(bits), {**options, BLOCK: given.get(BLOCK, DEFAULT_BLOCK), STOCHASTIC: given.get(STOCHASTIC, False)}
    return torch.optim.AdamW, options | ({"fused": True} if name == "adamw_torch_fused" else {})


_OTHERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


# ---- torch's AdamW on this rank's shards: the state is sharded like the parameters, and the kernel gets plain tensors.


class AdamW(torch.optim.AdamW):
    """AdamW whose `state` holds DTensors where parameters are DTensors, as in torch, so that checkpoints are the same."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fill the lists for the kernel (parameters, gradients, moments, steps, by position) and replace DTensors by local tensors."""
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return is_complex
