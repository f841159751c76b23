"""Patterns of log-probabilities that differ: shifted by a position, renormalised, or with a penalty on
repeated tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fsdp_tune.answer.model_requests import ScoredTokens
from fsdp_tune.comparison.exchanges import Exchange
from fsdp_tune.comparison.openai_server import ServedAnswer
from fsdp_tune.comparison.served_logprobs import OF_ONE_TOKEN, logprob_differences

LEAST_TOKENS = 4
"""Fewer log-probabilities than this show no pattern."""
Pair = tuple[Exchange, ServedAnswer, ScoredTokens]


def shift_of(pairs: Sequence[Pair], tolerance: float) -> int | None:
    """Return by how many positions the server's log-probabilities are early, 1 or -1; None if a shift does
    not explain them.

    Either the numbers stand next to other tokens, of the prompt or of the answer, or they are computed from
    the logits of another position.
    """
    for by in (1, -1):
        for shifted in (_moved_numbers(pairs, by, tolerance), _moved_logits(pairs, by)):
            known = [(theirs, ours) for theirs, ours in shifted if not math.isnan(theirs - ours)]
            if len(known) >= LEAST_TOKENS and _are_close(
                [theirs for theirs, _ in known], [ours for _, ours in known], tolerance
            ):
                return by
    return None


def _moved_numbers(pairs: Sequence[Pair], by: int, tolerance: float) -> Iterator[tuple[float, float]]:
    """Yield the server's log-probabilities with A's of the next token (`by` 1) or of the one before (-1), of
    parts that differ in place."""
    for _, answer, score in pairs:
        if (found := logprob_differences(answer, score)) is None:
            continue
        for part in found.parts():
            theirs, ours = found.theirs[part], found.ours[part]
            if not _are_close(theirs, ours, tolerance):
                yield from (
                    zip(theirs[:-1], ours[1:], strict=True)
                    if by > 0
                    else zip(theirs[1:], ours[:-1], strict=True)
                )


def _moved_logits(pairs: Sequence[Pair], by: int) -> Iterator[tuple[float, float]]:
    """Yield each log-probability of the server with A's of the same token after the logits of another
    position, as in `_near`."""
    for _, answer, score in pairs:
        theirs = [token.logprob for token in answer.tokens[: len(score.tokens)]]
        yield from zip(theirs[:-1] if by > 0 else theirs[1:], _near(score, by), strict=True)


def _near(score: ScoredTokens, by: int) -> list[float]:
    """Return A's log-probability of each token after the logits of the next position (`by` 1) or of the one
    before (-1)."""
    rows = score.top[1:] if by > 0 else score.top[:-1]
    return [math.nan if (value := row[-2 if by > 0 else -1]) is None else value for row in rows]


def _are_close(theirs: Sequence[float], ours: Sequence[float], tolerance: float) -> bool:
    off = np.abs(np.subtract(theirs, ours))
    known = off[~np.isnan(off)]
    return not len(known) or bool(known.mean() <= tolerance and known.max() <= OF_ONE_TOKEN * tolerance)


class _Position(NamedTuple):
    """The most probable tokens at a position of an answer, as the server and A compute them."""

    answered: set[int]
    """Tokens of the answer before the position."""
    prompt: set[int]
    offsets: list[tuple[int, float]]
    """(token, the server's log-probability minus A's)."""


def _compared_positions(pairs: Sequence[Pair]) -> Iterator[_Position]:
    """Yield the positions at which both sides have several of the most probable tokens."""
    for each, answer, score in pairs:
        for at, (token, own) in enumerate(zip(answer.tokens, score.top, strict=False)):
            both = [
                (one.id, one.logprob - value)
                for one, value in zip(token.top, own, strict=False)
                if one.id is not None and value is not None and math.isfinite(one.logprob)
            ]
            if len(both) > 1:
                yield _Position(set(score.tokens[:at]), set(each.ids), both)


def are_renormalised(pairs: Sequence[Pair], tolerance: float) -> bool:
    """Return whether the differences are one constant for all tokens of a position, never negative."""
    offs = [np.array([off for _, off in position.offsets]) for position in _compared_positions(pairs)]
    if len(offs) < LEAST_TOKENS:
        return False
    constants = np.array([off.mean() for off in offs])
    spread = max(float(np.ptp(off)) for off in offs)
    return spread <= tolerance and float(constants.min()) >= -tolerance and float(constants.max()) > tolerance


def penalty_of(pairs: Sequence[Pair], tolerance: float, *, of_prompt: bool) -> tuple[float, float] | None:
    """Return the least and the largest amount by which tokens that occurred before are less probable; None if
    others differ too."""
    amounts: list[float] = []
    for position in _compared_positions(pairs):
        before = position.answered | position.prompt if of_prompt else position.answered
        others = [off for token, off in position.offsets if token not in before]
        if not others:
            continue
        if np.ptp(others) > OF_ONE_TOKEN * tolerance:
            return None
        amounts += [float(np.median(others)) - off for token, off in position.offsets if token in before]
    return (min(amounts), max(amounts)) if len(amounts) >= LEAST_TOKENS and min(amounts) > tolerance else None
