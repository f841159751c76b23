"""The keys that this release supports in part, with the supported values of each and the alternative.

A finished feature deletes its row. The supported optimizers are the rows of
`recipe.schema.optimizers`; a test checks that every other name of transformers is refused here.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS


@dataclass(frozen=True, slots=True)
class NotYet:
    key: str
    works: tuple[object, ...]
    """Values that are supported; any other is refused."""
    what: str
    """The missing feature, for a message that begins `this release has no`."""
    meanwhile: str


_BITSANDBYTES_TOO = {"adamw_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit"}
_ALL_OPTIMIZERS = TRAINING_FIELDS.enums["OptimizerNames"]
_BITSANDBYTES = tuple(
    name
    for name in _ALL_OPTIMIZERS
    if name.startswith("paged_") or "bnb" in name or name in _BITSANDBYTES_TOO
)
_REFUSED_OPTIMIZERS = (
    (
        "galore_*",
        "GaLore under FSDP (its projections are of full gradients, and a rank has a part of each)",
        "write `adafactor`, whose state is as small, or use `lora:`",
    ),
    (
        "apollo_*",
        "APOLLO under FSDP (its random projections are of full gradients, and a rank has a part of each)",
        "write `adafactor`, whose state is as small, or use `lora:`",
    ),
    (
        "*lomo",
        "LOMO under FSDP (it updates parameters during the backward, before gradients of all ranks "
        "and micro-batches are added)",
        "write `adafactor`, which keeps next to no state",
    ),
    (
        "schedule_free_*",
        "schedule-free optimizers (evaluation and checkpoints need their averaged weights, which the "
        "training loop does not switch to)",
        "write `adamw_torch_fused` with `lr_scheduler_type: constant_with_warmup`",
    ),
    (
        "grokadamw",
        "GrokAdamW (it is in the package grokadamw, which is not tested with sharded parameters)",
        "write `adamw_torch_fused`",
    ),
    (
        "stable_adamw",
        "StableAdamW (its package, torch-optimi, limits an update by its root mean square over this "
        "rank's part alone)",
        "write `adafactor`, which limits an update over all ranks",
    ),
    (
        "adamw_anyprecision",
        "AnyPrecisionAdamW (its package, torchdistx, is no longer maintained)",
        'write `adamw_torch_fused` with `optim_args: "state_dtype=bf16"`',
    ),
    (
        "adamw_torch_npu_fused",
        "AdamW of torch_npu (its kernel is not tested with sharded parameters)",
        "write `adamw_torch_fused`",
    ),
    ("adamw_torch_xla", "XLA devices", "write `adamw_torch_fused`"),
)
"""Pattern of names, the missing feature, and the alternative."""
# The schedule is computed from the step, also on resume.
_SCHEDULES = tuple(
    name for name in TRAINING_FIELDS.enums["SchedulerType"] if name not in {"reduce_lr_on_plateau", "greedy"}
)

NOT_YET = (
    NotYet(
        "parallelism.tp_size",
        (1,),
        "tensor parallelism (FSDP is faster with a row for each GPU: docs/evidence/tensor-parallelism.md)",
        "leave it at 1; with fewer rows than GPUs write `sp_size`",
    ),
    NotYet(
        "parallelism.cp_size",
        (1,),
        "context parallelism (Accelerate's discards the mask, so that packed examples see each other)",
        "write `sp_size`, which divides each row over as many ranks",
    ),
    NotYet(
        "training.debug",
        ("", []),
        "transformers' debugging under FSDP (it formats weights, and of sharded ones a rank has no number)",
        "leave it out: a run stops at a NaN or infinite value and names the module it is from",
    ),
    NotYet(
        "training.optim",
        tuple(name for name in (None, *_ALL_OPTIMIZERS) if name not in _BITSANDBYTES),
        "bitsandbytes under FSDP (it counts blocks by a parameter's full size, and its kernels take "
        "no DTensor)",
        "write `adamw_torch_8bit` (torchao), which keeps each rank's part in blocks",
    ),
    *(
        NotYet(
            "training.optim",
            tuple(name for name in (None, *_ALL_OPTIMIZERS) if not fnmatch.fnmatchcase(name or "", pattern)),
            what,
            meanwhile,
        )
        for pattern, what, meanwhile in _REFUSED_OPTIMIZERS
    ),
    NotYet(
        "training.lr_scheduler_type",
        _SCHEDULES,
        "schedule that depends on losses",
        "write linear, cosine or another function of the step",
    ),
)


def refused(recipe: Recipe) -> list[tuple[NotYet, object]]:
    """Return the rows whose key has an unsupported value in `recipe`, with that value."""
    given = [(row, value_of(recipe, row.key)) for row in NOT_YET]
    return [
        (row, value)
        for row, value in given
        if not any(type(value) is type(good) and value == good for good in row.works)
    ]
