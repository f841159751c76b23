"""The lines of two runs: the first step that differs, each field by its own limit."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.comparison.runs import ComparedLines, Limits, compare_evaluations, compare_lines


def lines(losses: list[float], *, every: int = 1, **fields: Any) -> list[dict[str, Any]]:
    numbered = enumerate(losses, 1)
    return [
        {
            "step": every * number,
            "loss": loss,
            "grad_norm": 1.0,
            "supervised_tokens": 100 * every,
            "learning_rate": 1e-3,
            **fields,
        }
        for number, loss in numbered
    ]


def compared(
    a: list[dict[str, Any]], b: list[dict[str, Any]], *, every: tuple[int, int] = (1, 1), **limits: Any
) -> ComparedLines:
    return compare_lines(a, b, Limits("fp32", **{"can_round": False} | limits), every)


def test_first_step_beyond_the_limit_and_first_other_bits_are_named() -> None:
    found = compared(lines([3.0, 2.0, 1.0, 0.5]), lines([3.0, 2.0 + 1e-9, 1.1, 0.7]))
    assert found.first is not None
    assert found.first_bits is not None
    assert (found.first.step, found.first.field, found.first.a, found.first.b) == (3, "loss", 1.0, 1.1)
    assert (found.first_bits.step, found.first_bits.field) == (2, "loss")
    assert (found.stage.status, found.stage.places, found.stage.different_places) == ("different", 4, 2)


def test_equal_lines_are_equal_with_how_many_and_other_last_bits_are_named() -> None:
    found = compared(lines([1.0, 0.5]), lines([1.0, 0.5]))
    assert found.stage.detail is None
    assert found.evidence.startswith(
        "lines of metrics.jsonl, step by step: 2 of 2 of A and 2 of 2 of B (steps 1 to 2: trained tokens"
    )
    found = compared(lines([1.0]), lines([1.0 + 1e-9]))
    assert (found.stage.status, found.first) == ("equal", None)
    assert "step 1, loss" in (found.stage.detail or "")


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [
        ("supervised_tokens", 400_000, 400_300),
        ("tokens", 10**9, 10**9 + 1),
        ("learning_rate", 1e-3, 1e-3 * (1 + 2e-9)),
        ("skipped_steps", 1, 0),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_counts_and_computed_rates_have_no_tolerance_for_rounding(
    field: str, value: float, other: float, dtype: str
) -> None:
    found = compare_lines(
        lines([1.0], **{field: value}), lines([1.0], **{field: other}), Limits(dtype, can_round=True)
    )
    assert found.first is not None
    assert (found.first.field, found.stage.status) == (field, "different")


@pytest.mark.parametrize("value", [float("nan"), "nan", None])
def test_value_that_is_not_finite_differs(value: Any) -> None:
    found = compared(lines([1.0]), lines([1.0], loss=value))
    assert found.first is not None
    assert (found.first.b, found.stage.status) == (None, "different")
    assert found.stage.difference is not None
    assert found.stage.difference.b == "not finite"


def test_lines_of_other_intervals_are_joined() -> None:
    fine = [
        line | {"supervised_tokens": count}
        for line, count in zip(lines([4.0, 1.0, 2.0, 1.0, 3.0]), (10, 30, 20, 20, 7), strict=True)
    ]
    last = {"step": 5, "loss": 3.0, "grad_norm": 1.0, "supervised_tokens": 7, "learning_rate": 1e-3}
    coarse = [line | {"supervised_tokens": 40} for line in lines([1.75, 1.5], every=2)]
    found = compared(fine, [*coarse, last], every=(1, 2))
    assert (found.stage.status, found.stage.places, found.left_out) == ("equal", 3, ())
    coarse[1]["loss"] = 1.6
    found = compared(fine, [*coarse, last], every=(1, 2))
    assert found.first is not None
    assert (found.first.step, found.first.field) == (4, "loss")


def test_line_whose_predecessor_is_missing_is_not_taken_for_a_longer_one() -> None:
    whole, damaged = lines([4.0, 3.0, 2.0, 1.0]), lines([4.0, 3.0, 2.0, 1.0])[::2]
    found = compared(whole, damaged)
    assert (found.stage.status, found.stage.places) == ("equal", 2)
    assert "3 of 4 of A and 2 of 2 of B" in found.evidence
    assert found.left_out == (
        "lines of metrics.jsonl, step by step: 1 of 4 of A, at steps that B has none of",
    )


@pytest.mark.parametrize(
    ("a", "b"), [([], []), (lines([1.0]), []), (lines([1.0, 1.0], every=2), lines([1.0], every=3))]
)
def test_no_line_of_the_same_step_is_not_equal(a: list[Any], b: list[Any]) -> None:
    found = compared(a, b)
    assert (found.stage.status, found.evidence) == ("not_compared", "")


def test_lines_without_a_number_that_depends_on_the_weights_are_not_equal() -> None:
    bare = [{"step": 1, "tokens": 5, "learning_rate": 1e-3}]
    assert compared(bare, bare).stage.status == "not_compared"


def test_limit_follows_earlier_differences_only_if_the_runs_round_otherwise() -> None:
    grown = [1.0 + 1e-6 * 3**step for step in range(6)]
    a, b = lines([1.0] * 6), lines(grown)
    assert compared(a, b, can_round=True).stage.status == "equal"
    assert compared(a, b).stage.status == "different"
    assert (
        compared(
            a, lines([1.0 + 1e-6 * 3**step for step in range(9)] + [9.0])[:9], can_round=True
        ).stage.status
        == "equal"
    )
    assert (
        compared(
            lines([1.0] * 12), lines([1.0 + 1e-6 * 3**step for step in range(12)]), can_round=True
        ).stage.status
        == "different"
    )
    assert compared(a, lines([1.0] * 5 + [1.001]), can_round=True).stage.status == "different"


def test_given_tolerance_holds_for_all_lines_and_not_for_counts() -> None:
    assert compared(lines([1.0]), lines([1.0 + 1e-9]), given=0.0).stage.status == "different"
    assert compared(lines([1.0], tokens=10), lines([1.2], tokens=11), given=0.5).first is not None


def evaluations(losses: list[float], **fields: Any) -> list[dict[str, Any]]:
    return [
        {"step": 10 * number, "eval_loss": loss, "eval_seconds": number, **fields}
        for number, loss in enumerate(losses, 1)
    ]


def test_evaluations_are_compared_without_their_seconds() -> None:
    limits = Limits("fp32", can_round=False)
    found = compare_evaluations(evaluations([3.0, 2.0]), evaluations([3.0, 2.5], eval_seconds=0.1), limits)
    assert found.first is not None
    assert (found.first.step, found.first.field, found.stage.name) == (20, "eval_loss", "evaluations")
    found = compare_evaluations(
        evaluations([3.0], eval_code_loss=1.0), evaluations([3.0], eval_code_loss=1.5), limits
    )
    assert found.first is not None
    assert found.first.field == "eval_code_loss"
    assert (
        compare_evaluations(evaluations([3.0]), evaluations([3.0], eval_seconds=7.0), limits).stage.status
        == "equal"
    )
