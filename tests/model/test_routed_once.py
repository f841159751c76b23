"""A recomputed layer sends tokens to the experts that its forward chose, and keeps nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.shard.routed_once import RoutedOnce
from tests.model.families import COMMON
from tests.model.recipes import recipe_of

PHIMOE = COMMON | {"model_type": "phimoe", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
"""Its router chooses by two maxima."""
KEYS = 1000


class _Layer(nn.Module):
    """A router whose scores differ from call to call in the last place, between two experts of equal score, after another `topk`."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.calls, self.chosen, self.routes, self.made, self._call = 0, [], [], 0, call

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        keys = torch.topk(torch.arange(2 * KEYS) * hidden.detach(), KEYS).indices  # such as those that sparse attention chooses
        scores = torch.ones(3, 4) * hidden.sum()
        scores = scores + torch.eye(4)[self.calls % 4] * 1e-6
        values, indices = self._call(scores)
        self.chosen.append(indices)
        if (once := RoutedOnce.entered) is not None:
            self.routes.append(once.route(indices.to(torch.int32), values, self._make))
        values /= values.sum()  # in place, as in several routers
        return (values * indices * hidden).sum() + keys.sum() * hidden

    def _make(self) -> object:
        self.made += 1
        return object()


CALLS = [lambda scores: torch.topk(scores, k=2, dim=-1), lambda scores: scores.topk(2)]


@pytest.mark.parametrize("call", CALLS, ids=["function", "method"])
def test_recomputed_layer_chooses_what_its_forward_chose(call: Any) -> None:
    for routes_once in (True, False):
        layer, hidden = _Layer(call), torch.tensor(2.0, requires_grad=True)
        options: dict[str, Any] = {"context_fn": RoutedOnce("layer").contexts} if routes_once else {}
        checkpoint(layer, hidden, use_reentrant=False, **options).backward()
        first, again = layer.chosen
        assert torch.equal(first, again) is routes_once
    assert RoutedOnce.entered is None


def test_recomputed_layer_chooses_the_groups_that_its_forward_chose() -> None:
    """Of two groups of equal score; the experts of the other one have no score, as in DeepSeek-V2's router."""
    scores_at_choice: list[torch.Tensor] = []

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        groups = torch.ones(3, 2) + torch.eye(2)[len(scores_at_choice) % 2] * 1e-6
        mask = torch.zeros(3, 2).scatter_(1, groups.topk(1).indices, 1.0).repeat_interleave(2, 1)
        scores, indices = torch.topk((torch.ones(3, 4) * hidden).masked_fill(mask == 0, 0.0), 2)
        scores_at_choice.append(scores.detach())
        assert RoutedOnce.entered is not None
        RoutedOnce.entered.route(indices, scores, object)
        return (scores * hidden).sum()

    hidden = torch.tensor(2.0, requires_grad=True)
    checkpoint(layer, hidden, use_reentrant=False, context_fn=RoutedOnce("layer").contexts).backward()
    assert [each.unique().tolist() for each in scores_at_choice] == [[2.0], [2.0]]


def test_recomputed_layer_sends_by_the_route_of_its_forward() -> None:
    layer, hidden = _Layer(CALLS[0]), torch.tensor(2.0, requires_grad=True)
    checkpoint(layer, hidden, use_reentrant=False, context_fn=RoutedOnce("layer").contexts).backward()
    assert layer.routes[0] is layer.routes[1]
    assert layer.made == 1


def test_choice_of_experts_alone_is_kept() -> None:
    once, layer = RoutedOnce("layer"), _Layer(CALLS[0])
    with once.contexts()[0]:
        layer(torch.tensor(2.0, requires_grad=True))
    assert [each.numel() for each in (*once._kept.values(), *once.chosen)] == [3 * 2]


def test_class_without_an_expert_is_a_choice_of_weight_zero() -> None:
    """ZAYA's router writes index 0 with weight 0 where `topk` chooses its last class."""
    routed: list[torch.Tensor] = []

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.eye(4)[[2, 3, len(routed) % 2 + 2]] * hidden  # the third token changes from 2 to the class without an expert
        weights, indices = scores.topk(1)
        skips = indices == 3
        weights, indices = weights.masked_fill(skips, 0.0), indices.masked_fill(skips, 0)
        routed.append(indices)
        assert RoutedOnce.entered is not None
        RoutedOnce.entered.route(indices, weights, object)
        return (weights * hidden).sum()

    hidden = torch.tensor(2.0, requires_grad=True)
    checkpoint(layer, hidden, use_reentrant=False, context_fn=RoutedOnce("layer").contexts).backward()
    assert [each.flatten().tolist() for each in routed] == [[2, 0, 2]] * 2


def test_experts_of_a_table_are_a_choice() -> None:
    """DeepSeek V4's first layers look the experts of a token up by its id."""
    table, token_ids = torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.tensor([2, 0, 2])
    routed: list[torch.Tensor] = []

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        routed.append(indices := table[token_ids])
        weights = (torch.ones(3, 4) * hidden).gather(1, indices)
        assert RoutedOnce.entered is not None
        RoutedOnce.entered.route(indices, weights, object)
        return (weights * hidden).sum()

    hidden = torch.tensor(2.0, requires_grad=True)
    checkpoint(layer, hidden, use_reentrant=False, context_fn=RoutedOnce("layer").contexts).backward()
    assert [each.tolist() for each in routed] == [[[1, 2], [0, 1], [1, 2]]] * 2
    assert hidden.grad == 6 * 2 * 2.0


@pytest.mark.parametrize("indices", [torch.tensor([[0, 1]]), torch.tensor([[1, 3], [0, 2], [1, 2]])], ids=["other shape", "other experts"])
def test_experts_that_no_topk_chose_are_refused(indices: torch.Tensor) -> None:
    """Although the layer calls `topk` for something else."""

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        torch.topk(torch.arange(12.0).view(3, 4), 2)
        assert RoutedOnce.entered is not None
        RoutedOnce.entered.route(indices, torch.ones(indices.shape), object)
        return hidden.sin()

    with pytest.raises(FsdpTuneError, match=r"`layer` chooses experts without `torch\.topk`"):
        checkpoint(layer, torch.zeros(2, requires_grad=True), use_reentrant=False, context_fn=RoutedOnce("layer").contexts)
    assert RoutedOnce.entered is None


@pytest.mark.parametrize("recomputation", ["full", "none"])
def test_model_whose_router_has_no_topk_is_refused_without_its_weights(recomputation: str) -> None:
    """By `validate`: its layers could not be recomputed. Without recomputation it is taken."""
    recipe = recipe_of({"from_config": PHIMOE}, 2, fsdp={"ep_size": 2, "activation_checkpointing": recomputation})
    found = [(problem.code, "no `torch.topk` chooses" in problem.message) for problem in find_facts(recipe).problems]
    assert found == ([("experts-not-divisible", True)] if recomputation == "full" else [])
