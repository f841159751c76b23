"""`fsdp.reshard_after_backward: false`: the same bits with fewer gathers, and nothing stays gathered after a
step."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.ranks import Ranks

STEPS, MICRO_BATCHES = 2, 3


def trained(ranks: int, *, as_last: bool = True, **sections: dict[str, Any]) -> dict[str, Any]:
    """On a rank: losses, norms and parameters of a few steps with an evaluation after each, gathered units,
    and gathers of the steps.

    `as_last=False` plants a bug: the last micro-batch is treated as one between.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.optim.optimizer import build_optimizer
    from fsdp_tune.model.shard.gathered import gathered_units, outside_step, units_of
    from fsdp_tune.model.shard.process_groups import make_mesh
    from fsdp_tune.model.shard.wrap import begin_micro_batch
    from fsdp_tune.model.step import forward_backward, micro_batch_loss, total_norm

    training = {"gradient_accumulation_steps": MICRO_BATCHES, "learning_rate": 1e-2}
    model = {"from_config": FAMILIES["llama"], **sections.pop("model", {})}
    recipe = recipe_of(model, ranks, training=training, **sections)
    torch.manual_seed(1)
    loaded = wrap_whole(recipe, build_full(recipe), make_mesh(recipe, "cpu"), torch.device("cpu"))
    wrapped: Any = loaded.wrapped
    optimizer = build_optimizer(recipe, wrapped, loaded.size.decayed)
    generator = torch.Generator().manual_seed(dist.get_rank())
    gathers, original = 0, _fsdp_param_group.foreach_all_gather
    numbers: list[float] = []
    gathered: list[str] = []

    def count(*arguments: Any, **options: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return original(*arguments, **options)

    for _ in range(STEPS):
        for index in range(MICRO_BATCHES):
            wrapped.set_requires_gradient_sync(recipe.fsdp.sync_each_batch or index == MICRO_BATCHES - 1)
            begin_micro_batch(recipe, wrapped, is_last=as_last and index == MICRO_BATCHES - 1)
            ids = torch.randint(0, 60, (1, 12), generator=generator) % loaded.model.config.vocab_size
            with patch.object(_fsdp_param_group, "foreach_all_gather", count):
                numbers.append(
                    float(forward_backward(recipe, wrapped, {"input_ids": ids, "labels": ids}, 1 / 44)[1])
                )
        gathered += gathered_units(units_of(wrapped))
        numbers.append(float(total_norm(p for p in wrapped.parameters() if p.requires_grad)))
        optimizer.step()
        optimizer.zero_grad()
        with outside_step(wrapped, torch.device("cpu")):
            numbers.append(float(micro_batch_loss(wrapped, {"input_ids": ids, "labels": ids})[0]))
    parameters = torch.cat([p.to_local().reshape(-1) for p in wrapped.parameters()])
    return {"numbers": numbers, "parameters": parameters.tolist(), "gathered": gathered, "gathers": gathers}


def compared(
    ranks: int, cases: list[dict[str, Any]]
) -> tuple[list[tuple[dict[str, Any], ...]], dict[str, Any]]:
    """On a rank: each case with parameters that are freed and with parameters that are kept; and the first
    case with the bug."""
    found = [
        tuple(
            trained(ranks, **case | {"fsdp": case["fsdp"] | {"reshard_after_backward": each}})
            for each in (True, False)
        )
        for case in cases
    ]
    return found, trained(ranks, as_last=False, fsdp={"reshard_after_backward": False})


ON_TWO: list[dict[str, Any]] = [
    {"fsdp": {}},
    {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": "full"}},
    {
        "fsdp": {"sync_each_batch": False, "forward_prefetch": 1, "backward_prefetch": 2},
        "precision": {"mixed_precision": "bf16"},
        "model": {"freeze": ["model.embed_tokens.*", "model.layers.0.*"]},
    },
]
ON_FOUR: list[dict[str, Any]] = [
    {"fsdp": {"sharding_strategy": "HYBRID_SHARD"}},
    {"fsdp": {"reshard_after_forward": 2}},
]


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.slow)])
def test_parameters_that_stay_gathered_change_no_bit(
    ranks: int, cases: list[dict[str, Any]], on_ranks: Ranks
) -> None:
    for found, planted in on_ranks.run(ranks, functools.partial(compared, ranks, cases)):
        for freed, kept in found:
            assert kept["numbers"] == freed["numbers"]
            assert kept["parameters"] == freed["parameters"]
            assert kept["gathered"] == freed["gathered"] == []
            assert kept["gathers"] < freed["gathers"]
        if ranks == 2:
            check_gathers(*found[:2])
            assert "model.layers.0" in planted["gathered"]
            assert planted["numbers"] != found[0][1]["numbers"], "the next step computes with old weights"


def check_gathers(of_full: tuple[dict[str, Any], ...], of_grad_op: tuple[dict[str, Any], ...]) -> None:
    """Under SHARD_GRAD_OP a step gathers each unit once; under FULL_SHARD the backward of each micro-batch
    gathers the layers again."""
    in_full, in_grad_op = ([each["gathers"] // STEPS for each in pair] for pair in (of_full, of_grad_op))
    assert in_grad_op[0] == MICRO_BATCHES * in_grad_op[1]
    units = in_grad_op[1]
    layers = in_full[0] // MICRO_BATCHES - units
    assert 0 < layers < units
    assert in_full[1] == units + MICRO_BATCHES * layers
