"""Low-precision state and weights: stochastic rounding is right on average, rounding to nearest loses small
updates."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.optim import lean_adamw
from fsdp_tune.model.optim.lean_adamw import LeanAdamW
from fsdp_tune.model.optim.optimizer import build_optimizer
from fsdp_tune.model.optim.stochastic_rounding import round_stochastically, rounding_key
from tests.model.recipes import recipe_of


def nearest(values: torch.Tensor, _start: int, _key: tuple[int, int]) -> torch.Tensor:
    """The planted bug."""
    return values.to(torch.bfloat16)


def test_stochastic_rounding_keeps_exact_and_nonfinite_values() -> None:
    exact = torch.randn(10_000).bfloat16().float()
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, float("nan")])
    # CUDA's own NaN would carry into a zero
    every_nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for step in range(5):
        key = rounding_key(0, step)
        assert torch.equal(round_stochastically(exact, 0, key).float(), exact)
        assert torch.equal(round_stochastically(odd, 0, key)[:4].float(), odd[:4])
        assert round_stochastically(odd, 0, key)[5].isnan()
        assert round_stochastically(every_nan, 0, key).isnan().all()


def test_stochastic_rounding_is_unbiased() -> None:
    for value in (1.001, -1.001, 0.3, 3e-39):
        below = torch.tensor(value).view(torch.int32).bitwise_and(-0x10000).view(torch.float32)
        above = below.view(torch.int32).add(0x10000).view(torch.float32)
        values = torch.full((1 << 16,), value)
        rounded = round_stochastically(values, 0, rounding_key(7)).float()
        assert set(rounded.tolist()) == {float(below), float(above)}
        share = (rounded == above).double().mean().item()
        wanted = (value - float(below)) / float(above - below)
        assert share == pytest.approx(wanted, abs=0.008)  # four standard deviations


def test_rounding_noise_depends_on_index_and_key_not_on_the_shard() -> None:
    values = torch.rand(5_000)
    whole = round_stochastically(values, 1 << 33, rounding_key(1, 2))
    begin, end = values.split([1234, 3766])
    parts = torch.cat(
        [
            round_stochastically(part, (1 << 33) + at, rounding_key(1, 2))
            for at, part in ((0, begin), (1234, end))
        ]
    )
    assert torch.equal(whole, parts)
    for other in (
        round_stochastically(values, 0, rounding_key(1, 2)),
        round_stochastically(values, 1 << 33, rounding_key(2, 1)),
    ):
        assert 0.2 < (other != whole).double().mean().item() < 0.45  # a third of uniform pairs differ


def test_rounding_noise_differs_between_neighbours_and_steps() -> None:
    half = torch.full((1 << 14,), 1.0 + 2**-8)
    draws = torch.stack(
        [round_stochastically(half, 0, rounding_key(0, step)).float() > 1.0 for step in range(32)]
    ).double()
    assert abs(draws.mean().item() - 0.5) < 0.005
    centred = draws - 0.5
    for first, second in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        # four standard deviations of no correlation are 0.0014
        assert abs((first * second).mean().item()) < 0.0025


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 16).to(dtype)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scale: float = 1.0) -> nn.Module:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale
        optimizer.step()
    return model


OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def lean(model: nn.Module, state_dtype: torch.dtype, **options: Any) -> LeanAdamW:
    return LeanAdamW(
        model.parameters(),
        state_dtype=state_dtype,
        **{"rounds_parameters": False, "seed": 0} | OPTIONS | options,
    )


# whole vectors: a tail is computed without fused multiply-add
@pytest.mark.parametrize("piece", [1 << 24, 128])
def test_lean_adamw_in_fp32_equals_torch_bitwise(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_adamw, "PIECE", piece)
    ours, theirs = linear(), linear()
    trained(ours, lean(ours, torch.float32), 5)
    trained(theirs, torch.optim.AdamW(theirs.parameters(), **OPTIONS), 5)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize(("ranks", "dim"), [(2, 0), (4, 1), (2, 1)])
def test_pieces_have_the_index_of_their_elements(
    ranks: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of rows, and of the rows of each expert: an element is rounded alike however it is sharded."""
    monkeypatch.setattr(lean_adamw, "PIECE", 7)
    whole = torch.arange(3 * 8 * 5).view(3, 8, 5)
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            part, mesh = whole.chunk(ranks, dim)[rank].contiguous(), init_device_mesh("cpu", (ranks,))
            shared = DTensor.from_local(
                part, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            found = list(lean_adamw._pieces(shared))
        finally:
            dist.destroy_process_group()
        indices = [torch.arange(index, index + length) for _, length, index in found]
        positions = [torch.arange(at, at + length) for at, length, _ in found]
        assert torch.equal(torch.cat(indices), part.flatten())
        assert torch.equal(torch.cat(positions), torch.arange(part.numel()))


def test_small_updates_are_lost_by_rounding_to_nearest_and_kept_by_stochastic_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights of 1 and a learning rate of 1e-4: half of bf16's last place there is 2e-3, twenty steps."""

    def after(steps: int, *, rounds: bool) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = LeanAdamW(
            [weight],
            state_dtype=torch.float32,
            rounds_parameters=rounds,
            seed=0,
            lr=1e-4,
            weight_decay=0.0,
            fused=True,
        )
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().float()

    # AdamW on bf16 weights, as everybody has it
    assert torch.equal(after(100, rounds=False), torch.ones(4096))
    assert after(100, rounds=True).mean().item() == pytest.approx(1 - 100 * 1e-4, rel=2e-4)
    monkeypatch.setattr(lean_adamw, "round_stochastically", nearest)
    assert torch.equal(after(100, rounds=True), torch.ones(4096))


def test_bf16_second_moment_decays_only_with_stochastic_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """β₂ = 0.999 takes 0.1 % a step; half of bf16's last place is 0.2 to 0.4 %."""

    def ratio(state_dtype: torch.dtype) -> float:
        """Second moment after 500 steps without gradient, over that before them."""
        weight = nn.Parameter(torch.zeros(4096))
        optimizer = LeanAdamW(
            [weight], state_dtype=state_dtype, rounds_parameters=False, seed=0, lr=0.0, fused=True
        )
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        moment = optimizer.state[weight]["exp_avg_sq"]
        before = moment.double().mean().item()
        weight.grad = torch.zeros_like(weight)
        for _ in range(500):
            optimizer.step()
        return optimizer.state[weight]["exp_avg_sq"].double().mean().item() / before

    assert ratio(torch.float32) == pytest.approx(0.999**500, rel=1e-4)
    assert ratio(torch.bfloat16) == pytest.approx(0.999**500, rel=0.01)
    monkeypatch.setattr(lean_adamw, "round_stochastically", nearest)
    assert ratio(torch.bfloat16) == 1.0


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_state_dict_keeps_dtype_and_bits(stored: torch.dtype) -> None:
    """torch's own load_state_dict casts moments to the parameter's dtype."""
    kept_in = torch.bfloat16 if stored == torch.float32 else torch.float32
    model = linear(stored)
    optimizer = lean(model, kept_in, rounds_parameters=True)
    trained(model, optimizer, 3)
    twin = copy.deepcopy(model)
    restored = lean(twin, kept_in, rounds_parameters=True)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter in twin.parameters():
        assert (
            restored.state[parameter]["exp_avg"].dtype
            == restored.state[parameter]["exp_avg_sq"].dtype
            == kept_in
        )
    trained(model, optimizer, 3)
    trained(twin, restored, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_recipe_selects_optimizer_and_state_dtype() -> None:
    def built(text: str | None, dtype: str = "fp32", **training: Any) -> Any:
        model = linear(torch.bfloat16 if dtype == "bf16" else torch.float32)
        return build_optimizer(
            recipe_of(model={"dtype": dtype}, training={"optim_args": text, **training}), model, frozenset()
        )

    assert type(built(None)).__name__ == "AdamW"
    lean_state = built("state_dtype=bf16", seed=7)
    assert (lean_state.state_dtype, lean_state.rounds_parameters, lean_state.seed) == (
        torch.bfloat16,
        False,
        7,
    )
    rounded = built("bf16_stochastic_round=true", "bf16")
    assert (rounded.state_dtype, rounded.rounds_parameters) == (None, True), (
        "moments have the dtype of their parameter"
    )
    assert built("bf16_stochastic_round=true, state_dtype=fp32", "bf16").state_dtype == torch.float32


def test_validate_without_torchao_has_an_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(training={"optim": "adamw_torch_8bit"})
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "torchao" else real(name, *rest)
    )
    (problem,) = find_facts(recipe).problems
    assert problem.code == "torchao-not-installed"
    assert problem.hint == "`pip install torchao`"
