"""Translate the recipe's FSDP keys to settings of Accelerate and the plugin; separately, derive the expected
state of a live run.

`plugin_kwargs`, `accelerate_config` and `environment` return settings. `expected` returns the state that the
settings must produce. The two are written independently, so that a mistake in the settings is not repeated in
the check: the read-back compares the live objects with `expected`, never with the settings.
"""

from __future__ import annotations

from typing import Any

from fsdp_tune.core.user_cache import compiler_variables
from fsdp_tune.recipe.schema.optimizers import state_bits, state_dtype
from fsdp_tune.recipe.schema.recipe import Recipe

# transformers and Accelerate read variables with these prefixes on their own; each rank removes all that are
# inherited.
OWNED_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def compiles(recipe: Recipe) -> bool:
    """Return whether ranks compile kernels: of the layers, of weights in 4 bits, or of an optimizer with
    low-bit moments."""
    return recipe.kernels.compile or recipe.nf4 is not None or state_bits(recipe.training) is not None


def environment(recipe: Recipe) -> dict[str, str]:
    """Return the environment variables that transformers and Accelerate read when they are imported or first
    constructed.

    `launch.json` records them; each rank removes all other variables with `OWNED_PREFIXES` and sets exactly
    these.
    """
    return {
        **compiler_variables(),
        "ACCELERATE_USE_FSDP": str(recipe.is_sharded).lower(),
        "ACCELERATE_CPU_AFFINITY": str(recipe.launch.enable_cpu_affinity).lower(),
        # MixedPrecisionPolicy casts; Accelerate must not wrap forward in autocast
        "ACCELERATE_MIXED_PRECISION": "no",
        "FSDP_VERSION": str(recipe.fsdp.version),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": str(recipe.fsdp.cpu_ram_efficient_loading).lower(),
        "FSDP_OFFLOAD_PARAMS": str(recipe.fsdp.offload_params).lower(),
        "FSDP_STATE_DICT_TYPE": recipe.fsdp.state_dict_type,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def accelerate_config(recipe: Recipe) -> dict[str, object]:
    """Return the content of RUN/accelerate.yaml. Passed as `--config_file`, it keeps Accelerate from reading
    the user's default config.

    `distributed_type` is FSDP under NO_SHARD too: on CPU, `accelerate launch` spawns several ranks under no
    other type.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP",
        "downcast_bf16": "no",
        "enable_cpu_affinity": recipe.launch.enable_cpu_affinity,
        "fsdp_config": {
            "fsdp_version": recipe.fsdp.version,
            "fsdp_reshard_after_forward": bool(recipe.reshards_after_forward),
            "fsdp_offload_params": recipe.fsdp.offload_params,
            "fsdp_cpu_ram_efficient_loading": recipe.fsdp.cpu_ram_efficient_loading,
            "fsdp_state_dict_type": recipe.fsdp.state_dict_type,
            # the worker wraps; Accelerate's own size wrap is broken on FSDP2
            "fsdp_auto_wrap_policy": "NO_WRAP",
            # the worker recomputes with the RNG state kept; Accelerate does not
            "fsdp_activation_checkpointing": False,
        },
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": recipe.launch.num_machines,
        "num_processes": recipe.world_size,
        "rdzv_backend": "c10d",
        "same_network": True,
        "use_cpu": False,
    }


def plugin_kwargs(recipe: Recipe) -> dict[str, Any]:
    """Return the keyword arguments of Accelerate's FullyShardedDataParallelPlugin, all of them explicit.

    The plugin fills a field that is None from the environment. `auto_wrap_policy` and
    `activation_checkpointing` stay off because the model is already wrapped (`model.shard.wrap`) when
    Accelerate receives it, and Accelerate then does not change it.
    """
    common: dict[str, object] = {
        "fsdp_version": recipe.fsdp.version,
        "cpu_offload": recipe.fsdp.offload_params,
        "auto_wrap_policy": "NO_WRAP",
        "state_dict_type": recipe.fsdp.state_dict_type,
        "activation_checkpointing": False,
        "activation_checkpointing_offload": False,
        "cpu_ram_efficient_loading": False,
    }
    if recipe.fsdp.version == 2:
        return common | {"reshard_after_forward": bool(recipe.reshards_after_forward)}
    prefetch = recipe.fsdp.backward_prefetch
    return common | {
        "reshard_after_forward": recipe.fsdp.sharding_strategy,
        "use_orig_params": True,
        "sync_module_states": False,
        "forward_prefetch": bool(recipe.fsdp.forward_prefetch),
        "backward_prefetch": prefetch if isinstance(prefetch, str) else "BACKWARD_PRE",
    }


# Definition of each strategy (ZeRO paper, arXiv:1910.02054; FSDP paper, arXiv:2304.11277): the placement of
# parameters on each mesh dimension, and whether a unit's gathered parameters are freed between its forward
# and its backward.
_MEANING: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"mesh": ("shard",), "placements": ["Shard(dim=0)"], "reshard_after_forward": True},
    "SHARD_GRAD_OP": {"mesh": ("shard",), "placements": ["Shard(dim=0)"], "reshard_after_forward": False},
    "HYBRID_SHARD": {
        "mesh": ("replicate", "shard"),
        "placements": ["Replicate()", "Shard(dim=0)"],
        "reshard_after_forward": True,
    },
    "HYBRID_SHARD_ZERO2": {
        "mesh": ("replicate", "shard"),
        "placements": ["Replicate()", "Shard(dim=0)"],
        "reshard_after_forward": False,
    },
    "NO_SHARD": {"mesh": (), "placements": [], "reshard_after_forward": None},
}
# fp8 applies to single modules: `worker.readback.report`
_COMPUTE = {
    "no": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "bfloat16",
}
_STORAGE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def expected(recipe: Recipe) -> dict[str, object]:
    """Return the expected state of the live objects of every rank, for a resolved recipe.
    `worker.readback.report` compares them."""
    meaning = _MEANING[recipe.fsdp.sharding_strategy]
    sizes = {axis: recipe.topology.group(axis).ranks for axis in meaning["mesh"]}
    compute = _COMPUTE[recipe.precision.mixed_precision]
    storage = _STORAGE[recipe.model.dtype]
    bits = state_bits(recipe.training)
    wrapper = {1: "fsdp1", 2: "fsdp2"}[recipe.fsdp.version] if meaning["mesh"] else "ddp"
    # In a resolved recipe a boolean here follows from the strategy; only a number of ranks adds information.
    explicit = recipe.fsdp.reshard_after_forward
    reshard = meaning["reshard_after_forward"] if explicit is None or isinstance(explicit, bool) else explicit
    placements = meaning["placements"]
    if wrapper == "fsdp1" and recipe.world_size == 1:
        # FSDP1 on one rank has nothing to shard; FSDP2 creates DTensors regardless
        placements, reshard = (
            [],
            None,
        )
    if recipe.fsdp.auto_wrap_policy == "NO_WRAP" or not meaning["mesh"]:
        # the root is the only unit, and its backward starts where its forward ends; or nothing is sharded
        reshard = None
    of_fsdp2: dict[str, object] = {}
    if wrapper == "fsdp2":
        of_fsdp2["output_dtype"] = None  # the model's output, and with it the loss, is not rounded
        # of all micro-batches but the last
        of_fsdp2["reshard_after_backward"] = recipe.fsdp.reshard_after_backward
    if wrapper == "fsdp2" and recipe.fsdp.auto_wrap_policy != "NO_WRAP":
        backward = recipe.fsdp.backward_prefetch
        of_fsdp2["forward_prefetch"] = int(recipe.fsdp.forward_prefetch)
        of_fsdp2["backward_prefetch"] = backward if isinstance(backward, int) else "implicit"
    return {
        **of_fsdp2,
        "wrapper": wrapper,
        "world_size": recipe.world_size,
        "mesh": list(sizes.values()),
        "sequence_group": recipe.topology.sequence,
        "expert_group": recipe.fsdp.ep_size,
        "placements": placements,
        "reshard_after_forward": reshard,
        "parameter_dtype": storage,
        "compute_dtype": storage if recipe.precision.mixed_precision == "no" else compute,
        "reduce_dtype": _STORAGE[recipe.precision.reduce_dtype] if meaning["mesh"] else storage,
        # Where a rank's shard is small or not a multiple of the block size, the moments have the dtype of the
        # parameter.
        "optimizer_state_dtype": f"{bits}-bit"
        if bits
        else _STORAGE[state_dtype(recipe.training, recipe.model.dtype)],
        "offload_params": recipe.fsdp.offload_params,
        "activation_checkpointing": recipe.fsdp.activation_checkpointing,
        "global_batch_size": recipe.global_batch_size,
        "gradient_accumulation_steps": recipe.training.gradient_accumulation_steps,
    }
