"""The load-balancing loss of a mixture excludes padding and is computed per example."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.mixtral import modeling_mixtral
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.collate import example_ids
from fsdp_tune.data.store import Row
from fsdp_tune.model.experts import require_known_balance, summed_balance
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.step import micro_batch_loss
from fsdp_tune.worker.rows.batches import Collator
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

BALANCED = {**FAMILIES["mixtral"], "output_router_logits": True}


def row(length: int, *lengths: int, seed: int = 0) -> Row:
    every = (length, *lengths)
    ids = np.random.default_rng(seed).integers(0, 257, sum(every)).astype(np.int32)
    return Row(ids, ids.copy(), every, seed)


def router_gradient(batches: list[list[Row | None]]) -> torch.Tensor:
    model = build_full(recipe_of({"from_config": BALANCED})).train()
    collator = Collator(pad_token_id=0, multiple_of=8, names_examples=True)
    for rows in batches:
        micro_batch_loss(model, collator(rows).tensors)[1].backward()
    return torch.cat(
        [p.grad.flatten() for name, p in model.named_parameters() if "gate." in name and p.grad is not None]
    )


@pytest.mark.parametrize(
    "batches",
    [
        [[row(64, seed=1)], [row(8, seed=2)]],
        [[row(8, seed=2), row(64, seed=1)]],
        [[row(64, seed=1)], [row(8, seed=2)], [None]],
    ],
    ids=["alone", "other order", "with a batch of padding"],
)
def test_router_gradient_does_not_depend_on_batching(batches: list[list[Row | None]]) -> None:
    together = router_gradient([[row(64, seed=1), row(8, seed=2)]])
    assert float((router_gradient(batches) - together).norm() / together.norm()) <= 1e-5


def test_balance_equals_transformers_function_per_example() -> None:
    rows = [row(5, 9), row(3)]
    width = 16
    ids, lengths = (torch.from_numpy(array) for array in example_ids(rows, width))
    logits = tuple(
        torch.randn(2 * width, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    )
    spans = [slice(0, 5), slice(5, 14), slice(width, width + 3)]
    wanted = sum(
        float(load_balancing_loss_func(tuple(each[span] for each in logits), 4, 2)) * (span.stop - span.start)
        for span in spans
    )
    assert float(summed_balance(logits, 4, 2, ids.reshape(-1), lengths)) == pytest.approx(wanted, rel=1e-6)


def test_padding_has_separate_example_id() -> None:
    ids, lengths = example_ids([row(2, 1), row(1)], 4)
    assert ids.tolist() == [[0, 0, 1, 3], [2, 3, 3, 3]]
    assert lengths.tolist() == [2, 1, 1]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_known_balance_loss_is_replaced(family: str) -> None:
    require_known_balance(
        build_empty(recipe_of({"from_config": {**FAMILIES[family], "output_router_logits": True}}))
    )


def test_unknown_balance_loss_is_refused() -> None:
    doge = {
        **{key: value for key, value in FAMILIES["llama"].items() if key != "model_type"},
        "model_type": "doge",
        "is_moe": True,
    }
    model = build_empty(recipe_of({"from_config": doge | {"output_router_logits": True}}))
    with pytest.raises(FsdpTuneError, match="DogeForCausalLM defines its load-balancing loss differently"):
        require_known_balance(model)


@pytest.mark.parametrize(
    "result", [None, 0, {"loss": 1.0}, (torch.ones(()), torch.ones(())), torch.ones((), dtype=torch.float64)]
)
def test_balance_loss_with_another_kind_of_result_is_refused(
    result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_empty(recipe_of({"from_config": BALANCED}))
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *_: result)
    with pytest.raises(FsdpTuneError, match="MixtralForCausalLM defines its load-balancing loss differently"):
        require_known_balance(model)


def test_balance_loss_in_double_precision_is_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_empty(recipe_of({"from_config": BALANCED}))
    known = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *args: known(*args).double())
    require_known_balance(model)
