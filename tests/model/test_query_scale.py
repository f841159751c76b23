"""Llama 4's scale of queries follows positions on packed rows and on rows that ranks share, as for one
example alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.model.internals.transformers_internals import attention_of
from fsdp_tune.model.packed_documents import packing_known
from fsdp_tune.model.query_scale import scale_queries_by_position
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.process_groups import join_groups
from fsdp_tune.model.step import model_inputs
from tests.model.families import FAMILIES
from tests.model.test_packing import LLAMA4
from tests.ranks import Ranks

LENGTHS = ((9, 13, 2), (24,))
SCALED = "model.layers.1.self_attn"


def model_of(fields: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(
        fields["model_type"], **{name: value for name, value in fields.items() if name != "model_type"}
    )
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def llama4() -> Any:
    """Examples are longer than chunks of attention and than the tokens up to which queries are not scaled."""
    return model_of(
        LLAMA4
        | {
            "floor_scale": 4,
            "attention_chunk_size": 6,
            "layer_types": ["chunked_attention", "full_attention"],
        }
    )


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logits.shape[-1]).sin()
    return (logits.log_softmax(-1) @ weights).sum()


def gradients(model: Any) -> torch.Tensor:
    found = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )
    model.zero_grad()
    return found


def deviations_of_packed(model: Any) -> tuple[float, float]:
    """Return how far logits and gradients of packed rows are from those of transformers for one example at a
    time, relative."""
    alone = llama4()
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    with packing_known(positions, attention_of(model.config)):
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss_of(packed).backward()
    furthest = 0.0
    for row, lengths in enumerate(LENGTHS):
        for start, length in zip((0, *torch.tensor(lengths).cumsum(0).tolist()), lengths, strict=False):
            part = slice(start, start + length)
            logits = alone(input_ids=ids[row : row + 1, part], use_cache=False).logits
            loss_of(logits).backward()
            furthest = max(
                furthest, float((logits[0] - packed[row, part]).detach().norm() / logits.detach().norm())
            )
    expected = gradients(alone)
    return furthest, float((gradients(model) - expected).norm() / expected.norm())


def test_packed_examples_are_scaled_as_alone() -> None:
    model = llama4()
    assert scale_queries_by_position(model) == [SCALED]
    assert max(deviations_of_packed(model)) <= 1e-5


def test_packed_examples_differ_without_it() -> None:
    assert min(deviations_of_packed(llama4())) > 1e-3


def leave(_model: Any) -> None:
    """In place of `scale_queries_by_position`."""


def deviations_of_shared(change: Callable[[Any], object]) -> float:
    """On a rank: how far the logits of its tokens of a row are from those of one process."""
    model, alone = llama4(), llama4()
    change(model)
    join_groups(model, {"sequence": dist.group.WORLD})
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = alone(input_ids=ids, use_cache=False).logits
        with rows_known(model, batch := {"input_ids": ids, "labels": ids}):
            found = model(**model_inputs(batch), use_cache=False).logits
    own = expected.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return float((found - own).norm() / own.norm())


@pytest.mark.ranks
def test_ranks_that_share_a_row_scale_by_its_positions(on_ranks: Ranks) -> None:
    assert max(on_ranks.run(2, deviations_of_shared, scale_queries_by_position)) <= 1e-5
    assert max(on_ranks.run(2, deviations_of_shared, leave)) > 1e-3


@pytest.mark.parametrize(
    "fields", [FAMILIES["llama"], LLAMA4 | {"attn_temperature_tuning": False}], ids=["llama", "no scale"]
)
def test_other_attention_is_left(fields: dict[str, Any]) -> None:
    with torch.device("meta"):
        assert scale_queries_by_position(model_of(fields)) == []
