"""Gradients of micro-batches are added in fp32, also for bf16 weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.model.recipes import recipe_of
from tests.ranks import Ranks

MICRO_BATCHES = 16
ROUNDED_ONCE = 0.0025
"""Relative error of a gradient that is rounded to bf16 once: 0.17 %. Added in bf16 16 times, it is off by 0.4
%."""


def sums(ranks: int, optim_args: str | None, **fsdp: Any) -> dict[str, float]:
    """On a rank: the error of the step's gradient before and in the update, against the fp64 sum of gradients
    taken one by one."""
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.optim.optimizer import build_optimizer
    from fsdp_tune.model.shard.process_groups import make_mesh
    from fsdp_tune.model.step import forward_backward

    training = {
        "global_batch_size": ranks * MICRO_BATCHES,
        **({"optim_args": optim_args} if optim_args else {}),
    }
    recipe = recipe_of("llama", ranks, fsdp=fsdp, training=training)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bf16"})})
    loaded = wrap_whole(recipe, build_full(recipe), make_mesh(recipe, "cpu"), torch.device("cpu"))
    wrapped: Any = loaded.wrapped
    optimizer = build_optimizer(recipe, wrapped, loaded.size.decayed)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches = [torch.randint(0, 60, (1, 12), generator=generator) for _ in range(MICRO_BATCHES)]
    vocabulary = loaded.model.config.vocab_size

    def backward(ids: torch.Tensor, *, last: bool) -> None:
        if recipe.is_hybrid:
            wrapped.set_requires_all_reduce(last)
        ids = ids % vocabulary
        forward_backward(recipe, wrapped, {"input_ids": ids, "labels": ids}, 1 / 11)

    def gradients() -> torch.Tensor:
        return torch.cat([p.grad.to_local().double().reshape(-1) for p in wrapped.parameters()])

    exact = torch.zeros((), dtype=torch.float64)
    for ids in batches:
        backward(ids, last=True)
        exact = exact + gradients()
        optimizer.zero_grad()
    for number, ids in enumerate(batches):
        backward(ids, last=number == MICRO_BATCHES - 1)
    found = {"before": float((gradients() - exact).norm() / exact.norm())}
    found["bytes"] = wrapped.get_input_embeddings().weight.grad.element_size()
    optimizer.register_step_post_hook(
        lambda *_: found.update(update=float((gradients() - exact).norm() / exact.norm()))
    )
    optimizer.step()
    found["finite"] = float(all(bool(torch.isfinite(p.to_local()).all()) for p in wrapped.parameters()))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "optim_args", "fsdp", "before", "update"),
    [
        (2, None, {}, 1e-6, ROUNDED_ONCE),
        pytest.param(2, None, {"offload_params": True}, 1e-6, ROUNDED_ONCE, marks=pytest.mark.slow),
        (2, "bf16_stochastic_round=true", {"sharding_strategy": "SHARD_GRAD_OP"}, 1e-6, 1e-6),
        pytest.param(
            4, None, {"sharding_strategy": "HYBRID_SHARD"}, ROUNDED_ONCE, ROUNDED_ONCE, marks=pytest.mark.slow
        ),
    ],
    ids=["AdamW", "AdamW, offloaded", "lean AdamW", "HYBRID_SHARD"],
)
def test_gradients_of_bf16_weights_are_added_in_fp32(
    ranks: int, optim_args: str | None, fsdp: dict[str, Any], before: float, update: float, on_ranks: Ranks
) -> None:
    for found in on_ranks.run(ranks, functools.partial(sums, ranks, optim_args, **fsdp)):
        assert found["before"] < before
        assert found["update"] < update
        assert found["finite"]
