"""Shared rows where the attention modules themselves are FSDP units."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.ranks import Ranks

_MODEL = {"from_config": FAMILIES["llama"]}


def loss_with_attention_units() -> float:
    """On a rank: the loss of a step whose attention is transformers' eager function of the model's module."""
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.shard.process_groups import join_groups, make_mesh
    from fsdp_tune.model.step import forward_backward

    recipe = recipe_of(
        {**_MODEL, "attn_implementation": "eager"},
        dist.get_world_size(),
        fsdp={"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": ["model.layers.*.self_attn"]},
        parallelism={"sp_size": 2},
    )
    torch.manual_seed(1)
    model = build_full(recipe)
    join_groups(model, {"sequence": dist.group.WORLD})
    wrapped = wrap_whole(recipe, model, make_mesh(recipe, "cpu"), torch.device("cpu")).wrapped.train()
    ids = torch.randint(0, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    _, loss = forward_backward(recipe, wrapped, {"input_ids": ids, "labels": ids}, 1 / 11)
    dist.all_reduce(loss)
    return float(loss)


@pytest.mark.ranks
def test_eager_attention_of_a_module_that_is_a_unit_is_found(on_ranks: Ranks) -> None:
    """FSDP2 replaces the class of a unit by one that torch's module defines."""
    assert len(set(on_ranks.run(2, loss_with_attention_units))) == 1
