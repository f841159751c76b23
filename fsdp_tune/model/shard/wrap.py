"""Wrap a model in FSDP: its mesh, its process groups, its units, and the gathering of whole parameters.

Apply the recipe's sharding to a model: device mesh, FSDP units, mixed precision, offload, prefetch.

The model is wrapped before it is passed to Accelerate, which does not change an `FSDPModule`. Accelerate's own path cannot
wrap by size, sums gradients in bf16, and casts the model's output.

Find gathered FSDP units, and reshard them after a forward without a backward.

Units that stay gathered after the forward (the root, the kept tail, every unit under SHARD_GRAD_OP) are resharded by their backward.
Without a backward they stay gathered; the optimizer then updates the shards, and the next step would compute with the old weights.

The process groups of a run, from its topology.

Process groups without a practical timeout, to wait for a rank that downloads, reads or writes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from fsdp_tune.core.topology import DIMENSIONS
from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.internals.transformers_internals import RECORDED_OUTPUTS
from fsdp_tune.model.shard.fsdp_units import UnitPlan, ignored_module_names
from fsdp_tune.model.shard.local import TORCH_DTYPE, bare_class, bare_model, plain_name
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import state_bits


def mixed_precision_policy(recipe: Recipe) -> MixedPrecisionPolicy:
    """Return the policy: compute in the recipe's dtype, sum gradients in `reduce_dtype`, do not cast the model's output.

    Accelerate's policy would round the loss itself to the compute dtype (`output_dtype`) and sum in it.
    """
    compute = None if recipe.precision.mixed_precision == "no" else TORCH_DTYPE[recipe.compute_dtype]
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=TORCH_DTYPE[recipe.precision.reduce_dtype], output_dtype=None)


def offload_policy(recipe: Recipe, device_type: str) -> OffloadPolicy:
    # Pinning needs an accelerator and raises on CPU ranks.
    return CPUOffloadPolicy(pin_memory=device_type == "cuda") if recipe.fsdp.offload_params else OffloadPolicy()


def wrap(recipe: Recipe, model: PreTrainedModel, units: UnitPlan, mesh: DeviceMesh | None, device: torch.device) -> nn.Module:
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
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True, broadcast_buffers=False)


def _wrap_fsdp2(recipe: Recipe, model: PreTrainedModel, units: UnitPlan, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision_policy(recipe),
        "offload_policy": offload_policy(recipe, device.type),
    }
    as_stored = options | {"mp_policy": replace(options["mp_policy"], param_dtype=None, cast_forward_inputs=False)}
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
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            reshard_after_forward=False if keep else reshard,
            ignored_params=ignored or None,
            **(as_stored if group in units.in_fp32 else options),
        )
    # Without `reshard_after_forward` the root stays gathered (FSDP2's default), since the backward starts with it.
    if units.holder is None:
        fully_shard(model, ignored_params=ignored or None, **options)
    _keep_recorded_outputs(model)
    names = {group[0] for group in units.groups if group not in units.keeps_gathered}
    set_prefetch(recipe, [module for name, module in model.named_modules() if name in names])
    return model


def _wrap_holder(
    model: PreTrainedModel, units: UnitPlan, ignored: set[nn.Parameter], options: dict[str, Any], as_stored: dict[str, Any]
) -> set[nn.Parameter]:
    """Make the units of the root and of the holder. Return their parameters, which the other groups must not take.

    `fully_shard` takes no parameter below a module that is a unit already. So these two come before the groups inside of them, and ignore
    all parameters but their own.
    """
    assert units.holder is not None
    named = dict(model.named_parameters())
    inside = tuple(f"{name}." for group in units.groups for name in group)
    rest = {name for name, p in named.items() if not name.startswith(inside) and name not in units.held and p not in ignored}
    fully_shard(model, ignored_params={p for name, p in named.items() if name not in rest}, **options)
    others = {p for name, p in model.named_parameters() if name not in units.held}
    fully_shard(model.get_submodule(units.holder), reshard_after_forward=False, ignored_params=others, **as_stored)
    return {p for name, p in model.named_parameters() if name in rest or name in units.held}


def shard_dim(recipe: Recipe, shape: torch.Size, ranks: int) -> int:
    """Return the dimension in which FSDP2 shards a parameter: the first, or the second of stacked experts if `ranks` divide only that.

    Uneven parts are padded: of 8 experts on 12 ranks, 4 ranks would have none, and all ranks would gather 12. torch shards the second
    dimension evenly or not at all, and does not reshard it to fewer ranks after the forward; torchao's blocks of state need full rows.
    """
    is_stack = len(shape) == 3 and shape[0] % ranks != 0 and shape[1] % ranks == 0
    reshards_to_fewer = recipe.fsdp.reshard_after_forward not in (None, True, False)
    return int(is_stack and not reshards_to_fewer and state_bits(recipe.training) is None)


def _keep_recorded_outputs(model: PreTrainedModel) -> None:
    """Let transformers record outputs of layers (router logits) even if the decoder is a unit.

    Its registry is keyed by the printed class of a model (`_CanRecordRegistry`), which `fully_shard` replaces.
    """
    if not RECORDED_OUTPUTS.exists() and not getattr(model.config, "output_router_logits", False):
        return
    registry: dict[str, Any] = RECORDED_OUTPUTS.get()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(module, FSDPModule):
            dict.__setitem__(registry, str(type(module)), dict.get(registry, str(bare_class(module))))


@functools.cache
def allow_integer_parameters() -> None:
    """Let FSDP2 hold frozen parameters of bytes in torch 2.11 and 2.12: it makes each parameter one with a gradient first, which only
    floating-point tensors can be, and gathers it in the compute dtype."""
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
    """Return the parameter groups of all FSDP2 units, each once, although several modules (norm and head) may share a group."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = internals.PARAM_GROUPS.of(internals.FSDP_STATE.of(module)())
            found |= {id(group): group for group in groups}
    return list(found.values())


