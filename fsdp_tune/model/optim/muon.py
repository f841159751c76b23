"""Muon on sharded matrices, and AdamW for the other parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

from fsdp_tune.core.families import STATE_DECAY
from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.internals.torch_internals import ADJUST_RATE, ORTHOGONALISE
from fsdp_tune.model.optim.adamw import AdamW
from fsdp_tune.model.optim.adamw_in_blocks import torchao_class, with_plain_rates
from fsdp_tune.model.optim.lean_adamw import LeanAdamW
from fsdp_tune.model.optim.optimizer import ShardedAdafactor
from fsdp_tune.model.shard.local import TORCH_DTYPE, compute_device, local_part, plain_name, refresh_scales, sharding_of
from fsdp_tune.model.shard.wrap import fsdp_groups
from fsdp_tune.model.step import parameter_groups
from fsdp_tune.recipe.rules.limits import gathers_in_fp8
from fsdp_tune.recipe.schema.optimizers import (
    STOCHASTIC,
    matching_group,
    optimizer_arguments,
    optimizer_name,
    optimizer_options,
    state_bits,
    state_dtype,
)
from fsdp_tune.recipe.schema.recipe import Recipe, Training
from fsdp_tune.recipe.schema.training_fields import training_value

ORTHOGONAL = "orthogonal"
"""Key of a parameter group: whether Muon updates its parameters."""


_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def orthogonalised_names(wrapped: nn.Module, decayed: frozenset[str]) -> frozenset[str]:
    """Return the names of the parameters for Muon: hidden matrices and stacks of them, with weight decay (`decayed`).

    Embeddings, the head and convolutions are left to AdamW, as are vectors (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982)
    and the decay rates of state-space layers: no matrix product uses them.
    """
    left_out: set[int] = set()
    for module in wrapped.modules():
        of_module: list[nn.Module | None] = []
        if isinstance(module, PreTrainedModel):
            of_module = [module.get_input_embeddings(), module.get_output_embeddings()]
        elif isinstance(module, nn.Embedding | _CONVOLUTIONS):
            of_module = [module]
        left_out |= {id(parameter) for each in of_module if each is not None for parameter in each.parameters()}
    names = {plain_name(name) for name, parameter in wrapped.named_parameters() if id(parameter) not in left_out}
    return frozenset(name for name in decayed & names if not name.endswith(f".{STATE_DECAY}"))


@dataclass(frozen=True, slots=True)
class _MatrixPart:
    """This rank's rows of a matrix: views of the optimizer's tensors."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    momentum: torch.Tensor
    shape: torch.Size
    """Shape of the full matrix."""
    device: torch.device
    """Where the matrix is orthogonalised."""

    def blend(self, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum, and return the part of the matrix to orthogonalise, a new tensor in bf16."""
        self.momentum.lerp_(self.gradient, 1 - group["momentum"])
        blended = self.gradient.lerp(self.momentum, group["momentum"]) if group["nesterov"] else self.momentum
        return blended.to(self.device, torch.bfloat16, copy=True)

    def apply(self, update: torch.Tensor, group: dict[str, Any]) -> None:
        self.parameter.mul_(1 - group["lr"] * group["weight_decay"])
        rate: float = ADJUST_RATE.get()(group["lr"], group["adjust_lr_fn"], self.shape)
        self.parameter.add_(update.view(self.parameter.shape).to(self.parameter.device), alpha=-rate)


class Muon(AdamW):
    """Updates groups with `orthogonal: True` as `torch.optim.Muon` does, others by AdamW. For FSDP2 and DDP."""

    def __init__(self, params: Any, *, muon: dict[str, Any], **options: Any) -> None:
        """`muon`: arguments of `torch.optim.Muon` except learning rate and weight decay."""
        super().__init__(params, **options)
        for group in self.param_groups:
            group.setdefault(ORTHOGONAL, False)
            group |= muon if group[ORTHOGONAL] else {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's expects a step count for each parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002  no caller recomputes the loss
        for group in self.param_groups:
            if group[ORTHOGONAL]:
                self._update_matrices(group)
            else:
                self._update_elements(group)

    def _update_elements(self, group: dict[str, Any]) -> None:
        lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        beta1, beta2 = group["betas"]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "foreach", "fused")}
        adamw(*lists, beta1=beta1, beta2=beta2, **options)  # type: ignore[arg-type]

    def _update_matrices(self, group: dict[str, Any]) -> None:
        divided: list[_MatrixPart] = []
        ranks = None
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            parts, sharding = self._parts(parameter, parameter.grad), sharding_of(parameter)
            if sharding is not None and sharding.dim == parameter.ndim - 2:
                ranks, divided = sharding.group, divided + parts
                continue
            assert sharding is None or sharding.dim < parameter.ndim - 2, "FSDP cuts matrices by rows"
            for part in parts:
                part.apply(_orthogonalised(part.blend(group), group), group)
        if ranks is not None:
            divided.sort(key=lambda part: part.shape, reverse=True)  # matrices of a round take equally long
            for start in range(0, len(divided), ranks.size()):
                _update_round(divided[start : start + ranks.size()], group, ranks)

    def _parts(self, parameter: torch.Tensor, gradient: torch.Tensor) -> list[_MatrixPart]:
        """Return this rank's part of a matrix, or of each matrix of a stack."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        stacks = [local_part(tensor) for tensor in (parameter, gradient, state["momentum_buffer"])]
        if parameter.ndim == 2:
            stacks = [matrix.unsqueeze(0) for matrix in stacks]
        device = compute_device(parameter)
        shape = parameter.shape[-2:]
        return [_MatrixPart(values, gradients, momenta, shape, device) for values, gradients, momenta in zip(*stacks, strict=True)]


def _update_round(parts: list[_MatrixPart], group: dict[str, Any], ranks: dist.ProcessGroup) -> None:
    """Update matrices that are cut by rows. Rank i of the group orthogonalises the i-th. Collective."""
    rank, size = ranks.rank(), ranks.size()
    blended = [part.blend(group) for part in parts]
    blended += [blended[0].new_empty(0)] * (size - len(parts))
    mine = parts[rank].shape if rank < len(parts) else torch.Size((0, 0))
    rows = _rows_by_rank(mine[0], size)
    received = _exchange(blended, [count * mine[1] for count in rows], ranks)
    results = [torch.empty_like(part) for part in received]
    if mine.numel():
        results = list(_orthogonalised(torch.cat(received).view(mine), group).split(rows))
    returned = _exchange(results, [part.numel() for part in blended], ranks)
    for part, update in zip(parts, returned, strict=False):
        part.apply(update, group)


def _exchange(parts: list[torch.Tensor], received: list[int], ranks: dist.ProcessGroup) -> list[torch.Tensor]:
    """Send part i to rank i of the group, and return the flat parts that the ranks sent, of `received` elements each. Collective."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    buffer = sent.new_empty(sum(received))
    dist.all_to_all_single(buffer, sent, received, [part.numel() for part in parts], group=ranks)
    return list(buffer.split(received))


def _rows_by_rank(rows: int, ranks: int) -> list[int]:
    """Return the number of rows of each rank under `Shard(0)`, as `torch.chunk` divides them."""
    each = -(-rows // ranks)
    return [max(0, min(each, rows - rank * each)) for rank in range(ranks)]


def _orthogonalised(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return the orthogonalised matrix; overwrites `matrix`."""
    orthogonal: torch.Tensor = ORTHOGONALISE.get()(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
    return orthogonal


def sums_need_fp32(recipe: Recipe) -> bool:
    """Return whether FSDP2 would add the gradients of micro-batches in a dtype narrower than fp32."""
    fsdp = recipe.fsdp
    adds_shards = recipe.is_sharded and fsdp.version == 2 and not recipe.is_hybrid and fsdp.sync_each_batch
    return adds_shards and recipe.model.dtype != "fp32" and (recipe.training.gradient_accumulation_steps or 1) > 1


def sum_gradients_in_fp32(wrapped: nn.Module) -> None:
    """Make FSDP2 keep reduced gradients in fp32. Until the step (`round_before_step`) that of a shard takes 4 bytes per parameter.

    Call it after the weights are on their device.
    """
    assert isinstance(wrapped, FSDPModule)
    groups = fsdp_groups(wrapped)
    for group in groups:
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                parameter.sharded_param.grad_dtype = None  # any; torch 2.15 reads it in `_lazy_init` and keeps `reduce_dtype`
    internals.LAZY_INIT.of(internals.FSDP_STATE.of(wrapped)())()  # otherwise the first forward would set the dtype again
    for group in groups:
        internals.ORIGINAL_DTYPE.set(group, torch.float32)  # what `foreach_reduce` casts its output to before torch 2.15


def round_before_step(optimizer: Any) -> None:
    """Make an optimizer cast gradients to the dtype of their parameters before each step, as torch's own require."""
    optimizer.register_step_pre_hook(_round_gradients)
    optimizer.rounds_gradients = True


def rounds_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer casts gradients before each step."""
    return bool(getattr(optimizer, "rounds_gradients", False))


@torch.no_grad()
def _round_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                parameter.grad = parameter.grad.to(parameter.dtype)


def build_optimizer(recipe: Recipe, wrapped: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
    """Create the optimizer for the trained parameters of `wrapped`, with weight decay for the names in `decayed`."""
    optimizer = create_optimizer(recipe, wrapped, decayed)
    if sums_need_fp32(recipe):
        sum_gradients_in_fp32(wrapped)
        if not isinstance(optimizer, LeanAdamW):  # which computes on fp32 copies
            round_before_step(optimizer)
    if gathers_in_fp8(recipe):
        optimizer.register_step_post_hook(lambda *_: refresh_scales(wrapped))
    return optimizer


def create_optimizer(recipe: Recipe, wrapped: nn.Module, decayed: frozenset[str]) -> torch.optim.Optimizer:
    training = recipe.training
    kind, options = optimizer_of(training)
    matrices = orthogonalised_names(wrapped, decayed) if kind is Muon else None
    groups = parameter_groups(wrapped, lambda name: _options_of(recipe, name, decayed, matrices))
    if optimizer_name(training) == "adafactor":
        return ShardedAdafactor(groups, lr=training.learning_rate)
    if state_bits(training) is not None:
        return with_plain_rates(kind)(groups, **options)
    if not options.get("fused") or kind is Muon:
        return kind(groups, **options)
    given = optimizer_arguments(training)
    if not given:
        return AdamW(groups, **options)
    kept_in = TORCH_DTYPE.get(state_dtype(training, "as stored"))  # None: parameters that the class keeps in fp32 have moments in fp32
    return LeanAdamW(groups, **options, state_dtype=kept_in, rounds_parameters=given.get(STOCHASTIC, False), seed=training.seed)


def _options_of(recipe: Recipe, name: str, decayed: frozenset[str], matrices: frozenset[str] | None) -> dict[str, Any]:
    """Return the options of the group of a parameter: those of the first of `training.parameter_groups` that matches, or the recipe's.

    In LoRA+ (arXiv:2402.12354) the learning rate of every B is `lora.lr_ratio` times that of A. `matrices` are the names for Muon.
    """
    own = matching_group(recipe.training, name)
    rate, decay = (None, None) if own is None else (own.learning_rate, own.weight_decay)
    if decay is None:
        decay = float(training_value(recipe.training, "weight_decay")) if name in decayed else 0.0
    if recipe.lora is not None and recipe.lora.lr_ratio != 1.0 and (".lora_B." in name or ".lora_embedding_B." in name):
        rate = (recipe.training.learning_rate if rate is None else rate) * recipe.lora.lr_ratio
    options = {"weight_decay": decay} | ({} if rate is None else {"lr": rate})
    return options if matrices is None else options | {ORTHOGONAL: name in matrices}


def options_by_parameter(recipe: Recipe, model: nn.Module, decayed: frozenset[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each trained parameter's group by its name; the model may be on the meta device."""
    matrices = orthogonalised_names(model, decayed) if optimizer_of(recipe.training)[0] is Muon else None
    names = [plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: _options_of(recipe, name, decayed, matrices) for name in names}


def optimizer_of(training: Training) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return class and keyword arguments of `training.optim`, as `Trainer.get_optimizer_cls_and_kwargs` does."""
    name, bits, options = optimizer_name(training), state_bits(training), optimizer_options(training)
    if name == "adafactor":
        from transformers.optimization import Adafactor  # which imports PEFT

        return Adafactor, options
    return _CLASSES.get(name, torch.optim.AdamW) if bits is None else torchao_class(bits), options


_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "muon": Muon,
}
