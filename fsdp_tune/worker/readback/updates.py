"""Check that the first optimizer step changes what it should: a sample of the values before it, and the
step repeated on them.

Of an optimizer step, a bounded number of values per shard is copied before it: those with the largest and the
smallest gradient, and a few at equal distances. The recipe's optimizer, as torch implements it, then repeats
the step on the copies in fp64. A value whose update exceeds half a unit in the last place (with weight decay,
a whole one) must differ afterwards. Only elementwise optimizers can be repeated on a sample. Of a tensor that
Muon or Adafactor updates, one of the values must differ, if the learning rate is far above their last places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_tune.model.optim.adafactor import ShardedAdafactor
from fsdp_tune.model.optim.muon import ORTHOGONAL
from fsdp_tune.model.optim.optimizer import rounds_gradients
from fsdp_tune.model.shard.local import local_part

SPACED = 14
"""Values at equal distances; with the two extremes, at most this many and two are copied per shard."""
ROUNDING_MARGIN = 1.1
"""The optimizer computes in fp32 and with state of fewer bits; its update may differ from the fp64 one by
this factor."""
SMALLEST_SHARE = 1e-3
"""Assumed for Muon and Adafactor, whose updates have a root mean square of 0.2 and 1 times the learning rate:
that of the largest sampled update is at least this share of it."""
_PRECISION_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float64: 53}


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Values of one shard before the step, at `positions` of the flattened shard."""

    name: str
    parameter: nn.Parameter
    positions: torch.Tensor
    before: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]