def process_groups(model: nn.Module, mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return the process groups of the model's mesh, of the meshes that `reshard_after_forward: N` adds, and of shared rows."""
    meshes = [] if mesh is None else [mesh]
    meshes += [info.mesh for group in fsdp_groups(model) if (info := group.post_forward_mesh_info) is not None]
    groups = [group for each in meshes for group in each.get_all_groups()]
    groups += groups_of(model).values()
    return list({id(group): group for group in groups}.values())


def set_prefetch(recipe: Recipe, in_forward_order: Sequence[nn.Module]) -> None:
    """Set explicit prefetch depths. By default FSDP2 gathers one unit ahead in the backward, and in the forward when the CPU issues it."""
    forward, backward = recipe.fsdp.forward_prefetch, recipe.fsdp.backward_prefetch
    units: list[FSDPModule] = [unit for unit in in_forward_order if isinstance(unit, FSDPModule)]
    depth = int(forward)
    for index, unit in enumerate(units):
        if depth:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
        if isinstance(backward, int):
            unit.set_modules_to_backward_prefetch(units[max(0, index - backward) : index][::-1])
    _end_backward_prefetch(units, backward)


def _end_backward_prefetch(units: Sequence[FSDPModule], depth: int | str) -> None:
    """Keep the backward from gathering units without a backward: the frozen ones before the first trained unit (an adapter's embedding)."""
    first = next((index for index, unit in enumerate(units) if any(p.requires_grad for p in _parameters(unit))), 0)
    if first == 0:
        return
    ahead = depth if isinstance(depth, int) else 1
    for index, unit in enumerate(units[first : first + ahead], start=first):
        # Without a list FSDP2 gathers the unit before this one; gathering this unit again does nothing.
        wanted = list(units[max(first, index - ahead) : index][::-1])
        unit.set_modules_to_backward_prefetch(wanted or [unit])


def _parameters(unit: FSDPModule) -> Iterable[nn.Parameter]:
    assert isinstance(unit, nn.Module)
    return unit.parameters()


def _wrap_fsdp1(recipe: Recipe, model: PreTrainedModel, units: UnitPlan, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    policy = mixed_precision_policy(recipe)
    chosen = {id(model.get_submodule(group[0])) for group in units.groups if len(group) == 1}
    prefetch = recipe.fsdp.backward_prefetch
    strategy = recipe.fsdp.sharding_strategy
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=internals.HYBRID_ZERO2.get() if strategy == "HYBRID_SHARD_ZERO2" else ShardingStrategy[strategy],
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen),
        mixed_precision=MixedPrecision(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype),
        cpu_offload=CPUOffload(offload_params=recipe.fsdp.offload_params),
        backward_prefetch=None if prefetch == "NO_PREFETCH" else BackwardPrefetch[str(prefetch)],
        forward_prefetch=bool(recipe.fsdp.forward_prefetch),
        ignored_states=list(ignored_parameters(recipe, model)) or None,
        use_orig_params=True,
        device_id=torch.device("cpu") if device.type == "cpu" else device,  # FSDP1 rejects `cpu:0`
        sync_module_states=False,
    )


