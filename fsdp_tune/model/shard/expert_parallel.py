"""Expert parallelism, `fsdp.ep_size`: the ranks of a group divide the experts of each layer and exchange tokens (arXiv:2006.16668).

A rank holds `experts / ep_size` neighbouring experts of each stack, and FSDP2 shards them inside of each expert over the ranks with the
same experts. In a forward each token is sent to the ranks of its experts by `all_to_all_single`, the model's own kernel multiplies the rows
that arrive, and the results return by the same way and are weighted and added where the token came from. The parameters are DTensors of the
full stacks, so optimizers, checkpoints and merges see tensors of the usual names and shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error, usage_error
from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.model.internals.transformers_internals import EXPERTS, has_experts_kernel
from fsdp_tune.model.shard.local import ModuleView, bare_class, bare_model
from fsdp_tune.recipe.schema.recipe import Recipe

KEY = "fsdp.ep_size"
_ARGUMENTS = 4
"""Of the forward of experts: the module, hidden states, indices and weights of the chosen experts."""


def divided_experts(recipe: Recipe, model: nn.Module) -> list[str]:
    """Return the names of the modules of stacked experts that the ranks divide, in the order of the model; none without `ep_size`."""
    if recipe.fsdp.ep_size == 1:
        return []
    return [name for name, module in model.named_modules() if has_experts_kernel(module)]


def expert_mesh_of(wrapped: nn.Module) -> DeviceMesh | None:
    """Return the mesh of a wrapped model's experts: [replicate,] expert_shard, ep. None if each rank has all experts of its copy."""
    found: DeviceMesh | None = vars(bare_model(wrapped)).get("expert_mesh")
    return found


def expert_group_sizes(model: nn.Module) -> set[int]:
    """Return the numbers of ranks among which modules of experts exchange tokens in a live model; {1} if none does."""
    groups: list[dist.ProcessGroup] = [vars(module)["expert_group"] for module in model.modules() if "expert_group" in vars(module)]
    return {group.size() for group in groups} or {1}


def make_expert_mesh(recipe: Recipe, device_type: str) -> DeviceMesh:
    """Return the mesh of the experts. Its innermost dimension `ep` has neighbouring ranks, so tokens stay on a machine if they can."""
    topology, size = recipe.topology, recipe.fsdp.ep_size
    sizes, names = (topology.copy_size // size, size), ("expert_shard", "ep")
    if recipe.is_hybrid:
        return init_device_mesh(device_type, (topology.replicate, *sizes), mesh_dim_names=("replicate", *names))
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def mesh_of_shards(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions of an expert mesh over which FSDP2 shards (and replicates) this rank's experts."""
    return mesh["expert_shard"] if mesh.ndim == 2 else mesh["replicate", "expert_shard"]


def dim_inside(shape: torch.Size, ranks: int) -> int | None:
    """Return the dimension in which FSDP2 shards a stack of experts: the first after that of the experts which `ranks` divide, or None."""
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), None)


