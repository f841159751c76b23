"""Two observations are compared stage by stage: the first place that differs, and what cannot be compared."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fsdp_tune.comparison.both_sides import rounding_of_summary, summary
from fsdp_tune.comparison.stages import (
    STAGES,
    Observation,
    StageFacts,
    compare_observations,
    compare_stage,
    stages_until,
)

TEXTS = {"1": "one", "2": " two", "3": " three"}
NAMES = {"0:1:1": "example 0 (rows.jsonl:1)", "0:2:1": "example 1 (rows.jsonl:2)"}


def observed(**stages: dict[str, Any] | StageFacts) -> Observation:
    facts = {
        name: each if isinstance(each, StageFacts) else StageFacts(each) for name, each in stages.items()
    }
    return Observation(facts, NAMES, TEXTS, {}, ())


def found(name: str, a: Observation, b: Observation) -> tuple[str, str, str]:
    stage = compare_stage(name, a, b)
    assert stage.status == "different"
    assert stage.difference is not None
    return stage.difference.place, stage.difference.a, stage.difference.b


def test_first_other_token_is_named_with_its_text() -> None:
    a, b = (
        observed(tokens={"0:1:1": [1, 2], "0:2:1": [1, 2]}),
        observed(tokens={"0:1:1": [1, 2], "0:2:1": [1, 3]}),
    )
    assert found("tokens", a, b) == ("example 1 (rows.jsonl:2), token 1", "' two' (id 2)", "' three' (id 3)")
    stage = compare_stage("tokens", a, b)
    assert (stage.places, stage.different_places) == (2, 1)


def test_example_that_ends_earlier_or_is_missing_differs() -> None:
    a = observed(tokens={"0:1:1": [1, 2]})
    assert found("tokens", a, observed(tokens={"0:1:1": [1]}))[1:] == (
        "' two' (id 2)",
        "has ended after 1 tokens",
    )
    both = observed(tokens={"0:1:1": [1, 2], "0:2:1": [1]})
    assert compare_stage("tokens", a, both).places == 2
    assert found("tokens", a, both) == ("example 1 (rows.jsonl:2)", "is not there", "is there")


def test_values_of_an_assumption_are_not_compared_with_others() -> None:
    rate, assumed = StageFacts({"step 1": 0.1}), StageFacts({"step 1": 0.2}, assumed="epochs of 1,000 steps")
    stage = compare_stage("rate", observed(rate=rate), observed(rate=assumed))
    assert (stage.status, stage.detail) == ("not_compared", "B: epochs of 1,000 steps")
    assert compare_stage("rate", observed(rate=assumed), observed(rate=assumed)).status == "equal"


def test_labels_are_compared_where_the_tokens_are_equal() -> None:
    tokens = {"0:1:1": [1, 2], "0:2:1": [1, 3]}
    a = observed(tokens=tokens, labels={"0:1:1": [0, 1], "0:2:1": [0, 1]})
    b = observed(tokens=tokens | {"0:1:1": [1]}, labels={"0:1:1": [0], "0:2:1": [0, 0]})
    place, first, second = found("labels", a, b)
    assert place == "example 1 (rows.jsonl:2), token 1 ' three'"
    assert first.startswith("is trained (1 of 2")
    assert second.startswith("is not trained (0 of 2")
    assert compare_stage("labels", a, b).places == 1


def test_no_shared_example_is_not_called_equal() -> None:
    a = observed(tokens={"0:1:1": [1]}, labels={"0:1:1": [0]})
    b = observed(tokens={"0:1:1": [2]}, labels={"0:1:1": [0]})
    assert compare_stage("labels", a, b).status == "not_compared"


@pytest.mark.parametrize(
    ("other", "status"),
    [(1.0 + 5e-7, "equal"), (1.0 + 5e-6, "different"), (math.nan, "different"), (1.0, "equal")],
)
def test_numbers_differ_beyond_the_tolerance_and_last_bits_are_named(other: float, status: str) -> None:
    stage = compare_stage("loss", observed(loss={"step 1": 1.0}), observed(loss={"step 1": other}))
    assert stage.status == status
    assert (stage.detail is not None) == (status == "equal" and other != 1.0)


@pytest.mark.parametrize(
    ("rounding", "status"),
    [([0.0], "different"), ([1e-9, 1e-4], "equal"), ([1e-4, 1e-9], "different")],
)
def test_numbers_that_were_stored_in_between_may_differ_by_that(rounding: list[float], status: str) -> None:
    """Unless the user says by how much."""
    a, b = observed(update={"w": [0.5, 0.1]}), observed(update={"w": [0.5, 0.10009]})
    rounded = StageFacts({"w": [0.5, 0.1]}, rounding={"w": rounding})
    for one, other in ((observed(update=rounded), b), (b, observed(update=rounded))):
        stage = compare_stage("update", one, other)
        assert (stage.status, stage.detail is not None) == (status, status == "equal")
        [exact] = compare_observations(one, other, 0.0, grows=False)
        assert exact.status == "different"
    assert compare_stage("update", a, b).status == "different"


def test_rounding_of_a_summary_holds_that_of_stored_parameters() -> None:
    """And is at most ten times as much."""
    generator, changes = torch.Generator().manual_seed(0), []
    for size in (64, 4096):
        weight = torch.randn(size, generator=generator, dtype=torch.float64).add(1.0)
        change = torch.randn(size, generator=generator, dtype=torch.float64).mul(1e-5)
        stored = (weight.float().double() + change).float().double() - weight.float().double()
        off = [abs(x - y) for x, y in zip(summary(stored), summary(change), strict=True)]
        limits = rounding_of_summary(weight)
        changes += [error / limit for error, limit in zip(off, limits, strict=True)]
    assert 0.1 < max(changes) < 1.0


def test_nan_and_infinity_on_both_sides_are_equal_and_no_number_hides_behind_them() -> None:
    a = observed(update={"w": [math.nan, 1.0], "v": [math.inf, 1.0]})
    assert compare_stage("update", a, a).status == "equal"
    assert found("update", a, observed(update={"w": [math.nan, 2.0], "v": [math.inf, 1.0]})) == (
        "w",
        "1",
        "2",
    )
    assert (
        compare_stage("update", a, observed(update={"w": [math.nan, 1.0], "v": [1.0, 1.0]})).status
        == "different"
    )


def test_values_of_another_shape_differ() -> None:
    assert found(
        "logits", observed(logits={"r": [[1.0, 2.0]]}), observed(logits={"r": [[1.0, 2.0], [1.0, 2.0]]})
    )[1:] == (
        "1 × 2 values",
        "2 × 2 values",
    )
    assert (
        found(
            "logits",
            observed(logits={"r": [[1.0, 2.0], [1.0, 2.0]]}),
            observed(logits={"r": [[1.0, 2.0], [1.0, 3.0]]}),
        )[0]
        == "r, token 1"
    )


def test_row_of_other_examples_and_another_order_differ() -> None:
    a = observed(rows={"row 0": [["0:1:1", 0, 5], ["0:2:1", 0, 3]]}, order={"step 1": ["0:1:1", "0:2:1"]})
    b = observed(rows={"row 0": [["0:1:1", 0, 4]]}, order={"step 1": ["0:2:1"]})
    assert found("rows", a, b)[1] == "example 0 (rows.jsonl:1): 5 tokens, example 1 (rows.jsonl:2): 3 tokens"
    assert found("order", a, b) == (
        "step 1, row 1",
        "reads example 0 (rows.jsonl:1)",
        "reads example 1 (rows.jsonl:2)",
    )


def test_reason_of_one_side_is_kept_and_never_equal() -> None:
    a, b = observed(logits={"r": [[1.0]]}), observed(logits=StageFacts(reason="the hub cannot be reached"))
    stage = compare_stage("logits", a, b)
    assert (stage.status, stage.detail) == ("not_compared", "B: the hub cannot be reached")
    assert compare_stage("logits", b, b).detail == "the hub cannot be reached"
    assert [each.status for each in compare_observations(a, observed())] == ["not_compared"]


def test_stages_depend_on_all_before_them() -> None:
    assert list(stages_until("labels")) == ["tokens", "labels"]
    assert list(stages_until("update")) == list(STAGES)