Units = list[tuple[str, Any]]
"""(name, FSDP2 parameter group or FSDP1 module) of each unit."""


def units_of(wrapped: nn.Module) -> Units:
    """Return every unit of a wrapped model, under the name of its first module."""
    if isinstance(wrapped, FullyShardedDataParallel):
        fsdp1 = [(name, each) for name, each in wrapped.named_modules() if isinstance(each, FullyShardedDataParallel)]
        return [(plain_name(name) or "(root)", each) for name, each in fsdp1]
    names = {id(module): name for name, module in wrapped.named_modules()}
    return [(names[id(group.modules[0])] or "(root)", group) for group in fsdp_groups(wrapped)]


def gathered_units(units: Units) -> list[str]:
    """Return the names of the units whose full parameters are in memory."""
    return [name for name, unit in units if _is_gathered(unit)]


def _is_gathered(unit: Any) -> bool:
    if not isinstance(unit, FullyShardedDataParallel):
        return not unit.is_sharded
    handle = internals.HANDLE.of(unit)
    if handle is None or not handle.uses_sharded_strategy:
        return False
    # The first forward allocates the storage for full parameters.
    return internals.FULL_PARAMETER.of(handle.flat_param) is not None and not handle.needs_unshard()


@contextlib.contextmanager
def outside_step(wrapped: nn.Module, device: torch.device) -> Iterator[None]:
    """Run forwards outside of a training step, without gradients. On exit, units are sharded and generators restored.

    Every forward except those of `model.step.forward_backward` runs in this context.
    """
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        for _, unit in units_of(wrapped):
            if isinstance(unit, FullyShardedDataParallel):
                if _is_gathered(unit):
                    internals.RESHARD.get()(unit, internals.HANDLE.of(unit), True)
            else:
                unit.reshard()
                # A backward prefetches in the recorded order of forwards. This forward has no backward; the next one would use its record.
                unit.comm_ctx.post_forward_order.clear()
                internals.FORWARD_RECORD.of(unit).clear()


def make_mesh(recipe: Recipe, device_type: str) -> DeviceMesh | None:
    """Return the mesh that parameters shard over: [copy], or [replicate, copy] for the hybrid strategies; None for plain DDP.

    `copy` is the dimensions that have shards of their own, flattened: ranks that share rows hold different shards.
    """
    if not recipe.is_sharded:
        return None
    topology = recipe.topology
    if recipe.is_hybrid:
        return init_device_mesh(device_type, (topology.replicate, topology.copy_size), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(device_type, (topology.copy_size,), mesh_dim_names=("dp_shard",))


def make_groups(recipe: Recipe, device_type: str) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group along each dimension whose ranks share rows, by its name; none of a single rank. Collective."""
    found: dict[str, dist.ProcessGroup] = {}
    for name, dimension in DIMENSIONS.items():
        outside, ranks, inside = recipe.topology.split(name)
        if not dimension.has_own_rows and ranks > 1:
            names, sizes = ("outside", name, "inside"), (outside, ranks, inside)
            kept = 2 if inside == 1 else 3
            found[name] = init_device_mesh(device_type, sizes[:kept], mesh_dim_names=names[:kept]).get_group(name)
    return found


def join_groups(model: nn.Module, groups: dict[str, dist.ProcessGroup]) -> None:
    """Let the model's forwards and backwards run over `groups`, by the name of the dimension."""
    model.rank_groups = groups  # type: ignore[assignment]  # nn.Module declares its attributes as tensors and modules


def groups_of(wrapped: nn.Module) -> dict[str, dist.ProcessGroup]:
    """Return the groups of a (wrapped) model by the name of the dimension; none if each rank has rows of its own."""
    found: dict[str, dist.ProcessGroup] = vars(bare_model(wrapped)).get("rank_groups", {})
    return found


def untimed_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks whose collectives may wait for days. Collective.

    Waiting for a slow disk is not a hang. The supervisor detects the I/O of the other rank; NCCL's watchdog and the timeout of the
    default group only measure time.
    """
    world = dist.group.WORLD
    assert world is not None, "the default group exists before any other"
    bound = world.bound_device_id
    # torch requires a backend for the device that the default group is bound to; "gloo" alone covers only CPU and CUDA.
    backend = "gloo" if bound is None or bound.type == "cuda" else f"cpu:gloo,{bound.type}:gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(days=7))
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group after all ranks have left its last collective, since destroying closes connections. Collective."""
    dist.all_reduce(torch.zeros(()))
    dist.destroy_process_group(group)
