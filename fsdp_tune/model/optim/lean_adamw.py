"""AdamW that stores its moments, or the parameters, in fewer bits between steps.

Each step runs torch's fused kernel on fp32 copies, a piece at a time. Values that are stored in bf16 are
stochastically rounded: with rounding to nearest, a second moment in bf16 would never change, since at β₂ =
0.999 a step changes it by less than half a unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from fsdp_tune.model.internals.torch_internals import FUSED_ADAMW
from fsdp_tune.model.optim.stochastic_rounding import round_stochastically, rounding_key
from fsdp_tune.model.shard.local import local_part, sharding_of

PIECE = 1 << 24
"""Elements that are upcast at a time: four fp32 copies take 256 MiB."""


MOMENTS = ("exp_avg", "exp_avg_sq")


class LeanAdamW(torch.optim.AdamW):
    """AdamW with moments of `state_dtype`, or of the dtype of each parameter if it is None. With
    `rounds_parameters`, bf16 parameters are stochastically rounded.

    The state has the layout of torch's: DTensors where parameters are. For FSDP2 and DDP, where the offset of
    a shard is known.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        state_dtype: torch.dtype | None,
        rounds_parameters: bool,
        seed: int,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self.state_dtype, self.rounds_parameters, self.seed = state_dtype, rounds_parameters, seed
        self._steps: dict[
            torch.Tensor, int
        ] = {}  # per parameter, on the host: reading the device's copy would synchronise

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002  no caller recomputes the loss
        position = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                position += 1
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, position)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            self._steps[parameter] = 0
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {
                name: torch.zeros_like(parameter, dtype=self.state_dtype or parameter.dtype)
                for name in MOMENTS
            }
        elif parameter not in self._steps:
            self._steps[parameter] = int(state["step"])
        return state

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], position: int
    ) -> None:
        state = self._state_of(parameter)
        state["step"] += 1
        self._steps[parameter] += 1
        keys = [rounding_key(self.seed, self._steps[parameter], position, which) for which in range(3)]
        stored = [_flat(tensor) for tensor in (parameter, *(state[name] for name in MOMENTS))]
        gradient = _flat(gradient)
        beta1, beta2 = group["betas"]
        update = FUSED_ADAMW.get()
        for part in _pieces(parameter):
            elements = slice(part.start, part.start + part.length)
            pieces = [tensor[elements] for tensor in stored]
            wide = [piece.float() for piece in pieces]
            update(
                [wide[0]],
                [gradient[elements].float()],
                [wide[1]],
                [wide[2]],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            stochastic = (self.rounds_parameters, True, True)
            for piece, values, key, is_stochastic in zip(pieces, wide, keys, stochastic, strict=True):
                if piece.dtype != values.dtype:  # otherwise the kernel updated the stored tensor itself
                    piece.copy_(
                        round_stochastically(values, part.full_index, key) if is_stochastic else values
                    )

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict(state_dict)
        restore_moments(self, state_dict, self.state_dtype)
        self._steps.clear()


def restore_moments(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], dtype: torch.dtype | None
) -> None:
    """Convert loaded moments from the source again: `load_state_dict` has cast them to the dtype of the
    parameter, None here."""
    names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    for name, parameter in zip(
        names, chain.from_iterable(group["params"] for group in optimizer.param_groups), strict=True
    ):
        source = state_dict["state"].get(name, {})
        optimizer.state[parameter] |= {
            kind: value.to(parameter.device, dtype or parameter.dtype)
            for kind, value in source.items()
            if kind != "step"
        }


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a flat view in memory order."""
    return local_part(tensor).detach().view(-1)


class _Piece(NamedTuple):
    """Consecutive elements of this rank's part of a parameter."""

    start: int
    """In the part."""
    length: int
    full_index: int
    """Row-major, of the first element in the full tensor."""


def _pieces(parameter: torch.Tensor) -> Iterator[_Piece]:
    """Yield pieces of this rank's part.

    A part consists of full rows (`Shard(0)`), or of rows of each expert of a stack (`Shard(1)`).
    """
    total, shape, sharding = parameter.shape, local_part(parameter).shape, sharding_of(parameter)
    dim = sharding.dim if sharding is not None else 0
    assert dim <= 1, "FSDP shards by rows or inside of experts"
    # Computed here: torch's own function reads values of tensors, which do not exist while a step is traced.
    rows = -(-total[dim] // sharding.group.size()) * sharding.group.rank() if sharding is not None else 0
    run, stride, first = math.prod(shape[dim:]), math.prod(total[dim:]), rows * math.prod(total[dim + 1 :])
    for number in range(math.prod(shape[:dim])):
        for start in range(0, run, PIECE):
            yield _Piece(number * run + start, min(PIECE, run - start), number * stride + first + start)
