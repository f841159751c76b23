"""Muon on sharded matrices.

Muon updates the hidden matrices, with AdamW for everything else in the same optimizer. The momentum of a
matrix is orthogonalised by torch's own function (`torch.optim.Muon`), always on the full matrix. Each rank of
a shard group orthogonalises other matrices: in a round of as many matrices as ranks, one all-to-all sends
every rank the parts of its matrix, and a second one sends the parts of the result back. Both carry bf16, in
which torch orthogonalises anyway, so the number of ranks does not change a bit of the update. Replicas
(HYBRID_SHARD, NO_SHARD) each orthogonalise all matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT
from transformers import PreTrainedModel

from fsdp_tune.core.families import STATE_DECAY
from fsdp_tune.model.internals.torch_internals import ADJUST_RATE, ORTHOGONALISE
from fsdp_tune.model.optim.adamw import AdamW
from fsdp_tune.model.shard.exchange import exchanged
from fsdp_tune.model.shard.local import compute_device, local_part, plain_name, sharding_of

ORTHOGONAL = "orthogonal"
"""Key of a parameter group: whether Muon updates its parameters."""


_CONVOLUTIONS = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)


def orthogonalised_names(wrapped: nn.Module, decayed: frozenset[str]) -> frozenset[str]:
    """Return the names of the parameters for Muon: hidden matrices and stacks of them, with weight decay
    (`decayed`).

    Embeddings, the head and convolutions are left to AdamW, as are vectors
    (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982) and the decay rates of state-space layers:
    no matrix product uses them.
    """
    left_out: set[int] = set()
    for module in wrapped.modules():
        of_module: list[nn.Module | None] = []
        if isinstance(module, PreTrainedModel):
            of_module = [module.get_input_embeddings(), module.get_output_embeddings()]
        elif isinstance(module, nn.Embedding | _CONVOLUTIONS):
            of_module = [module]
        left_out |= {
            id(parameter) for each in of_module if each is not None for parameter in each.parameters()
        }
    names = {
        plain_name(name) for name, parameter in wrapped.named_parameters() if id(parameter) not in left_out
    }
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
    """Updates groups with `orthogonal: True` as `torch.optim.Muon` does, others by AdamW. For FSDP2 and
    DDP."""

    def __init__(self, params: ParamsT, *, muon: dict[str, object], **options: object) -> None:
        """`muon`: arguments of `torch.optim.Muon` except learning rate and weight decay."""
        super().__init__(params, **options)
        for group in self.param_groups:
            group.setdefault(ORTHOGONAL, False)
            group |= muon if group[ORTHOGONAL] else {}

    def __setstate__(self, state: dict[str, object]) -> None:
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
        options = {
            name: group[name]
            for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "foreach", "fused")
        }
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
        return [
            _MatrixPart(values, gradients, momenta, shape, device)
            for values, gradients, momenta in zip(*stacks, strict=True)
        ]


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
    """Send part i to rank i of the group, and return the flat parts that the ranks sent, of `received`
    elements each. Collective."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    return list(exchanged(sent, ranks, [part.numel() for part in parts], received).split(received))


def _rows_by_rank(rows: int, ranks: int) -> list[int]:
    """Return the number of rows of each rank under `Shard(0)`, as `torch.chunk` divides them."""
    each = -(-rows // ranks)
    return [max(0, min(each, rows - rank * each)) for rank in range(ranks)]


def _orthogonalised(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return the orthogonalised matrix; overwrites `matrix`."""
    orthogonal: torch.Tensor = ORTHOGONALISE.get()(
        matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )
    return orthogonal