class UpdateSample:
    """Taken before `optimizer.step`, when gradients are clipped; `unchanged` is called after it."""

    @torch.no_grad()
    def __init__(
        self, names: Mapping[nn.Parameter, str], optimizer: torch.optim.Optimizer, *, stochastic: bool
    ) -> None:
        """`stochastic`: bf16 parameters are rounded stochastically, so that only an update of a whole unit is
        sure to change them."""
        self._optimizer = optimizer
        self._rounds_gradients = rounds_gradients(optimizer)
        self._ulps = 1.0 if stochastic else 0.5
        self._groups: dict[tuple[int, torch.dtype, torch.device], list[_Sampled]] = defaultdict(list)
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}) if _is_elementwise(optimizer, group) else {}
                if (sampled := _sample(names.get(parameter, "?"), parameter, state)) is not None:
                    self._groups[index, sampled.parameter.dtype, sampled.before.device].append(sampled)
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    @property
    def gradient_dtypes(self) -> set[torch.dtype]:
        return {sampled.gradient.dtype for every in self._groups.values() for sampled in every}

    @torch.no_grad()
    def unchanged(self) -> list[str]:
        """Return the names of parameters with a value that the step should have changed and did not."""
        found: list[str] = []
        for (index, dtype, _), every in self._groups.items():
            if not _is_elementwise(self._optimizer, self._optimizer.param_groups[index]):
                found += [sampled.name for sampled in every if _is_stuck(sampled, dtype, self._rates[index])]
                continue
            by_step: dict[float, list[_Sampled]] = defaultdict(list)
            for step, sampled in zip(_steps(every), every, strict=True):
                by_step[step].append(sampled)
            for some in by_step.values():
                found += self._unchanged(index, dtype, some)
        return found

    def _unchanged(self, index: int, dtype: torch.dtype, some: list[_Sampled]) -> list[str]:
        def joined(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(values).cpu().double()

        before = joined([sampled.before for sampled in some])
        after = joined([_flat(sampled.parameter)[sampled.positions] for sampled in some])
        gradient = joined(
            [sampled.gradient.to(dtype) if self._rounds_gradients else sampled.gradient for sampled in some]
        )
        first = some[0].state
        state = {
            key: first[key].cpu() if key == "step" else joined([sampled.state[key] for sampled in some])
            for key in first
        }
        options = {**self._optimizer.param_groups[index], "lr": self._rates[index]}
        update = (_repeated(type(self._optimizer), options, before, gradient, state) - before).abs()
        # Weight decay is a separate update: two updates of less than half a unit each may both be rounded
        # away.
        ulps = self._ulps + (0.5 if options.get("weight_decay") else 0.0)
        must_change = update > ROUNDING_MARGIN * ulps * _units_in_last_place(before, dtype)
        stuck = (must_change & (after == before)).split([len(sampled.before) for sampled in some])
        return [sampled.name for sampled, each in zip(some, stuck, strict=True) if bool(each.any())]


def _is_elementwise(optimizer: torch.optim.Optimizer, group: Mapping[str, object]) -> bool:
    return not isinstance(optimizer, ShardedAdafactor) and not group.get(ORTHOGONAL, False)


def _is_stuck(sampled: _Sampled, dtype: torch.dtype, rate: float) -> bool:
    """Return whether no sampled value has changed although one must have."""
    before = sampled.before.double()
    may_change = (sampled.gradient != 0) & (_units_in_last_place(before, dtype) < SMALLEST_SHARE * rate)
    after = _flat(sampled.parameter)[sampled.positions].double()
    return bool(may_change.any()) and torch.equal(before, after)


def _sample(name: str, parameter: nn.Parameter, state: Mapping[str, object]) -> _Sampled | None:
    """Return None without a gradient, for an empty shard, and for state in blocks, which cannot be sliced."""
    if parameter.grad is None or (gradient := _flat(parameter.grad)).numel() == 0:
        return None
    spaced = torch.arange(0, gradient.numel(), max(1, gradient.numel() // SPACED), device=gradient.device)[
        :SPACED
    ]
    # no copy of the gradient, as its magnitudes would be
    extremes = torch.stack([gradient.argmax(), gradient.argmin()])
    positions = torch.cat([spaced, extremes])
    copied: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        if key == "step":
            copied[key] = value.detach().clone()
        else:
            if value.shape != parameter.shape or type(local := _flat(value)) is not torch.Tensor:
                return None
            copied[key] = local[positions]
    return _Sampled(name, parameter, positions, _flat(parameter)[positions], gradient[positions], copied)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a flat view; shards are contiguous."""
    flat: torch.Tensor = local_part(tensor).detach().reshape(-1)
    return flat


def _steps(every: list[_Sampled]) -> list[float]:
    """Return the number of steps of each parameter, with one transfer from the device."""
    counted = [sampled.state["step"].reshape(()).float() for sampled in every if "step" in sampled.state]
    numbers = iter(torch.stack(counted).tolist() if counted else ())
    return [next(numbers) if "step" in sampled.state else 0.0 for sampled in every]


def _repeated(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    before: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the values after a step of torch's optimizer in fp64."""
    plain: Any = next(
        (
            each
            for each in kind.__mro__
            if each.__module__.startswith("torch.optim.") and each.__bases__ != (object,)
        ),
        None,
    )
    if plain is None or plain is torch.optim.Optimizer:
        plain = torch.optim.AdamW  # torchao's are AdamW with another state
    vector = nn.Parameter(before.clone())
    vector.grad = gradient
    optimizer = plain([vector], lr=options["lr"])
    [group] = optimizer.param_groups
    kept = {"params", "foreach", "fused", "capturable", "differentiable"}
    group.update({key: options[key] for key in group.keys() - kept if key in options} | {"foreach": False})
    if state:
        optimizer.state[vector] = state
    with torch.enable_grad():
        optimizer.step()
    return vector.detach()


def _units_in_last_place(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance to the next number of `dtype` away from zero; at least the smallest normal number, since
    kernels may flush smaller ones."""
    _, exponent = torch.frexp(values)
    units = torch.ldexp(torch.ones_like(values), exponent - _PRECISION_BITS[dtype])
    return units.where(values != 0, 0.0).clamp_min(torch.finfo(dtype).tiny)
