"""The read-back compares the experts that each rank holds, and the ranks that it exchanges tokens with, with
those of the recipe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_tune.recipe.fsdp_arguments import expected
from fsdp_tune.run.records import LiveState
from fsdp_tune.worker.readback.experts import (
    exchanging_ranks,
    expert_differences,
    group_size,
    inside_differences,
    own_experts,
)
from tests.model.recipes import recipe_of
from tests.ranks import Ranks

MODULE = "model.layers.0.mlp.experts"
STACKS = (f"{MODULE}.gate_up_proj", f"{MODULE}.down_proj")
RECIPE = recipe_of(
    {"from_config": {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 4}},
    4,
    fsdp={"ep_size": 2},
)


def model() -> Any:
    from fsdp_tune.model.loading.construct import build_empty
    from fsdp_tune.model.loading.model_config import config_or_facts

    return build_empty(RECIPE, config_or_facts(RECIPE)[0])


def report(part: list[int], ranks: list[int], modules: tuple[str, ...] = (MODULE,)) -> LiveState:
    return LiveState(own_experts=dict.fromkeys(STACKS, part), exchanging_ranks=dict.fromkeys(modules, ranks))


RIGHT = [report([0, 2], [0, 1]), report([2, 4], [0, 1]), report([0, 2], [2, 3]), report([2, 4], [2, 3])]


def found(reports: list[LiveState], bare: Any) -> list[str]:
    loaded: Any = SimpleNamespace(model=bare)
    return expert_differences(RECIPE, loaded, reports)


@pytest.fixture(scope="module")
def bare() -> Any:
    return model()


def test_ranks_with_their_parts_pass(bare: Any) -> None:
    assert found(RIGHT, bare) == []
    assert expected(RECIPE)["expert_group"] == 2


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (report([0, 2], [0, 1]), f"experts of `{STACKS[0]}`: rank 1 holds [0, 2], and its part is [2, 4]"),
        (
            report([2, 4], [1, 3]),
            f"experts of `{MODULE}`: rank 1 exchanges tokens with ranks [1, 3], and its group is [0, 1]",
        ),
        (
            report([2, 4], [0, 1], ()),
            f"experts of `{MODULE}`: rank 1 exchanges tokens with ranks None, and its group is [0, 1]",
        ),
        (
            LiveState(exchanging_ranks={MODULE: [0, 1]}),
            f"experts of `{STACKS[0]}`: rank 1 holds None, and its part is [2, 4]",
        ),
        (
            report([2, 4], [0, 1], (MODULE, "other")),
            "experts of `other`: rank 1 exchanges tokens with ranks [0, 1], and its group is None",
        ),
    ],
    ids=["part of another rank", "other group", "forward without exchange", "no stacks", "another module"],
)
def test_rank_that_differs_is_named(wrong: LiveState, sentence: str, bare: Any) -> None:
    assert found([RIGHT[0], wrong, *RIGHT[2:]], bare) == [sentence]


def test_dimension_of_a_stack_that_differs_is_named_once() -> None:
    live = LiveState(mesh=[4], sharded_inside=list(STACKS))
    loaded: Any = SimpleNamespace(model=nn.Module())
    with patch("fsdp_tune.worker.readback.experts.divided_experts", lambda *_: {}):
        [sentence] = inside_differences(RECIPE, loaded, live)
    assert sentence == (
        f"sharded_inside: the recipe means `{min(STACKS)}` to be sharded in its first dimension, the run has "
        "it in the second (and 1 more)"
    )


def test_run_that_divides_no_stack_is_reported() -> None:
    assert found([LiveState()], torch.nn.Linear(1, 1)) == [
        "experts: the recipe divides them, and the run has no divided stack"
    ]


def test_groups_of_different_sizes_are_in_the_report() -> None:
    found = group_size({MODULE: [0, 1], "other": [0, 1, 2, 3]})
    assert found == ["2", "4"]
    assert LiveState(expert_group=found).expert_group == found
    assert (group_size({MODULE: [0, 1]}), group_size({})) == (2, 1)


def live_states() -> tuple[Any, ...]:
    """On a rank: what is read with divided experts, and after another forward has replaced the one that
    exchanges tokens."""
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.shard.process_groups import make_mesh

    recipe = recipe_of("gpt_oss", dist.get_world_size(), fsdp={"ep_size": 2})
    wrapped: Any = wrap_whole(
        recipe, build_full(recipe), make_mesh(recipe, "cpu"), torch.device("cpu")
    ).wrapped
    before = exchanging_ranks(wrapped), own_experts(wrapped)
    with patch.object(
        experts := wrapped.get_submodule(MODULE), "forward", type(experts).forward.__get__(experts)
    ):
        return *before, exchanging_ranks(wrapped), own_experts(wrapped)


@pytest.mark.ranks
def test_forward_without_exchange_is_read_as_undivided(on_ranks: Ranks) -> None:
    for rank, (ranks, own, ranks_after, own_after) in enumerate(on_ranks.run(2, live_states)):
        assert ranks == {f"model.layers.{index}.mlp.experts": [0, 1] for index in range(2)}
        names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        assert own == {f"{module}.{name}": [2 * rank, 2 * rank + 2] for module in ranks for name in names}
        assert MODULE not in ranks_after
        assert f"{MODULE}.down_proj" not in own_after
