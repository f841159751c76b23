"""How far the log-probabilities of a server are from those of the model, token by token, and whether one
scale of the logits explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdp_tune.answer.model_requests import ScoredTokens
from fsdp_tune.comparison.openai_server import ServedAnswer

TOLERANCE = 0.02
"""Mean difference of log-probabilities that counts as none: what half precision moves the tokens of a greedy
answer by."""
UNCERTAIN, LEAST_UNCERTAIN = -0.1, 4
"""Log-probability below which half precision shows, and the fewest such tokens that show it."""
IN_FP32, MOST_IN_FP32 = 1e-5, 1e-3
"""Median difference in which two programs that compute in fp32 agree, and how far one token may be off
then."""
FAR = 0.5
"""Mean difference beyond which no dtype is the reason."""
ROUNDED = 2.0
"""Times what the model itself moves in the server's dtype: two programs round in other places."""
OF_ONE_TOKEN = 20.0
"""Times the tolerance: the same of a single token."""
LEAST_SCALE, LEAST_EXPLAINED = 0.02, 0.9
"""A scale of the logits is named if it is further from 1 than this, and explains this share of the squared
differences."""


@dataclass(frozen=True, slots=True)
class LogprobDifferences:
    """The server's log-probabilities minus the model's, float64 [tokens]; NaN where the server has none."""

    values: npt.NDArray[np.float64]
    texts: Sequence[str]
    ours: Sequence[float]
    theirs: Sequence[float]
    of_prompt: int = 0
    """The first values are those of the prompt's tokens."""
    rounding: npt.NDArray[np.float64] | None = None
    """By how much the model itself differs in the server's dtype, float64 [tokens]."""

    @property
    def known(self) -> npt.NDArray[np.float64]:
        return np.abs(self.values[~np.isnan(self.values)])

    def _is_in_fp32(self) -> bool:
        """Return whether most tokens are as near as in fp32: then a token that is not is no rounding."""
        off = self.known[np.array(self.ours)[~np.isnan(self.values)] < UNCERTAIN]
        return len(off) >= LEAST_UNCERTAIN and float(np.median(off)) < IN_FP32

    def parts(self) -> list[slice]:
        """Return the tokens of the prompt, which may be improbable, and those of the answer, which are mostly
        probable."""
        return [
            part for part in (slice(0, self.of_prompt), slice(self.of_prompt, None)) if len(self.values[part])
        ]

    def first(self, tolerance: float) -> int | None:
        """Return the first token that is too far off; None if all are close.

        The limit of a part is the tolerance, or twice what the model itself moves in the server's dtype if
        that is more.
        """
        for part in self.parts():
            off = np.nan_to_num(np.abs(self.values[part]))
            known = off[~np.isnan(self.values[part])]
            mean, one = tolerance, OF_ONE_TOKEN * tolerance
            if self._is_in_fp32():
                one = min(one, MOST_IN_FP32)
            elif self.rounding is not None:
                mean, one = (
                    max(mean, ROUNDED * self.rounding[part].mean()),
                    max(one, ROUNDED * self.rounding[part].max()),
                )
            if len(known) and (known.mean() > mean or known.max() > one):
                return int(np.argmax(off > (one if known.max() > one else mean))) + (part.start or 0)
        return None


def logprob_differences(
    answer: ServedAnswer | None, score: ScoredTokens | None, half: ScoredTokens | None = None
) -> LogprobDifferences | None:
    """Return the differences of the tokens that were identified; None if there are none. `half`: the score in
    the server's dtype."""
    if answer is None or score is None:
        return None
    theirs = [each.logprob for each in (*answer.prompt[1:], *answer.tokens[: len(score.tokens)])]
    ours = _values(answer, score)
    if not theirs:
        return None
    texts = [*(score.prompt_texts if answer.prompt else ()), *score.texts]
    rounding = (
        np.abs(np.array(_values(answer, half), np.float64) - np.array(ours, np.float64))
        if half is not None
        else None
    )
    values = np.array(theirs, np.float64) - np.array(ours, np.float64)
    return LogprobDifferences(values, texts, ours, theirs, max(len(answer.prompt) - 1, 0), rounding)


def _values(answer: ServedAnswer, score: ScoredTokens) -> list[float]:
    return [*(score.prompt if answer.prompt else ()), *score.logprobs]


def scale_of(pairs: Sequence[tuple[ServedAnswer, ScoredTokens | None]]) -> float | None:
    """Return the factor of the server's logits over the model's; None if no factor other than 1 explains how
    they differ.

    Least squares over the most probable tokens of each position, whose log-probabilities are logits up to a
    constant of the position.
    """
    positions: list[npt.NDArray[np.float64]] = []  # [2, tokens] of each: model and server
    for answer, score in pairs:
        for token, own in zip(answer.tokens, score.top if score is not None else (), strict=False):
            logprobs = [
                (each, other.logprob) for each, other in zip(own, token.top, strict=False) if each is not None
            ]
            finite = [both for both in logprobs if all(map(math.isfinite, both))]
            if len(finite) > 1:
                values = np.array(finite, np.float64).T
                positions.append(values - values.mean(axis=1, keepdims=True))
    if not positions:
        return None
    ours, theirs = np.concatenate(positions, axis=1)
    # A factor near 0 "explains" the differences of any two models.
    before = min(float(((theirs - ours) ** 2).sum()), float((theirs**2).sum()))
    if not (float((ours**2).sum()) > 0.0 and before > 0.0):
        return None
    scale = float((ours * theirs).sum() / (ours**2).sum())
    explained = 1.0 - float(((theirs - scale * ours) ** 2).sum()) / before
    return round(scale, 4) if abs(scale - 1.0) > LEAST_SCALE and explained > LEAST_EXPLAINED else None
