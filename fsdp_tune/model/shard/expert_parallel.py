"""Expert parallelism, `fsdp.ep_size`: the ranks of a group divide the experts of each layer and exchange
tokens (arXiv:2006.16668).

A rank holds `experts / ep_size` neighbouring experts of each stack, and FSDP2 shards them inside of each
expert over the ranks with the same experts. In a forward each token is sent to the ranks of its experts by
`all_to_all_single`, the model's own kernel multiplies the rows that arrive, and the results return by the
same way and are weighted and added where the token came from. The parameters are DTensors of the full stacks,
so optimizers, checkpoints and merges see tensors of the usual names and shapes.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.core.families import EXPERT_INDEX_ARGUMENTS, dim_inside
from fsdp_tune.core.tensors.file_formats import unwrapped
from fsdp_tune.model.internals.transformers_internals import EXPERTS, has_experts_kernel
from fsdp_tune.model.shard.exchange import exchange, exchanged
from fsdp_tune.model.shard.expert_adapters import leave_to_experts, with_adapter
from fsdp_tune.model.shard.expert_biases import operand
from fsdp_tune.model.shard.local import ModuleView, bare_class, bare_model
from fsdp_tune.model.shard.routed_once import RoutedOnce, is_known_to_choose_otherwise
from fsdp_tune.recipe.schema.recipe import Recipe

KEY = "fsdp.ep_size"


def divided_experts(recipe: Recipe, model: nn.Module) -> list[str]:
    """Return the names of the modules of stacked experts that the ranks divide, in the order of the model;
    none without `ep_size`."""
    if recipe.fsdp.ep_size == 1:
        return []
    return [name for name, module in model.named_modules() if has_experts_kernel(module)]


def expert_mesh_of(wrapped: nn.Module) -> DeviceMesh | None:
    """Return the mesh of a wrapped model's experts: [replicate,] expert_shard, ep. None if each rank has all
    experts of its copy."""
    found: DeviceMesh | None = vars(bare_model(wrapped)).get("expert_mesh")
    return found


def exchange_group(module: nn.Module) -> dist.ProcessGroup | None:
    """Return the group among which the live forward of a module exchanges tokens; None if it exchanges
    none."""
    found: dist.ProcessGroup | None = getattr(vars(module).get("forward"), "expert_group", None)
    return found


def make_expert_mesh(recipe: Recipe, device_type: str) -> DeviceMesh:
    """Return the mesh of the experts. Its innermost dimension `ep` has neighbouring ranks, so tokens stay on
    a machine if they can."""
    topology, size = recipe.topology, recipe.fsdp.ep_size
    sizes, names = (topology.copy_size // size, size), ("expert_shard", "ep")
    if recipe.is_hybrid:
        return init_device_mesh(
            device_type, (topology.replicate, *sizes), mesh_dim_names=("replicate", *names)
        )
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def mesh_of_shards(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions of an expert mesh over which FSDP2 shards (and replicates) this rank's
    experts."""
    return mesh["expert_shard"] if mesh.ndim == 2 else mesh["replicate", "expert_shard"]


def divide_experts(
    experts: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    adapters: Mapping[str, Any] | None = None,
) -> None:
    """Leave a module its part of the experts, and exchange tokens around its forward. Call it directly before
    FSDP2 shards the module, so that one part is unsharded on the device at a time.

    `adapters`: PEFT's layers around the module, by the parameter that each adapts (`expert_adapters`).
    """
    ep = mesh["ep"]
    for key, whole in list(experts.named_parameters(recurse=False)):
        setattr(
            experts, key, nn.Parameter(_part(whole.detach(), ep, device), requires_grad=whole.requires_grad)
        )
    forward: Any = _over_ranks(experts, ep.get_group(), adapters or {})
    forward.expert_group = ep.get_group()  # for the read-back: another forward has none
    experts.forward = forward
    for layer in (adapters or {}).values():
        leave_to_experts(layer)


