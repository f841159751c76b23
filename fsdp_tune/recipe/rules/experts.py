"""What `fsdp.ep_size` was not shown to train as it does with `ep_size: 1`. Part of
`rules.contradictions.RULES`.

`recipe.world` checks the ranks, `model.shard.expert_parallel` the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.recipe.rules.limits import computes_in_fp8
from fsdp_tune.recipe.schema.keys import Finding, Rule
from fsdp_tune.recipe.schema.optimizers import (
    DEFAULT_OPTIMIZER,
    STATE_DTYPE,
    STOCHASTIC,
    optimizer_name,
    pairs_of,
)
from fsdp_tune.recipe.schema.recipe import Recipe

_KEY = "fsdp.ep_size"

Unsupported = dict[str, tuple[str | bool | None, str]]
"""What is not supported, falsy if the recipe does not have it, and a hint, by the key to change."""


def expert_parallel_limits(recipe: Recipe) -> Iterator[Finding]:
    size = recipe.fsdp.ep_size
    if size == 1:
        return
    for key, (what, hint) in (_sharding(recipe) | _computing(recipe) | _training(recipe)).items():
        if what:
            yield Finding("contradiction", (key, _KEY), f"`{_KEY}: {size}` does not support {what}", hint)


def _sharding(recipe: Recipe) -> Unsupported:
    fsdp, sequence = recipe.fsdp, recipe.parallelism.of_row.sequence
    reshard = fsdp.reshard_after_forward
    found: Unsupported = {
        "fsdp.version": (
            fsdp.version == 1 and recipe.is_sharded and "`fsdp.version: 1`",
            "use `fsdp.version: 2`",
        ),
        "fsdp.sharding_strategy": (
            not recipe.is_sharded
            and f"`fsdp.sharding_strategy: {fsdp.sharding_strategy}` (each rank holds all experts)",
            "write `sharding_strategy: FULL_SHARD`",
        ),
        "parallelism.sp_size": (sequence > 1 and f"`parallelism.sp_size: {sequence}`", "leave `sp_size` out"),
        "fsdp.auto_wrap_policy": (
            fsdp.auto_wrap_policy != "TRANSFORMER_BASED_WRAP"
            and f"`fsdp.auto_wrap_policy: {fsdp.auto_wrap_policy}`",
            "write `auto_wrap_policy: TRANSFORMER_BASED_WRAP`",
        ),
        "fsdp.ignored_modules": (
            fsdp.ignored_modules is not None and "`fsdp.ignored_modules`",
            "leave `ignored_modules` out",
        ),
        "fsdp.reshard_after_forward": (
            type(reshard) is int and f"`fsdp.reshard_after_forward: {reshard}` (ranks)",
            "leave it out",
        ),
        "fsdp.offload_params": (
            fsdp.offload_params and "`fsdp.offload_params: true`",
            "leave `offload_params` out",
        ),
        "fsdp.activation_checkpointing_offload": (
            fsdp.activation_checkpointing_offload and "`fsdp.activation_checkpointing_offload: true`",
            "leave `activation_checkpointing_offload` out",
        ),
    }
    if fsdp.activation_checkpointing == "selective":
        what = (
            "`fsdp.activation_checkpointing: selective` (the experts of a layer are an FSDP unit of "
            "their own)"
        )
        found["fsdp.activation_checkpointing"] = (what, "write `activation_checkpointing: full`")
    return found


def _computing(recipe: Recipe) -> Unsupported:
    kernels, precision = recipe.kernels, recipe.precision
    kernel = EXPERTS_KERNELS.get(kernels.experts)
    return {
        "precision.mixed_precision": (
            (computes_in_fp8(recipe) or recipe.compute_dtype == "fp16")
            and f"`precision.mixed_precision: {precision.mixed_precision}`",
            "write `bf16`",
        ),
        "precision.reduce_dtype": (
            precision.reduce_dtype == "fp16" and "`precision.reduce_dtype: fp16`",
            "write `fp32`",
        ),
        "kernels.compile": (kernels.compile and "`kernels.compile: true`", "leave `compile` out"),
        "kernels.liger": (
            kernels.liger is True
            and "`kernels.liger: true` (Liger would replace the forward of the experts)",
            "write `liger: auto`",
        ),
        "kernels.experts": (
            kernel is not None and not kernel.divided_in and f"`kernels.experts: {kernels.experts}`",
            "leave `experts` at auto",
        ),
        "kernels.mlp_slice_tokens": (
            kernels.mlp_slice_tokens is not None
            and f"`kernels.mlp_slice_tokens: {kernels.mlp_slice_tokens}`",
            "leave `mlp_slice_tokens` out",
        ),
    }


def _training(recipe: Recipe) -> Unsupported:
    name = optimizer_name(recipe.training)
    lean = next((word for word, _ in pairs_of(recipe.training) if word in (STATE_DTYPE, STOCHASTIC)), None)
    return {
        "quantization": (recipe.quantization is not None and "`quantization`", "leave `quantization` out"),
        "training.optim": (
            name != DEFAULT_OPTIMIZER
            and f"`training.optim: {name}` (experts are sharded over another mesh than other parameters)",
            f"use `optim: {DEFAULT_OPTIMIZER}`",
        ),
        "training.optim_args": (lean is not None and f"`{lean}`", f"leave `{lean}` out"),
    }


EXPERT_PARALLEL_RULES: tuple[Rule, ...] = (expert_parallel_limits,)
