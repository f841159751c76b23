"""Adafactor on sharded parameters.

Adafactor (arXiv:1804.04235) is set up as transformers' Trainer does. The second moment of a matrix is stored
as means over its rows and over its columns, and an update is limited by its root mean square. All three are
of the full tensor: each rank sums over its part, and one all-reduce adds the sums of all parameters, a second
one the squares of all updates. Updates are computed twice rather than kept between the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import ParamsT

from fsdp_tune.model.optim.lean_adamw import restore_moments
from fsdp_tune.model.shard.local import Sharding, local_part, sharding_of
from fsdp_tune.model.step import sum_of_squares

EPSILON, CLIP_THRESHOLD, DECAY_RATE = 1e-30, 1.0, -0.8
"""transformers' defaults, which its Trainer does not change."""


ROWS, COLUMNS, FULL = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"


@dataclass(slots=True)
class _ParameterPart:
    """This rank's part of a parameter, during one step."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]
    """Local parts of the moments."""
    shape: torch.Size
    """Shape of the full parameter."""
    sharding: Sharding | None
    group: dict[str, Any]
    decay: float
    """β₂ of this step."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """Squares summed over the rows, and the sum of the new row means: of this rank's rows, and then of all
    rows."""

    @property
    def cuts_columns(self) -> bool:
        """Whether a column has elements on several ranks."""
        return self.sharding is not None and len(self.shape) >= 2 and self.sharding.dim == len(self.shape) - 2

    def blend(self, kind: str, new: torch.Tensor) -> torch.Tensor:
        return self.state[kind].mul_(self.decay).add_(new, alpha=1 - self.decay)

    def sum_squares(self) -> None:
        """Update the moments that need this rank's part alone, and fill `sums` for the others."""
        squares = self.gradient.float().square().add_(EPSILON)
        if FULL in self.state:
            self.blend(FULL, squares)
        else:
            rows = self.blend(ROWS, squares.mean(dim=-1))
            self.sums = [squares.sum(dim=-2), rows.sum(dim=-1, keepdim=True)]

    def finish_moments(self) -> None:
        if FULL not in self.state:
            columns, rows = self.sums
            self.blend(COLUMNS, columns / self.shape[-2])
            self.sums = [rows / self.shape[-2]]

    def update(self) -> torch.Tensor:
        """Return the update before it is limited."""
        gradient = self.gradient.float()
        if FULL in self.state:
            return self.state[FULL].rsqrt().mul_(gradient)
        [mean] = self.sums
        by_row = (self.state[ROWS] / mean).rsqrt_().unsqueeze(-1)
        return torch.mul(by_row, self.state[COLUMNS].unsqueeze(-2).rsqrt()).mul_(gradient)

    def apply(self, rms: torch.Tensor) -> None:
        """`rms`: root mean square of the full update."""
        rate, values = self.group["lr"], self.parameter.float()
        update = self.update().div_((rms / CLIP_THRESHOLD).clamp_(min=1.0)).mul_(rate)
        if self.group["weight_decay"]:
            values.add_(values, alpha=-self.group["weight_decay"] * rate)
        self.parameter.copy_(values.sub_(update))


class ShardedAdafactor(torch.optim.Optimizer):
    """Adafactor without relative steps and scaling by the parameter, as under transformers' Trainer. For
    FSDP2 and DDP."""

    def __init__(self, params: ParamsT, *, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._steps: dict[torch.Tensor, int] = {}  # per parameter: the planner's tensors have no values

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002  no caller recomputes the loss
        parts = [
            self._part(p, p.grad, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        for part in parts:
            part.sum_squares()
        _add_over_ranks([(part.sharding, each) for part in parts if part.cuts_columns for each in part.sums])
        for part in parts:
            part.finish_moments()
        squares = [sum_of_squares([part.update()]) for part in parts]
        _add_over_ranks(
            [
                (part.sharding, square)
                for part, square in zip(parts, squares, strict=True)
                if part.sharding is not None
            ]
        )
        for part, square in zip(parts, squares, strict=True):
            part.apply((square / part.shape.numel()).sqrt().float())

    def _part(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, object]
    ) -> _ParameterPart:
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.zeros((), dtype=torch.float32), **_zero_moments(parameter)}
            self._steps[parameter] = 0
        elif parameter not in self._steps:
            self._steps[parameter] = int(state["step"])
        state["step"] += 1
        self._steps[parameter] += 1
        moments = {kind: local_part(value) for kind, value in state.items() if kind != "step"}
        decay = 1.0 - self._steps[parameter] ** DECAY_RATE
        return _ParameterPart(
            local_part(parameter),
            local_part(gradient),
            moments,
            parameter.shape,
            sharding_of(parameter),
            group,
            decay,
        )

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict(state_dict)
        restore_moments(self, state_dict, torch.float32)
        self._steps.clear()


def _zero_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if parameter.ndim < 2:
        return {FULL: torch.zeros_like(parameter, dtype=torch.float32)}
    return {
        ROWS: _zeros_without(parameter, parameter.ndim - 1),
        COLUMNS: _zeros_without(parameter, parameter.ndim - 2),
    }


def _zeros_without(parameter: torch.Tensor, dim: int) -> torch.Tensor:
    """Return zeros in fp32 of the parameter's shape without `dim`, cut as the parameter is, or replicated if
    that cuts `dim`."""
    shape, local = list(parameter.shape), list(local_part(parameter).shape)
    del shape[dim], local[dim]
    zeros = torch.zeros(local, dtype=torch.float32, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return zeros
    placements = [Replicate() if placement.is_shard(dim) else placement for placement in parameter.placements]
    strides = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return made.to(parameter.device)  # `from_local` moves what is in host memory to the devices of the mesh


def _add_over_ranks(tensors: list[tuple[Sharding | None, torch.Tensor]]) -> None:
    """Add tensors over the ranks with the other parts, in place. One collective: the parameters of a model
    are cut over the same ranks."""
    if not tensors:
        return
    [(ranks, device)] = {(sharding.group, sharding.device) for sharding, _ in tensors if sharding is not None}
    total = torch.cat([tensor.reshape(-1) for _, tensor in tensors]).to(device)
    dist.all_reduce(total, group=ranks)
    for (_, tensor), added in zip(
        tensors, total.split([tensor.numel() for _, tensor in tensors]), strict=True
    ):
        tensor.copy_(added.view_as(tensor))
