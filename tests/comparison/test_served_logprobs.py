"""The factor of a server's logits over the model's, from log-probabilities alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fsdp_tune.answer.model_requests import ScoredTokens
from fsdp_tune.comparison.openai_server import ServedAnswer, ServedToken
from fsdp_tune.comparison.served_logprobs import scale_of

MODEL = [[-0.2, -1.9, -4.1], [-0.7, -1.0, -2.5]]


def position(logprobs: Sequence[float]) -> ServedToken:
    return ServedToken(None, "", logprobs[0], tuple(ServedToken(None, "", each) for each in logprobs))


def scale(server: Sequence[Sequence[float]], model: Sequence[Sequence[float | None]]) -> float | None:
    answer = ServedAnswer("", "stop", None, tuple(map(position, server)))
    return scale_of([(answer, ScoredTokens([], [], [], [], [], [], [list(each) for each in model], [], []))])


def scaled(factor: float) -> list[list[float]]:
    """The model's log-probabilities with logits of another scale, and another constant at each position."""
    return [[factor * each - at for each in logprobs] for at, logprobs in enumerate(MODEL)]


@pytest.mark.parametrize("factor", [2.0, 0.7])
def test_factor_is_that_of_the_server_over_the_model(factor: float) -> None:
    assert scale(scaled(factor), MODEL) == factor
    assert scale(scaled(1.0), MODEL) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("absent", [None, -math.inf, math.nan])
def test_token_without_a_probability_is_left_out(absent: float | None) -> None:
    server = scaled(2.0)
    assert scale(server, [[*MODEL[0][:2], absent], MODEL[1]]) == 2.0
    if absent is not None:
        server[0][2] = absent
        assert scale(server, MODEL) == 2.0
