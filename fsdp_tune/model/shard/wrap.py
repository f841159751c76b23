"""Apply the recipe's sharding to a model: device mesh, FSDP units, mixed precision, offload, prefetch.

The model is wrapped before it is passed to Accelerate, which does not change an `FSDPModule`. Accelerate's
own path cannot wrap by size, sums gradients in bf16, and casts the model's output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from fsdp_tune.core.expert_names import dim_inside
from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.internals.transformers_internals import RECORDED_OUTPUTS
from fsdp_tune.model.shard.expert_adapters import adapters_around
from fsdp_tune.model.shard.expert_parallel import (
    average_over_all,
    divide_experts,
    expert_mesh_of,
    make_expert_mesh,
    mesh_of_shards,
)
from fsdp_tune.model.shard.fsdp_units import UnitPlan, ignored_module_names
from fsdp_tune.model.shard.local import TORCH_DTYPE, bare_class
from fsdp_tune.model.shard.process_groups import groups_of
from fsdp_tune.recipe.schema.optimizers import state_bits
from fsdp_tune.recipe.schema.recipe import Recipe


def mixed_precision_policy(recipe: Recipe) -> MixedPrecisionPolicy:
    """Return the policy: compute in the recipe's dtype, sum gradients in `reduce_dtype`, do not cast the
    model's output.

    Accelerate's policy would round the loss itself to the compute dtype (`output_dtype`) and sum in it.
    """
    compute = None if recipe.precision.mixed_precision == "no" else TORCH_DTYPE[recipe.compute_dtype]
    return MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=TORCH_DTYPE[recipe.precision.reduce_dtype], output_dtype=None
    )


def offload_policy(recipe: Recipe, device_type: str) -> OffloadPolicy:
    # Pinning needs an accelerator and raises on CPU ranks.
    return (
        CPUOffloadPolicy(pin_memory=device_type == "cuda") if recipe.fsdp.offload_params else OffloadPolicy()
    )


def wrap(
    recipe: Recipe, model: PreTrainedModel, units: UnitPlan, mesh: DeviceMesh | None, device: torch.device
) -> nn.Module:
    """Shard `model` in place and return the module to call (under FSDP2 the same one)."""
    if not recipe.is_sharded:
        return _wrap_ddp(model, device)
    assert mesh is not None
    if recipe.fsdp.version == 1:
        return _wrap_fsdp1(recipe, model, units, mesh, device)
    return _wrap_fsdp2(recipe, model, units, mesh, device)


def _wrap_ddp(model: PreTrainedModel, device: torch.device) -> nn.Module:
    device_ids = None if device.type == "cpu" else [device]
    # Gradients as views of the buckets save a copy; buffers are the same on all ranks.
    return DistributedDataParallel(
        model, device_ids=device_ids, gradient_as_bucket_view=True, broadcast_buffers=False
    )


def _wrap_fsdp2(
    recipe: Recipe, model: PreTrainedModel, units: UnitPlan, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision_policy(recipe),
        "offload_policy": offload_policy(recipe, device.type),
    }
    as_stored = options | {
        "mp_policy": replace(options["mp_policy"], param_dtype=None, cast_forward_inputs=False)
    }
    expert_mesh = make_expert_mesh(recipe, device.type) if units.divided else None
    if expert_mesh is not None:
        model.expert_mesh = expert_mesh  # type: ignore[assignment]
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        allow_integer_parameters()
    ranks = mesh.size(-1)
    if any(shard_dim(recipe, parameter.shape, ranks) for parameter in model.parameters()):
        options["shard_placement_fn"] = lambda parameter: Shard(shard_dim(recipe, parameter.shape, ranks))
        as_stored["shard_placement_fn"] = options["shard_placement_fn"]
    reshard = recipe.reshards_after_forward
    ignored = ignored_parameters(recipe, model)
    if units.holder is not None:
        ignored |= _wrap_holder(model, units, ignored, options, as_stored)
    for group in units.groups:
        modules = [model.get_submodule(name) for name in group]
        keep = group in units.keeps_gathered
        own = as_stored if group in units.in_fp32 else options
        if expert_mesh is not None and group[0] in units.divided:
            _shard_experts(model, group[0], expert_mesh, device, own | {"reshard_after_forward": reshard})
            continue
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            reshard_after_forward=False if keep else reshard,
            ignored_params=ignored or None,
            **own,
        )
    # Without `reshard_after_forward` the root stays gathered (FSDP2's default), since the backward starts
    # with it.
    if units.holder is None:
        fully_shard(model, ignored_params=ignored or None, **options)
    _keep_recorded_outputs(model)
    names = {group[0] for group in units.groups if group not in units.keeps_gathered}
    set_prefetch(recipe, [module for name, module in model.named_modules() if name in names])
    if recipe.fsdp.reshard_after_backward is False:
        model.set_reshard_after_backward(False)  # type: ignore[operator]  # until `begin_micro_batch` of a step's last one
    return model


def _shard_experts(
    model: PreTrainedModel,
    name: str,
    expert_mesh: DeviceMesh,
    device: torch.device,
    options: dict[str, Any],
) -> None:
    """Make the unit of divided experts: sharded inside of each expert, since the ranks of `ep` divide the
    first dimension."""
    experts = model.get_submodule(name)
    divide_experts(experts, expert_mesh, device, adapters_around(model, name))
    mesh = mesh_of_shards(expert_mesh)

    def placement(parameter: nn.Parameter) -> Shard:
        dim = dim_inside(parameter.shape, mesh.size(-1))
        assert dim is not None, "`require_divisible_experts` refuses others"
        return Shard(dim)

    # A decoder layer is a unit that casts its inputs; the weights of experts are computed inside of it, in
    # fp32 by some routers.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    of_experts: dict[str, Any] = {"mesh": mesh, "shard_placement_fn": placement, "mp_policy": policy}
    unit: Any = fully_shard(experts, **options | of_experts)
    average_over_all(unit, expert_mesh)


def begin_micro_batch(recipe: Recipe, wrapped: nn.Module, *, is_last: bool) -> None:
    """Set what FSDP2 does after the backward of the next micro-batch; `is_last` of its step. No-op for DDP
    and FSDP1.

    Under HSDP every micro-batch reduces inside a replica, and only the last one crosses between replicas.
    With `reshard_after_backward: false` only the last one frees gathered parameters: the optimizer then
    updates the shards, so a unit that stayed gathered would compute the next step with old weights.
    """
    if not isinstance(wrapped, FSDPModule):
        return
    if recipe.is_hybrid:
        wrapped.set_requires_all_reduce(is_last)
    if recipe.fsdp.reshard_after_backward is False:
        wrapped.set_reshard_after_backward(is_last)


def _wrap_holder(
    model: PreTrainedModel,
    units: UnitPlan,
    ignored: set[nn.Parameter],
    options: dict[str, Any],
    as_stored: dict[str, Any],
) -> set[nn.Parameter]:
    """Make the units of the root and of the holder. Return their parameters, which the other groups must not
    take.

    `fully_shard` takes no parameter below a module that is a unit already. So these two come before the
    groups inside of them, and ignore all parameters but their own.
    """
    assert units.holder is not None
    named = dict(model.named_parameters())
    inside = tuple(f"{name}." for group in units.groups for name in group)
    rest = {
        name
        for name, p in named.items()
        if not name.startswith(inside) and name not in units.held and p not in ignored
    }
    fully_shard(model, ignored_params={p for name, p in named.items() if name not in rest}, **options)
    others = {p for name, p in model.named_parameters() if name not in units.held}
    fully_shard(
        model.get_submodule(units.holder), reshard_after_forward=False, ignored_params=others, **as_stored
    )
    return {p for name, p in model.named_parameters() if name in rest or name in units.held}


def shard_dim(recipe: Recipe, shape: torch.Size, ranks: int) -> int:
    """Return the dimension in which FSDP2 shards a parameter: the first, or the second of stacked experts if
    `ranks` divide only that.

    Uneven parts are padded: of 8 experts on 12 ranks, 4 ranks would have none, and all ranks would gather 12.
    torch shards the second dimension evenly or not at all, and does not reshard it to fewer ranks after the
    forward; torchao's blocks of state need full rows.
    """
    is_stack = len(shape) == 3 and shape[0] % ranks != 0 and shape[1] % ranks == 0
    reshards_to_fewer = recipe.fsdp.reshard_after_forward not in (None, True, False)
    return int(is_stack and not reshards_to_fewer and state_bits(recipe.training) is None)


def _keep_recorded_outputs(model: PreTrainedModel) -> None:
    """Let transformers record outputs of layers (router logits) even if the decoder is a unit.

    Its registry is keyed by the printed class of a model (`_CanRecordRegistry`), which `fully_shard`
    replaces.
    """
    if not RECORDED_OUTPUTS.exists() and not getattr(model.config, "output_router_logits", False):
        return
    registry: dict[str, Any] = RECORDED_OUTPUTS.get()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(module, FSDPModule):
            dict.__setitem__(registry, str(type(module)), dict.get(registry, str(bare_class(module))))


@functools.cache
def allow_integer_parameters() -> None:
    """Let FSDP2 hold frozen parameters of bytes in torch 2.11 and 2.12: it makes each parameter one with a
    gradient first, which only floating-point tensors can be, and gathers it in the compute dtype."""
    if Version(torch.__version__) >= Version("2.13"):
        return
    module: Any = internals.FSDP_PARAM.get()
    in_mixed_precision: Callable[[Any, MixedPrecisionPolicy], None] = module.FSDPParam.init_dtype_attrs

    def init_dtype_attrs(self: Any, policy: MixedPrecisionPolicy) -> None:
        in_mixed_precision(self, policy)
        self.param_dtype = self.param_dtype if self.orig_dtype.is_floating_point else None

    module.nn = SimpleNamespace(Module=nn.Module, Parameter=_parameter)
    module.FSDPParam.init_dtype_attrs = init_dtype_attrs


def _parameter(data: torch.Tensor, *, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())


def ignored_parameters(recipe: Recipe, model: nn.Module) -> set[nn.Parameter]:
    return {p for name in ignored_module_names(recipe, model) for p in model.get_submodule(name).parameters()}


def fsdp_groups(model: nn.Module) -> list[Any]:
    """Return the parameter groups of all FSDP2 units, each once, although several modules (norm and head) may
    share a group."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = internals.PARAM_GROUPS.of(internals.FSDP_STATE.of(module)())
            found |= {id(group): group for group in groups}
    return list(found.values())