def divide_experts(experts: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Leave a module its part of the experts, and exchange tokens around its forward. Call it directly before FSDP2 shards the module,
    so that one part is unsharded on the device at a time."""
    ep = mesh["ep"]
    for key, whole in list(experts.named_parameters(recurse=False)):
        setattr(experts, key, nn.Parameter(_part(whole.detach(), ep, device), requires_grad=whole.requires_grad))
    experts.forward = _over_ranks(experts, ep.get_group())  # type: ignore[method-assign]
    experts.expert_group = ep.get_group()  # type: ignore[assignment]  # for the read-back


def average_over_all(unit: FSDPModule, mesh: DeviceMesh) -> None:
    """Make FSDP2 divide the gradients of a unit of divided experts by all ranks of their mesh.

    The gradient of a rank is the sum over the tokens of all ranks of `ep`, and FSDP2 would divide by the others alone. It divides after
    its reduction, in `reduce_dtype`.
    """
    unit.set_gradient_divide_factor(mesh.size())
    # Without it FSDP2 uses an operation of NCCL. With it, torch 2.11 to 2.14 divide twice if no other rank has these experts.
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


def _over_ranks(experts: nn.Module, group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    """Return the forward of experts that the ranks of `group` divide, around that of their class."""
    inner: Any = type(experts).forward  # FSDP2 makes a subclass of it
    size, count = group.size(), next(experts.parameters()).shape[0]

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        tokens, chosen = top_k_index.shape
        kernel = EXPERTS.of(experts.config)
        stacks = ((name, _operand(_local(stack), kernel)) for name, stack in experts.named_parameters(recurse=False))
        view = ModuleView(experts, num_experts=count // size, **dict(stacks))
        route = _route(top_k_index, count, group)
        rows = _exchange(hidden_states[route.order // chosen], route.sent, route.received, group)
        ids, arrived = route.ids, len(rows)
        if arrived == 0:  # a row of zeros, so that the parameters have a gradient, which is zero, on every rank
            # Appended, so that this rank takes part in the exchange of gradients, for which the others wait.
            rows, ids = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), ids.new_zeros(1)
        result = inner(view, rows, ids.unsqueeze(1), rows.new_ones(len(rows), 1))[:arrived]
        returned = _exchange(result, route.received, route.sent, group)
        # As in transformers' kernels: weighted, then added in the order of the router's choice.
        pairs = returned.new_zeros(tokens * chosen, returned.shape[1]).index_copy(0, route.order, returned)
        weighted = pairs * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    return forward


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _operand(stack: torch.Tensor, kernel: object) -> torch.Tensor:
    """Return a stack as a kernel takes it: biases of `grouped_mm` in fp32, so that their gradients are summed over rows in fp32.

    transformers' `grouped_mm` indexes biases by the expert of each row, and the backward of an index adds the rows in the dtype of what
    is indexed: of thousands of rows, which come from all ranks, bf16 loses a tenth. The biases are added in place to a product, which
    keeps its dtype. `eager` adds one bias to all rows of its expert, which autograd sums in fp32.
    """
    return stack.float() if kernel == "grouped_mm" and stack.ndim == 2 else stack


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the pairs of a token and an expert go."""

    order: torch.Tensor
    """[pairs] index of each sent pair, sorted by expert; pairs whose index stands for no expert are left out."""
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
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts.contiguous(), group=group)
    sent, received = torch.stack([counts, arriving]).view(2, size, -1).sum(-1).tolist()
    own = torch.arange(experts // size, device=pairs.device).repeat(size)  # of each rank in turn, sorted by expert
    ids = own.repeat_interleave(arriving, output_size=sum(received))
    return _Route(torch.argsort(pairs, stable=True)[: sum(sent)], sent, received, ids)


class _ExchangeRows(torch.autograd.Function):
    """Send rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.route = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.route
        return _exchanged(gradients[0], received, sent, group), None, None, None


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived: torch.Tensor = _ExchangeRows.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return arrived


# ---- A layer that is recomputed routes once


class RoutedOnce:
    """Make the recomputation of a layer choose the experts that its forward chose.

    A recomputed router may round otherwise than in the forward (kernels whose order of sums varies), and two experts of nearly equal score
    would change places: tokens would be sent elsewhere, and gradients would not be those of the loss. So the indices of each `topk` in the
    layer are kept, and its values are taken at these.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self._kept: list[torch.Tensor] = []

    def contexts(self) -> tuple[TorchFunctionMode, TorchFunctionMode]:
        """Return the contexts of the forward and of the recomputation (`context_fn` of torch's `checkpoint`)."""
        return _Choosing(self._choose, self._require_choice), _Choosing(self._repeat(), lambda: None)

    def _choose(self, **arguments: Any) -> torch.Tensor:
        indices = torch.topk(**arguments).indices
        self._kept.append(indices.clone())
        return indices

    def _require_choice(self) -> None:
        if not self._kept:
            message = f"`{self._layer}` chooses experts without `torch.topk`, and its recomputation could choose others"
            raise failed_error("experts-not-chosen-by-topk", message, hint="--set fsdp.activation_checkpointing=none")

    def _repeat(self) -> Callable[..., torch.Tensor]:
        kept: Iterator[torch.Tensor] | None = None

        def repeat(**_: Any) -> torch.Tensor:
            nonlocal kept
            kept = iter(self._kept) if kept is None else kept
            return next(kept).clone()

        return repeat


class _Choosing(TorchFunctionMode):
    """Call `choose` for the indices of each `topk`. Forward and recomputation gather its values, so autograd saves the same tensors."""

    def __init__(self, choose: Callable[..., torch.Tensor], at_end: Callable[[], None]) -> None:
        super().__init__()
        self._choose, self._at_end = choose, at_end

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        arguments = _TOPK.bind(*args, **kwargs).arguments
        with torch.no_grad():
            indices = self._choose(**arguments)
        return torch.return_types.topk((arguments["input"].gather(arguments.get("dim", -1), indices), indices))

    def __exit__(self, exc_type: Any, *rest: Any) -> None:
        super().__exit__(exc_type, *rest)
        if exc_type is None:
            self._at_end()


def _topk(input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> None:  # noqa: FBT001, FBT002
    """The arguments of `torch.topk`, which has no signature."""


_TOPK = inspect.signature(_topk)


# ---- Models that it does not suit


def require_divisible_experts(recipe: Recipe, model: PreTrainedModel) -> None:
    """Check the experts of a bare model against `fsdp.ep_size`. Raises: usage error (exit 2)."""
    size = recipe.fsdp.ep_size
    if size == 1:
        return
    names = divided_experts(recipe, model)
    if not names:
        raise _refused(recipe, f"{bare_class(model).__name__} has no stacked experts whose kernel can be chosen")
    for name in names:
        experts: Any = model.get_submodule(name)
        if (reason := _against(experts, size, max(1, recipe.topology.copy_size // size), recipe.compute_dtype)) is not None:
            raise _refused(recipe, f"`{name}` ({bare_class(experts).__name__}) {reason}")


def _against(experts: Any, size: int, shards: int, compute_dtype: str) -> str | None:
    """Return why `size` ranks cannot divide a module of experts, of which `shards` ranks hold the same part; None if they can."""
    shapes = {name: parameter.shape for name, parameter in experts.named_parameters(recurse=False)}
    count = int(experts.num_experts)
    if count % size:
        return f"has {count} experts, which do not divide by {size}: write a divisor of {count}"
    if len(list(experts.parameters())) != len(shapes) or any(len(shape) < 2 or shape[0] != count for shape in shapes.values()):
        return "has parameters that are not stacked by expert"
    if len(inspect.signature(type(experts).forward).parameters) != _ARGUMENTS:
        return "takes other arguments than hidden states, and indices and weights of the chosen experts"
    name = str(EXPERTS.of(experts.config))
    dtypes = EXPERTS_KERNELS[name].divided_in if name in EXPERTS_KERNELS else frozenset()
    if not dtypes:
        return f"is computed by `kernels.experts: {name}`, which was not shown to take a part of the experts"
    if compute_dtype not in dtypes:
        return (
            f"is computed in {compute_dtype} by `kernels.experts: {name}`, which adds the gradients of all ranks' tokens in {compute_dtype}"
        )
    if (other := next((name for name, shape in shapes.items() if dim_inside(shape, shards) is None), None)) is not None:
        return f"has `{other}` of {tuple(shapes[other])}, of which {shards} ranks cannot shard each expert evenly"
    return None


def _refused(recipe: Recipe, reason: str) -> FsdpTuneError:
    message = f"`{KEY}: {recipe.fsdp.ep_size}` does not support this model: {reason}"
    return usage_error("experts-not-divisible", message, where=Where(key=KEY), hint=f"--set {KEY}=1")
