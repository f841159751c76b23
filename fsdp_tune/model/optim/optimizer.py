"""Create the optimizer of a recipe: the one that transformers' Trainer would create for the same arguments,
on this rank's shards.

The planner creates the same optimizer, so that its state and its temporaries are those of a run.

Gradients are accumulated over the micro-batches of a step in fp32, even if weights are bf16. FSDP2 casts each
reduced gradient to the dtype of the weights and adds it there (`foreach_reduce`). In bf16 the error is 0.36 %
after 8 micro-batches, 0.84 % after 64 and 2.2 % after 512. HYBRID_SHARD adds in `reduce_dtype` until its
all-reduce, as does `sync_each_batch: false`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.optim.adafactor import ShardedAdafactor
from fsdp_tune.model.optim.adamw import AdamW
from fsdp_tune.model.optim.adamw_in_blocks import torchao_class, with_plain_rates
from fsdp_tune.model.optim.lean_adamw import LeanAdamW
from fsdp_tune.model.optim.muon import ORTHOGONAL, Muon, orthogonalised_names
from fsdp_tune.model.shard.local import TORCH_DTYPE, plain_name, refresh_scales
from fsdp_tune.model.shard.wrap import fsdp_groups
from fsdp_tune.model.step import parameter_groups
from fsdp_tune.recipe.rules.limits import gathers_in_fp8
from fsdp_tune.recipe.schema.optimizers import (
    STOCHASTIC,
    matching_group,
    optimizer_arguments,
    optimizer_name,
    optimizer_options,
    state_bits,
    state_dtype,
)
from fsdp_tune.recipe.schema.recipe import Recipe, Training
from fsdp_tune.recipe.schema.training_fields import training_value


def sums_need_fp32(recipe: Recipe) -> bool:
    """Return whether FSDP2 would add the gradients of micro-batches in a dtype narrower than fp32."""
    fsdp = recipe.fsdp
    adds_shards = recipe.is_sharded and fsdp.version == 2 and not recipe.is_hybrid and fsdp.sync_each_batch
    return (
        adds_shards
        and recipe.model.dtype != "fp32"
        and (recipe.training.gradient_accumulation_steps or 1) > 1
    )


def sum_gradients_in_fp32(wrapped: nn.Module) -> None:
    """Make FSDP2 keep reduced gradients in fp32. Until the step (`round_before_step`) that of a shard takes 4
    bytes per parameter.

    Call it after the weights are on their device.
    """
    assert isinstance(wrapped, FSDPModule)
    groups = fsdp_groups(wrapped)
    for group in groups:
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                parameter.sharded_param.grad_dtype = (
                    None  # any; torch 2.15 reads it in `_lazy_init` and keeps `reduce_dtype`
                )
    internals.LAZY_INIT.of(
        internals.FSDP_STATE.of(wrapped)()
    )()  # otherwise the first forward would set the dtype again
    for group in groups:
        # what `foreach_reduce` casts its output to before torch 2.15
        internals.ORIGINAL_DTYPE.set(group, torch.float32)


_ROUNDS = "rounds_gradients"
"""An attribute of optimizers that cast gradients before each step."""


def round_before_step(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer cast gradients to the dtype of their parameters before each step, as torch's own
    require."""
    optimizer.register_step_pre_hook(_round_gradients)
    setattr(optimizer, _ROUNDS, True)


def rounds_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer casts gradients before each step."""
    return bool(getattr(optimizer, _ROUNDS, False))


@torch.no_grad()
def _round_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                parameter.grad = parameter.grad.to(parameter.dtype)


def build_optimizer(recipe: Recipe, wrapped: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
    """Create the optimizer for the trained parameters of `wrapped`, with weight decay for the names in
    `decayed`."""
    optimizer = create_optimizer(recipe, wrapped, decayed)
    if sums_need_fp32(recipe):
        sum_gradients_in_fp32(wrapped)
        if not isinstance(optimizer, LeanAdamW):  # which computes on fp32 copies
            round_before_step(optimizer)
    if gathers_in_fp8(recipe):
        optimizer.register_step_post_hook(lambda *_: refresh_scales(wrapped))
    return optimizer


def create_optimizer(recipe: Recipe, wrapped: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
    training = recipe.training
    kind, options = optimizer_of(training)
    matrices = orthogonalised_names(wrapped, decayed) if kind is Muon else None
    groups = parameter_groups(wrapped, lambda name: _options_of(recipe, name, decayed, matrices))
    if optimizer_name(training) == "adafactor":
        return ShardedAdafactor(groups, lr=training.learning_rate)
    if state_bits(training) is not None:
        return with_plain_rates(kind)(groups, **options)
    if not options.get("fused") or kind is Muon:
        return kind(groups, **options)
    given = optimizer_arguments(training)
    if not given:
        return AdamW(groups, **options)
    # None: parameters that the class keeps in fp32 have moments in fp32
    kept_in = TORCH_DTYPE.get(state_dtype(training, "as stored"))
    return LeanAdamW(
        groups,
        **options,
        state_dtype=kept_in,
        rounds_parameters=given.get(STOCHASTIC, False),
        seed=training.seed,
    )


def _options_of(
    recipe: Recipe, name: str, decayed: frozenset[str], matrices: frozenset[str] | None
) -> dict[str, object]:
    """Return the options of the group of a parameter: those of the first of `training.parameter_groups` that
    matches, or the recipe's.

    In LoRA+ (arXiv:2402.12354) the learning rate of every B is `lora.loraplus_lr_ratio` times that of A.
    `matrices` are the names for Muon.
    """
    own = matching_group(recipe.training, name)
    rate, decay = (None, None) if own is None else (own.learning_rate, own.weight_decay)
    if decay is None:
        decay = float(training_value(recipe.training, "weight_decay")) if name in decayed else 0.0
    if (
        recipe.lora is not None
        and recipe.lora.loraplus_lr_ratio != 1.0
        and (".lora_B." in name or ".lora_embedding_B." in name)
    ):
        rate = (recipe.training.learning_rate if rate is None else rate) * recipe.lora.loraplus_lr_ratio
    options: dict[str, object] = {"weight_decay": decay}
    if rate is not None:
        options["lr"] = rate
    if matrices is not None:
        options[ORTHOGONAL] = name in matrices
    return options


def options_by_parameter(
    recipe: Recipe, model: nn.Module, decayed: frozenset[str]
) -> dict[str, dict[str, object]]:
    """Return the options of each trained parameter's group by its name; the model may be on the meta
    device."""
    matrices = orthogonalised_names(model, decayed) if optimizer_of(recipe.training)[0] is Muon else None
    names = [plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: _options_of(recipe, name, decayed, matrices) for name in names}


def optimizer_of(training: Training) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return class and keyword arguments of `training.optim`, as `Trainer.get_optimizer_cls_and_kwargs`
    does."""
    name, bits, options = optimizer_name(training), state_bits(training), optimizer_options(training)
    if name == "adafactor":
        from transformers.optimization import Adafactor  # which imports PEFT

        return Adafactor, options
    return _CLASSES.get(name, torch.optim.AdamW) if bits is None else torchao_class(bits), options


_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "muon": Muon,
}
