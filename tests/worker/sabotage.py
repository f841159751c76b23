"""Runs whose live state differs from their recipe: one setting is changed on every rank or on one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from tests.parity.runs import run_worker


def run_sabotaged(path: str, names: Sequence[str]) -> dict[str, Any]:
    """On a rank: the worker, with several settings changed at once."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(SABOTAGE[name]())
        return run_worker(path)


def _wrap_option(name: str) -> str:
    return f"fsdp_tune.model.shard.wrap.{name}"


def freed_after_every_micro_batch() -> AbstractContextManager[Any]:
    return patch("torch.distributed.fsdp.FSDPModule.set_reshard_after_backward", lambda *_: None)


def no_resharding() -> AbstractContextManager[Any]:
    return patch(
        "fsdp_tune.recipe.schema.recipe.Recipe.reshards_after_forward", property(lambda recipe: False)
    )


def _policy(**changes: Any) -> Callable[[], AbstractContextManager[Any]]:
    def start() -> AbstractContextManager[Any]:
        import torch

        from fsdp_tune.model.shard import wrap

        original = wrap.mixed_precision_policy
        fields = {key: getattr(torch, value) for key, value in changes.items()}
        return patch.object(
            wrap, "mixed_precision_policy", lambda recipe: dataclasses.replace(original(recipe), **fields)
        )

    return start


def reduced_in_bf16_on_one_rank() -> AbstractContextManager[Any]:
    import torch
    import torch.distributed as dist

    from fsdp_tune.model.shard import wrap

    original = wrap.mixed_precision_policy
    changes = {"reduce_dtype": torch.bfloat16} if dist.get_rank() == 1 else {}
    return patch.object(
        wrap, "mixed_precision_policy", lambda recipe: dataclasses.replace(original(recipe), **changes)
    )


def not_offloaded() -> AbstractContextManager[Any]:
    from torch.distributed.fsdp import OffloadPolicy

    return patch(_wrap_option("offload_policy"), lambda recipe, device_type: OffloadPolicy())


def offloaded() -> AbstractContextManager[Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return patch(
        _wrap_option("offload_policy"), lambda recipe, device_type: CPUOffloadPolicy(pin_memory=False)
    )


def one_mesh_instead_of_two_copies() -> AbstractContextManager[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    return patch(
        "fsdp_tune.model.loading.assemble.make_mesh",
        lambda recipe, device_type: init_device_mesh(device_type, (4,)),
    )


def _units(keep: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    def start() -> AbstractContextManager[Any]:
        from fsdp_tune.model.loading import assemble as load

        original = load.plan_units
        return patch.object(load, "plan_units", lambda recipe, model: keep(original(recipe, model)))

    return start


def no_recomputation() -> AbstractContextManager[Any]:
    return patch("fsdp_tune.model.loading.assemble.recompute_activations", lambda recipe, model: [])


def every_layer_recomputed() -> AbstractContextManager[Any]:
    from fsdp_tune.model.shard import recompute

    return patch.object(
        recompute,
        "checkpointed_layers",
        lambda recipe, model: recompute.decoder_layers(model, recipe.layer_classes),
    )


def no_prefetch() -> AbstractContextManager[Any]:
    return patch(_wrap_option("set_prefetch"), lambda recipe, units: None)


def other_attention() -> AbstractContextManager[Any]:
    return patch("fsdp_tune.model.loading.construct.attention", lambda recipe, config: "sdpa")


def stored_in_bf16() -> AbstractContextManager[Any]:
    import torch

    return patch("fsdp_tune.model.loading.construct.storage_dtype", lambda recipe: torch.bfloat16)


def nothing_frozen() -> AbstractContextManager[Any]:
    return patch("fsdp_tune.model.loading.construct.freeze", lambda recipe, model: None)


def plain_ddp() -> AbstractContextManager[Any]:
    from fsdp_tune.model.loading import assemble as load
    from fsdp_tune.model.shard import wrap

    return patch.object(
        load, "wrap", lambda recipe, model, units, mesh, device: wrap._wrap_ddp(model.to(device), device)
    )


def other_order_on_one_rank() -> AbstractContextManager[Any]:
    import torch.distributed as dist

    from fsdp_tune.data import batches as order

    original, rank = order.epoch_order, dist.get_rank()

    def other(lengths: Any, *, seed: int, **options: Any) -> Any:
        return original(lengths, seed=seed + rank, **options)

    return patch.object(order, "epoch_order", other)


def moments_in_bf16() -> AbstractContextManager[Any]:
    """The optimizer's state after step 1 is not what the recipe means."""
    from fsdp_tune.model.optim.adamw import AdamW

    original = AdamW.step

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        value = original(self, *arguments, **options)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16()
        return value

    return patch.object(AdamW, "step", step)


SABOTAGE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "units are freed after every micro-batch": freed_after_every_micro_batch,
    "units are not resharded": no_resharding,
    "sums in bf16": _policy(reduce_dtype="bfloat16"),
    "computes in bf16": _policy(param_dtype="bfloat16"),
    "output in bf16": _policy(output_dtype="bfloat16"),
    "sums in bf16 on one rank": reduced_in_bf16_on_one_rank,
    "not offloaded": not_offloaded,
    "offloaded": offloaded,
    "one mesh instead of two copies": one_mesh_instead_of_two_copies,
    "no units": _units(lambda plan: dataclasses.replace(plan, groups=())),
    "one layer is no unit": _units(lambda plan: dataclasses.replace(plan, groups=plan.groups[1:])),
    "no recomputation": no_recomputation,
    "every layer recomputed instead of every second": every_layer_recomputed,
    "no prefetch": no_prefetch,
    "another attention kernel": other_attention,
    "stored in bf16": stored_in_bf16,
    "nothing is frozen": nothing_frozen,
    "plain DDP": plain_ddp,
    "another order of the rows on one rank": other_order_on_one_rank,
    "optimizer state in bf16": moments_in_bf16,
}