def process_groups(model: nn.Module, mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return the process groups of the model's mesh, of the meshes that `reshard_after_forward: N` and
    `ep_size` add, and of shared rows."""
    meshes = [each for each in (mesh, expert_mesh_of(model)) if each is not None]
    meshes += [
        info.mesh for group in fsdp_groups(model) if (info := group.post_forward_mesh_info) is not None
    ]
    groups = [group for each in meshes for group in each.get_all_groups()]
    groups += groups_of(model).values()
    return list({id(group): group for group in groups}.values())


def set_prefetch(recipe: Recipe, in_forward_order: Sequence[nn.Module]) -> None:
    """Set explicit prefetch depths. By default FSDP2 gathers one unit ahead in the backward, and in the
    forward when the CPU issues it.

    `in_forward_order`: the units in the order in which forwards start, so that a unit comes before those
    inside of it.
    """
    forward, backward = recipe.fsdp.forward_prefetch, recipe.fsdp.backward_prefetch
    units: list[FSDPModule] = [unit for unit in in_forward_order if isinstance(unit, FSDPModule)]
    depth = int(forward)
    for index, unit in enumerate(units):
        if depth:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
    _set_backward_prefetch(units, backward)


def _set_backward_prefetch(units: Sequence[FSDPModule], depth: int | str) -> None:
    """Set what each unit gathers ahead in the backward, and keep it from gathering units without a backward:
    the frozen ones before the first trained unit (an adapter's embedding). A `depth` that is not a number
    leaves all other units to FSDP2."""
    first = next(
        (index for index, unit in enumerate(units) if any(p.requires_grad for p in _parameters(unit))), 0
    )
    order = [unit for unit in _in_backward_order(units) if unit not in units[:first]]
    ahead = depth if isinstance(depth, int) else 1
    for index, unit in enumerate(order):
        wanted = order[index + 1 : index + 1 + ahead]
        if first and len(wanted) < ahead:
            # Without a list FSDP2 gathers the unit before this one; gathering this unit again does nothing.
            unit.set_modules_to_backward_prefetch(wanted or [unit])
        elif isinstance(depth, int):
            unit.set_modules_to_backward_prefetch(wanted)


def _in_backward_order(in_forward_order: Sequence[FSDPModule]) -> list[FSDPModule]:
    """Return units in the order in which their backwards start: the reverse of that in which their forwards
    end.

    A layer's backward therefore starts before the backward of the experts inside of it.
    """
    ended: list[FSDPModule] = []
    entered: list[FSDPModule] = []
    for unit in in_forward_order:
        while entered and not any(each is unit for each in _modules(entered[-1])):
            ended.append(entered.pop())
        entered.append(unit)
    return [*entered, *reversed(ended)]


def _modules(unit: FSDPModule) -> Iterable[object]:
    assert isinstance(unit, nn.Module)
    return unit.modules()


def _parameters(unit: FSDPModule) -> Iterable[nn.Parameter]:
    assert isinstance(unit, nn.Module)
    return unit.parameters()


def _wrap_fsdp1(
    recipe: Recipe, model: PreTrainedModel, units: UnitPlan, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    policy = mixed_precision_policy(recipe)
    chosen = {id(model.get_submodule(group[0])) for group in units.groups if len(group) == 1}
    prefetch = recipe.fsdp.backward_prefetch
    strategy = recipe.fsdp.sharding_strategy
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=internals.HYBRID_ZERO2.get()
        if strategy == "HYBRID_SHARD_ZERO2"
        else ShardingStrategy[strategy],
        auto_wrap_policy=functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen
        ),
        mixed_precision=MixedPrecision(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype),
        cpu_offload=CPUOffload(offload_params=recipe.fsdp.offload_params),
        backward_prefetch=None if prefetch == "NO_PREFETCH" else BackwardPrefetch[str(prefetch)],
        forward_prefetch=bool(recipe.fsdp.forward_prefetch),
        ignored_states=list(ignored_parameters(recipe, model)) or None,
        use_orig_params=True,
        device_id=torch.device("cpu") if device.type == "cpu" else device,  # FSDP1 rejects `cpu:0`
        sync_module_states=False,
    )
