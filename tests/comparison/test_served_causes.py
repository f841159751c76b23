"""Causes that no small server shows: answers whose log-probabilities are partly or wholly unknown."""

from __future__ import annotations

from math import nan

import pytest

from fsdp_tune.answer.model_requests import ReferenceAnswer, ReferenceTokens, ScoredTokens
from fsdp_tune.comparison.exchanges import Exchange
from fsdp_tune.comparison.openai_server import ServedAnswer, ServedPrompt, ServedToken
from fsdp_tune.comparison.served_causes import served_cause
from fsdp_tune.comparison.stages import ComparedStage

OURS = [-0.1, -0.9, -0.3, -1.7, -0.2, -0.6, -0.4]


@pytest.mark.parametrize(
    ("theirs", "is_shifted"),
    [
        ([*OURS[1:], -2.0], True),
        ([nan, *OURS[2:], nan], True),
        ([*OURS[1:3], nan, nan, nan, nan, nan], False),
        ([nan] * 7, False),
    ],
)
def test_shift_is_shown_by_log_probabilities_that_are_known(theirs: list[float], is_shifted: bool) -> None:
    tokens = list(range(7))
    texts = [str(token) for token in tokens]
    top: list[list[float | None]] = [[None, None] for _ in tokens]
    score = ScoredTokens(
        tokens, texts, OURS, [*tokens, 0], [*texts, "0"], [*OURS, -0.1], top, ["a", "b"], [-1.0, -2.0]
    )
    answer = ServedAnswer(
        text="",
        finish_reason="length",
        prompt_tokens=3,
        tokens=tuple(
            ServedToken(token, str(token), logprob) for token, logprob in zip(tokens, theirs, strict=True)
        ),
        prompt=tuple(ServedToken(token, "", logprob) for token, logprob in enumerate((nan, -2.0, -4.0))),
    )
    reference = ReferenceAnswer([1, 2, 3], "", None, None, {}, "", [], [], is_ended=False)
    exchange = Exchange("prompt 1", "", None, reference, ServedPrompt(None, None), answer, score=score)
    special = ReferenceTokens(None, None, "</s>", {})
    stages = [ComparedStage("same_tokens", "", "not_compared"), ComparedStage("logprobs", "", "different")]
    cause = served_cause([exchange], special, stages, 0.05, None, lambda ids: str(ids))
    assert ("shifted by one position" in cause.text, cause.is_shown) == (is_shifted, is_shifted), cause


def test_end_of_answers_is_not_shown_by_a_server_without_log_probabilities() -> None:
    """A's answer ends with its text; the server's is cut at the same text, and may have no more tokens."""
    score = ScoredTokens([], [], [], [7], ["a"], [-0.1], [], [], [])
    answer = ServedAnswer("text", "length", 3, without_tokens="the server returns no log-probabilities")
    reference = ReferenceAnswer([1, 2, 3], "", None, None, {}, "text", [4, 4], [1.0, 1.0], is_ended=True)
    exchange = Exchange("prompt 1", "", None, reference, ServedPrompt(None, None), answer, score=score)
    special = ReferenceTokens(None, None, "</s>", {"2": "</s>"})
    stages = [ComparedStage(name, "", "not_compared") for name in ("same_tokens", "logprobs")]
    cause = served_cause([exchange], special, stages, 0.05, None, lambda ids: str(ids))
    assert (cause.text.startswith("stop tokens"), cause.is_shown) == (True, False)
