"""Causes that no small server shows: answers whose log-probabilities are partly or wholly unknown."""

from __future__ import annotations

from dataclasses import replace
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


def test_answer_without_log_probabilities_does_not_show_that_stop_tokens_differ() -> None:
    reference = ReferenceAnswer([1], "", None, None, {}, "four", [4], [1.0], is_ended=True)
    answer = ServedAnswer(text="four", finish_reason="length", prompt_tokens=1, tokens=(), prompt=())
    exchange = Exchange("prompt 1", "", None, reference, ServedPrompt(None, None), answer, score=None)
    special = ReferenceTokens(None, None, "</s>", {"2": "</s>"})
    stages = [ComparedStage(name, "", "not_compared") for name in ("same_tokens", "logprobs")]
    unscored = ScoredTokens([], [], [], [2], ["</s>"], [-0.1], [], [], [])
    for score in (None, unscored):
        cause = served_cause(
            [replace(exchange, score=score)], special, stages, 0.05, None, lambda ids: str(ids)
        )
        assert cause.text.startswith("stop tokens: the server does not end its answers"), cause
        assert not cause.is_shown
