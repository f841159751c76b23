"""Every supervised token of a step has the same weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.data.store import IGNORE_INDEX
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.step import (
    auxiliary_loss_weight,
    shift_labels,
    summed_token_loss,
    supervised_tokens,
)
from tests.model.recipes import recipe_of


def by_hand(logits: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Sum of −log softmax(logits at t−1)[label at t] over supervised t, in float64; and how many there
    are."""
    total, count = 0.0, 0
    for row, targets in zip(logits.astype(np.float64), labels, strict=True):
        for at in range(1, len(targets)):
            if targets[at] != IGNORE_INDEX:
                total += (
                    np.log(np.exp(row[at - 1] - row[at - 1].max()).sum())
                    + row[at - 1].max()
                    - row[at - 1][targets[at]]
                )
                count += 1
    return total, count


@given(
    st.integers(1, 4).flatmap(
        lambda rows: st.integers(1, 6).flatmap(
            lambda width: st.lists(
                st.lists(st.integers(-1, 4), min_size=width, max_size=width), min_size=rows, max_size=rows
            )
        )
    )
)
def test_summed_loss_equals_a_manual_sum(rows: list[list[int]]) -> None:
    labels = torch.tensor(rows)
    labels[labels < 0] = IGNORE_INDEX
    logits = torch.randn(*labels.shape, 5, generator=torch.Generator().manual_seed(0))
    total, count = by_hand(logits.numpy(), labels.numpy())
    assert float(summed_token_loss(logits, shift_labels(labels))) == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert int(supervised_tokens(labels)) == count


def test_dft_weights_each_token_by_its_probability_without_a_gradient_through_it() -> None:
    """-p log p, with the gradient p (softmax - one-hot) that a constant p gives, in a plain loop in float64
    (arXiv:2508.05629, eq. 9)."""
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([[1, 2, IGNORE_INDEX, 3, 4], [IGNORE_INDEX, IGNORE_INDEX, 5, 6, 0]])
    loss = summed_token_loss(logits, shift_labels(labels), dft=True)
    loss.backward()
    total, gradient = 0.0, np.zeros(logits.shape)
    for row, targets in enumerate(labels.numpy()):
        for at in range(1, len(targets)):
            if targets[at] != IGNORE_INDEX:
                exponents = np.exp(logits[row, at - 1].detach().double().numpy())
                probabilities = exponents / exponents.sum()
                p = probabilities[targets[at]]
                total -= p * np.log(p)
                gradient[row, at - 1] = p * (probabilities - np.eye(7)[targets[at]])
    assert float(loss.detach()) == pytest.approx(total, rel=1e-6)
    assert logits.grad is not None
    assert np.allclose(logits.grad.numpy(), gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dft", [False, True])
def test_no_supervised_token_gives_zero_loss_and_gradient(dft: bool) -> None:
    logits = torch.randn(2, 5, 7, requires_grad=True)
    loss = summed_token_loss(logits, torch.full((2, 5), IGNORE_INDEX), dft=dft)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_loss_of_low_precision_logits_is_computed_in_fp32() -> None:
    logits = torch.randn(1, 50, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.randint(0, 300, (1, 50), generator=torch.Generator().manual_seed(1))
    loss = summed_token_loss(logits, shift_labels(labels))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(by_hand(logits.float().numpy(), labels.numpy())[0], rel=1e-6)


def test_targets_are_the_next_token_and_the_last_has_none() -> None:
    assert shift_labels(torch.tensor([[7, 8, IGNORE_INDEX, 9]])).tolist() == [
        [8, IGNORE_INDEX, 9, IGNORE_INDEX]
    ]


@pytest.mark.parametrize(
    ("overrides", "weight"), [({}, 0.0), ({"output_router_logits": True, "router_aux_loss_coef": 0.02}, 0.02)]
)
def test_router_balance_counts_only_if_the_config_enables_it(overrides: dict, weight: float) -> None:
    from tests.model.families import FAMILIES

    recipe = recipe_of({"from_config": FAMILIES["mixtral"], "config_overrides": overrides})
    assert auxiliary_loss_weight(build_full(recipe)) == weight
