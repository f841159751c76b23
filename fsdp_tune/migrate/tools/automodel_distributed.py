"""Automodel's section `distributed`: how ranks divide the model and the rows, dtypes, and recomputation."""

from __future__ import annotations

from fsdp_tune.migrate.rules import (
    FileKey,
    Outcome,
    Rule,
    Rules,
    cases,
    each,
    fine_or,
    off_or,
    same,
    section,
    switch,
)
from fsdp_tune.migrate.tools.experts import expert_ranks
from fsdp_tune.migrate.tools.named_objects import TARGET
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write

_OFF = (None, "none", "None", "null", 1, "1")
"""Values of a degree for which Automodel uses one rank, or computes it from the ranks."""


def _ranks_of_data(key: FileKey) -> Outcome:
    if key.value in _OFF:
        return Drop("it follows from the ranks")
    return Ask(
        "write `parallelism: {dp_shard_size: …}`, or leave it out: it follows from the ranks", "parallelism"
    )


def _degree(key: FileKey) -> Outcome:
    if key.value in _OFF:
        return Drop("off: one rank, as it is here")
    if not isinstance(key.value, int):
        return Ask(
            f"it is not a number of ranks: write `parallelism: {{{key.name}: N}}`", f"parallelism.{key.name}"
        )
    return Write({f"parallelism.{key.name}": key.value}, fate=Fate.KEPT)


_strategy = cases(
    "fsdp",
    {"fsdp2": Write({"fsdp.version": 2}), "ddp": Write({"fsdp.sharding_strategy": "NO_SHARD"})},
    lambda key: Ask(
        f"`{key.value}` has no counterpart: FSDP2 shards by `fsdp: {{sharding_strategy: FULL_SHARD}}`", "fsdp"
    ),
)
RECOMPUTATION = switch(
    Write({"fsdp.activation_checkpointing": "full"}), Write({"fsdp.activation_checkpointing": "none"})
)


def _only_with_stages(key: FileKey) -> Outcome:
    stages = key.of_file("distributed", "pp_size")
    if isinstance(stages, int) and stages > 1:
        return Ask("there are no pipeline stages here", "parallelism")
    return Drop("no effect with one pipeline stage")


_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "float16": "fp16"}


def _dtype_of(target: str) -> Rule:
    names = _DTYPES | ({"float32": "no", "fp32": "no"} if target == "precision.mixed_precision" else {})

    def rule(key: FileKey) -> Outcome:
        name = str(key.value).removeprefix("torch.")
        return Write({target: names.get(name, str(key.value))})

    return rule


_ASIDE = Drop("ranks gather and reduce as FSDP2 orders it")
DISTRIBUTED: Rules = {
    TARGET: Drop("ranks are sharded by `fsdp:`"),
    "strategy": _strategy,
    "dp_size": _ranks_of_data,
    **each(("dp_replicate_size", "tp_size", "cp_size"), _degree),
    "pp_size": fine_or(
        (1, "none", "None"), "off, as it is here", "there are no pipeline stages here", "parallelism"
    ),
    "ep_size": expert_ranks,
    "sequence_parallel": off_or("off", "write `parallelism: {sp_size: N}` to divide rows over ranks"),
    "activation_checkpointing": RECOMPUTATION,
    "mp_policy": section(
        {
            "param_dtype": _dtype_of("precision.mixed_precision"),
            "reduce_dtype": _dtype_of("precision.reduce_dtype"),
            **each(
                (TARGET, "output_dtype", "cast_forward_inputs"),
                Drop("follows from `precision.mixed_precision`"),
            ),
        }
    ),
    "autocast_dtype": Drop("the dtype of the computation is `precision.mixed_precision`"),
    "offload_policy": lambda key: Write({"fsdp.offload_params": bool(key.value)}),
    "reshard_after_forward": same("fsdp.reshard_after_forward"),
    "pipeline": _only_with_stages,
    "moe": Drop("experts are sharded as `fsdp.ep_size` needs it"),
    **each(
        ("enable_fsdp2_prefetch", "fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"), _ASIDE
    ),
    **each(
        (
            "defer_fsdp_grad_sync",
            "patch_is_packed_sequence",
            "enable_async_tensor_parallel",
            "enable_compile",
        ),
        _ASIDE,
    ),
}
