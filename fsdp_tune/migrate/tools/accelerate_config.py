"""Keys of Accelerate's configuration file, and options of its launcher and of `torchrun`."""

from __future__ import annotations

from fsdp_tune.core.values import is_mapping
from fsdp_tune.migrate.rules import (
    UNSUPPORTED_SWITCH,
    Also,
    FileKey,
    Outcome,
    Rules,
    by_synonym,
    each,
    implies,
    off_or,
    same,
    section,
)
from fsdp_tune.migrate.tool import Tool
from fsdp_tune.migrate.tools.deepspeed import PLUGIN_RULES
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write
from fsdp_tune.recipe.read.legacy import DTYPE_NAMES
from fsdp_tune.recipe.read.tool_detection import ACCELERATE

_LAUNCH = "the launcher of this package sets it"
_SHARDED = Drop("sharding is on by default; its keys have the details")
_WHOLE = Write({"fsdp.sharding_strategy": "NO_SHARD"}, "every rank holds the whole model (DDP)")
_KINDS = {
    **dict.fromkeys(("FSDP", "DEEPSPEED"), _SHARDED),
    **dict.fromkeys(("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU"), _WHOLE),
}
"""How the ranks share the model."""


def _kind(key: FileKey) -> Outcome:
    name = "NO" if key.value is False else str(key.value)  # YAML 1.1 reads `NO` without quotes as false
    return _KINDS.get(name.upper(), Ask(f"`{name}` has no counterpart", "fsdp.sharding_strategy"))


def _precision(key: FileKey) -> Outcome:
    name = {False: "no"}.get(key.value, DTYPE_NAMES.get(key.value, key.value))
    return Write({"precision.mixed_precision": name}, fate=Fate.KEPT if name == key.value else Fate.CONVERTED)


def _compile(key: FileKey) -> Outcome:
    backend = key.mapping.get("dynamo_backend", "NO") if is_mapping(key.value) else key.value
    if str(backend).upper() == "NO":
        return Drop("off, as it is here")
    return Write({"kernels.compile": True}, "each decoder layer is compiled")


def _port(key: FileKey) -> Outcome:
    if key.value == 0:
        return Drop("a free port is found here too")
    return Write({"launch.main_process_port": key.value}, fate=Fate.KEPT)


_PREFIX = "parallelism_config_"


def _mesh(key: FileKey) -> Outcome:
    """Sizes of the mesh: replicas of a sharded model are HYBRID_SHARD; a size of 1 is the default."""
    name, replicas = key.name.removeprefix(_PREFIX), key.beside(f"{_PREFIX}dp_replicate_size")
    hybrid = (
        [Also("fsdp.sharding_strategy", "HYBRID_SHARD", key.name)]
        if name == "dp_replicate_size" and key.value != 1
        else []
    )
    if key.value == 1 or (name == "dp_shard_size" and replicas in (None, 1)):
        return [Drop("all ranks share one model, as they do by default"), *hybrid]
    return [Write({f"parallelism.{name}": key.value}), *hybrid]


_PARALLEL: Rules = {
    **each(
        [
            f"{_PREFIX}{name}"
            for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
        ],
        _mesh,
    ),
    "parallelism_config_cp_comm_strategy": Drop(
        "the keys and values of a row are exchanged as `sp_size` needs them"
    ),
    **each(
        (
            "parallelism_config_sp_backend",
            "parallelism_config_sp_seq_length_is_variable",
            "parallelism_config_sp_attn_implementation",
        ),
        Drop("`sp_size` is Ulysses, for rows of any length and each attention kernel"),
    ),
}

LAUNCHER_RULES: Rules = {
    "num_processes": same("launch.num_processes"),
    "num_machines": same("launch.num_machines"),
    "machine_rank": Drop("each machine runs the same command"),
    "main_process_port": _port,
    **each(
        (
            "compute_environment",
            "main_training_function",
            "debug",
            "downcast_bf16",
            "rdzv_backend",
            "same_network",
        ),
        Drop(_LAUNCH),
    ),
    **each(
        ("module", "m", "no_python", "standalone", "monitor_interval", "rdzv_conf", "rdzv_id"), Drop(_LAUNCH)
    ),
    **each(
        ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone"),
        off_or("off", "TPUs are not supported"),
    ),
    "gpu_ids": Drop("`launch.num_processes` counts the ranks; CUDA_VISIBLE_DEVICES selects their GPUs"),
    **each(("ipex_config", "mpirun_config", "megatron_lm_config", "fp8_config"), UNSUPPORTED_SWITCH),
    "distributed_type": _kind,
    **each(
        ("multi_gpu", "use_fsdp", "use_deepspeed"),
        Drop("the ranks share the model by `fsdp.sharding_strategy`"),
    ),
    "mixed_precision": _precision,
    **each(("dynamo_backend", "dynamo_config"), _compile),
    "use_cpu": implies({"launch.device": "cpu"}),
    "enable_cpu_affinity": same("launch.enable_cpu_affinity"),
    "parallelism_config": section(_PARALLEL),
    "gradient_accumulation_steps": same("training.gradient_accumulation_steps"),
    "gradient_clipping": by_synonym("gradient_clipping"),
    "node_rank": Drop("each machine runs the same command"),
}
"""Keys of Accelerate's file, and options of `accelerate launch` and `torchrun`. See
`settle_keys.settle_key`."""
ACCELERATE_RULES: Rules = {**LAUNCHER_RULES, "deepspeed_config": section(PLUGIN_RULES)}
ACCELERATE_TOOL = Tool(ACCELERATE, ACCELERATE_RULES)