def average_over_all(unit: FSDPModule, mesh: DeviceMesh) -> None:
    """Make FSDP2 divide the gradients of a unit of divided experts by all ranks of their mesh.

    The gradient of a rank is the sum over the tokens of all ranks of `ep`, and FSDP2 would divide by the
    others alone. It divides after its reduction, in `reduce_dtype`.
    """
    unit.set_gradient_divide_factor(mesh.size())
    # Without it FSDP2 uses an operation of NCCL. With it, torch 2.11 to 2.14 divide twice if no other rank
    # has these experts.
    unit.set_force_sum_reduction_for_comms(mesh["expert_shard"].size() > 1)


def _part(whole: torch.Tensor, ep: DeviceMesh, device: torch.device) -> DTensor:
    """Return a stack of which this rank holds its experts, without communication."""
    assert not isinstance(whole, DTensor), "a unit holds it already"
    share = whole.shape[0] // ep.size()
    own = whole.narrow(0, ep.get_local_rank() * share, share)
    if not own.is_meta:
        own = own.to(device, copy=True)
    return DTensor.from_local(own, ep, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


# ---- The forward of divided experts


def _over_ranks(
    experts: nn.Module, group: dist.ProcessGroup, adapters: Mapping[str, Any]
) -> Callable[..., torch.Tensor]:
    """Return the forward of experts that the ranks of `group` divide, around that of their class."""
    inner: Any = type(experts).forward  # FSDP2 makes a subclass of it
    size, count = group.size(), next(experts.parameters()).shape[0]
    share = count // size
    own = slice(group.rank() * share, (group.rank() + 1) * share)

    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, chosen = top_k_index.shape
        kernel = EXPERTS.of(experts.config)
        stacks = {
            name: operand(_local(stack), kernel) for name, stack in experts.named_parameters(recurse=False)
        }
        stacks |= {name: with_adapter(stacks[name], layer, own) for name, layer in adapters.items()}
        view = ModuleView(experts, num_experts=share, **stacks)
        once = RoutedOnce.entered
        make = functools.partial(_route, top_k_index, count, group)
        route = make() if once is None else once.route(top_k_index, top_k_weights, make)
        rows = exchange(hidden_states[route.order // chosen], group, route.sent, route.received)
        ids, arrived = route.ids, len(rows)
        # a row of zeros, so that the parameters have a gradient, which is zero, on every rank
        if arrived == 0:
            # Appended, so that this rank takes part in the exchange of gradients, for which the others wait.
            rows, ids = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), ids.new_zeros(1)
        result = inner(view, rows, ids.unsqueeze(1), rows.new_ones(len(rows), 1))[:arrived]
        returned = exchange(result, group, route.received, route.sent)
        # As in transformers' kernels: weighted, then added in the order of the router's choice.
        pairs = returned.new_zeros(tokens * chosen, returned.shape[1]).index_copy(0, route.order, returned)
        weighted = pairs * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    return forward


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the pairs of a token and an expert go."""

    order: torch.Tensor
    """[pairs] index of each sent pair, sorted by expert; pairs whose index stands for no expert are left
    out."""
    sent: list[int]
    """Rows for each rank of the group."""
    received: list[int]
    """Rows from each rank of the group."""
    ids: torch.Tensor
    """[received rows] index of the expert among those of this rank."""


def _route(top_k_index: torch.Tensor, experts: int, group: dist.ProcessGroup) -> _Route:
    """Return the route of the chosen experts, [tokens, chosen]. Collective; waits for the device once."""
    size, pairs = group.size(), top_k_index.reshape(-1).long()
    counts = pairs.new_zeros(experts + 1).scatter_add_(0, pairs, torch.ones_like(pairs))[:experts]
    arriving = exchanged(counts, group)
    sent, received = torch.stack([counts, arriving]).view(2, size, -1).sum(-1).tolist()
    # of each rank in turn, sorted by expert
    own = torch.arange(experts // size, device=pairs.device).repeat(size)
    ids = own.repeat_interleave(arriving, output_size=sum(received))
    return _Route(torch.argsort(pairs, stable=True)[: sum(sent)], sent, received, ids)


# ---- Models that it does not suit


def require_divisible_experts(recipe: Recipe, model: PreTrainedModel) -> None:
    """Check the experts of a bare model against `fsdp.ep_size`. Raises: usage error (exit 2)."""
    if recipe.fsdp.ep_size == 1:
        return
    names = divided_experts(recipe, model)
    if not names:
        raise refused_experts(
            recipe, f"{bare_class(model).__name__} has no stacked experts whose kernel can be chosen"
        )
    owners = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in names:
        experts: Any = model.get_submodule(name)
        if any(owners[parameter] > 1 for parameter in experts.parameters()):
            reason: str | None = "shares parameters with another module"
        else:
            reason = _against(recipe, experts) or _against_recomputing(recipe, model, name)
        if reason is not None:
            raise refused_experts(recipe, f"`{name}` ({bare_class(experts).__name__}) {reason}")


def _against(recipe: Recipe, experts: Any) -> str | None:
    """Return why the ranks of a recipe cannot divide a module of experts; None if they can."""
    shapes = {name: parameter.shape for name, parameter in experts.named_parameters(recurse=False)}
    count, size = int(experts.num_experts), recipe.fsdp.ep_size
    shards = max(1, recipe.topology.copy_size // size)
    if count % size:
        return f"has {count} experts, which do not divide by {size}: write a divisor of {count}"
    if len(list(experts.parameters())) != len(shapes) or any(
        len(shape) < 2 or shape[0] != count for shape in shapes.values()
    ):
        return "has parameters that are not stacked by expert"
    arguments = list(inspect.signature(type(experts).forward).parameters)
    if len(arguments) != 4 or arguments[2] not in EXPERT_INDEX_ARGUMENTS:  # the first is the module
        return "takes other arguments than hidden states, and indices and weights of the chosen experts"
    name, dtype = str(EXPERTS.of(experts.config)), recipe.compute_dtype
    dtypes = EXPERTS_KERNELS[name].divided_in if name in EXPERTS_KERNELS else frozenset()
    if not dtypes:
        return f"is computed by `kernels.experts: {name}`, which was not shown to take a part of the experts"
    if dtype not in dtypes:
        return (
            f"is computed in {dtype} by `kernels.experts: {name}`, which adds the gradients of all "
            f"ranks' tokens in {dtype}"
        )
    if (
        other := next((name for name, shape in shapes.items() if dim_inside(shape, shards) is None), None)
    ) is not None:
        return (
            f"has `{other}` of {tuple(shapes[other])}, of which {shards} ranks cannot shard each "
            "expert evenly"
        )
    return None


def _against_recomputing(recipe: Recipe, model: PreTrainedModel, name: str) -> str | None:
    """Return why a layer with these experts cannot be recomputed, as far as a model without weights shows
    it."""
    experts = model.get_submodule(name)
    if recipe.fsdp.activation_checkpointing == "none" or not all(
        parameter.is_meta for parameter in experts.parameters()
    ):
        return None
    called = unwrapped(name)
    block, embedding = (
        model.get_submodule(called.rpartition(".")[0]),
        cast(nn.Embedding, model.get_input_embeddings()),
    )
    if not is_known_to_choose_otherwise(block, model.get_submodule(called), embedding.embedding_dim):
        return None
    way = f"`fsdp.activation_checkpointing: {recipe.fsdp.activation_checkpointing}`"
    return (
        "gets experts that no `torch.topk` chooses, so that a recomputed layer could choose others; "
        f"leave {way} out"
    )


def refused_experts(recipe: Recipe, reason: str) -> FsdpTuneError:
    """Return the usage error for a model that `fsdp.ep_size` does not support."""
    message = f"`{KEY}: {recipe.fsdp.ep_size}` does not support this model: {reason}"
    return usage_error("experts-not-divisible", message, where=Where(key=KEY), hint=f"--set {KEY}=1")
