"""The update check requires every change that the optimizer must make, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_tune.model.optim.adafactor import ShardedAdafactor
from fsdp_tune.model.optim.adamw import AdamW
from fsdp_tune.model.optim.lean_adamw import LeanAdamW
from fsdp_tune.model.optim.muon import Muon
from fsdp_tune.model.optim.optimizer import round_before_step
from fsdp_tune.recipe.schema.optimizers import MUON_DEFAULTS
from fsdp_tune.worker.readback.updates import UpdateSample


def muon(parameters: Iterable[nn.Parameter], **options: Any) -> Muon:
    groups = [{"params": [parameter], "orthogonal": parameter.ndim == 2} for parameter in parameters]
    return Muon(groups, muon=MUON_DEFAULTS, fused=True, weight_decay=0.1, **options)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {"fused": True, "weight_decay": 0.1}),
    "lean": (LeanAdamW, {"state_dtype": torch.bfloat16, "rounds_parameters": False, "seed": 1}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "Adafactor": (ShardedAdafactor, {}),
    "Muon": (muon, {}),
}


class Bench:
    def __init__(
        self, kind: str = "AdamW", *, lr: float = 1e-3, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 300), nn.Linear(300, 2)).to(dtype)
        made, own = OPTIMIZERS[kind]
        self.optimizer = made(self.model.parameters(), lr=lr, **(own | options))
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)

    def unchanged(self, keep: str | None = None, *, stochastic: bool = False) -> list[str]:
        """One update, in which the parameter `keep` gets its old values back."""
        named = dict(self.model.named_parameters())
        sample = UpdateSample(
            {parameter: name for name, parameter in named.items()}, self.optimizer, stochastic=stochastic
        )
        old = {name: parameter.detach().clone() for name, parameter in named.items()}
        self.optimizer.step()
        if keep is not None:
            named[keep].data.copy_(old[keep])
        return sample.unchanged()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameter_that_an_update_leaves_out_is_named_at_any_step(kind: str) -> None:
    bench = Bench(kind)
    assert [bench.unchanged() for _ in range(3)] == [[]] * 3
    assert bench.unchanged("1.weight") == ["1.weight"]


def test_largest_gradient_of_a_shard_is_sampled() -> None:
    bench = Bench("SGD", weight_decay=0.0)
    weight = bench.model[1].weight
    weight.grad = torch.zeros_like(weight)
    weight.grad.view(-1)[1001] = -1.0
    assert bench.unchanged("1.weight") == ["1.weight"]


@pytest.mark.parametrize("case", ["no gradient", "zero gradient", "unused rows", "empty shard", "lr of 0"])
def test_skipped_updates_are_not_checked(case: str) -> None:
    bench = Bench(weight_decay=0.0, lr=0.0 if case == "lr of 0" else 1e-3)
    embedding, idle = bench.model[0].weight, bench.model[2].weight
    if case == "no gradient":
        idle.grad = None
    if case == "zero gradient":  # an adapter's first matrix while its second is zero
        idle.grad = torch.zeros_like(idle)
    if case == "unused rows":
        embedding.grad[3:] = 0.0  # type: ignore[index]
    if case == "empty shard":
        idle.data, idle.grad = torch.empty(0, 2), None
        idle.grad = torch.empty(0, 2)
    assert bench.unchanged() == []
    assert bench.unchanged() == []


def test_cancelled_momentum_may_change_nothing() -> None:
    bench = Bench(dtype=torch.bfloat16, lr=1.0, weight_decay=0.0)
    round_before_step(bench.optimizer)
    bench.unchanged()
    for parameter in bench.model.parameters():
        state = bench.optimizer.state[parameter]
        state["exp_avg"].fill_(1.0)
        state["exp_avg_sq"].fill_(1e-3)
        parameter.grad_dtype = None
        # -9.0 in bf16, which makes the new momentum exactly zero
        parameter.grad = torch.full(parameter.shape, -9.03)
    assert bench.unchanged() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_update_below_half_a_unit_in_the_last_place_may_vanish(dtype: torch.dtype) -> None:
    bench = Bench("SGD", lr=1e-7, dtype=dtype, momentum=0.0, nesterov=False)
    bench.model[1].weight.data.fill_(1.0)
    assert bench.unchanged() == []
    assert torch.equal(bench.model[1].weight, torch.ones_like(bench.model[1].weight))
    bench = Bench("SGD", lr=1e-1, dtype=dtype, momentum=0.0, nesterov=False)
    assert bench.unchanged("1.weight") == ["1.weight"]


def test_decay_and_update_of_less_than_half_a_unit_each_may_vanish() -> None:
    bench = Bench(lr=0.4 * 2**-23, weight_decay=0.5)
    for parameter in bench.model.parameters():
        parameter.data.fill_(1.5)
        parameter.grad = torch.ones_like(parameter)
    assert bench.unchanged() == []
    assert all(
        torch.equal(parameter, torch.full_like(parameter, 1.5)) for parameter in bench.model.parameters()
    )


def test_stochastic_rounding_may_keep_a_value_until_the_update_is_a_full_ulp() -> None:
    bench = Bench("lean", dtype=torch.bfloat16, lr=6e-3, weight_decay=0.0, rounds_parameters=True)
    for parameter in bench.model.parameters():
        parameter.data.fill_(1.0)  # a unit is 1/128: the update is 0.77 of it
    assert bench.unchanged(stochastic=True) == []
    assert bench.unchanged(stochastic=False) != []
