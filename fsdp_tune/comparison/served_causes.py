"""Why a server answers otherwise than the model: prompts, stop tokens, penalties, sampling, scaled or shifted
log-probabilities, weights.

A cause is shown if undoing it gives what the model computes. None contradicts a stage that was found equal: a
server whose log-probabilities are the model's has the model's weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdp_tune.answer.model_requests import ReferenceTokens, ScoredTokens
from fsdp_tune.comparison.exchanges import Decode, Exchange, Found, quoted, shared_length
from fsdp_tune.comparison.openai_server import ServedAnswer
from fsdp_tune.comparison.served_answers import answer_difference
from fsdp_tune.comparison.served_logprobs import OF_ONE_TOKEN, logprob_differences, scale_of
from fsdp_tune.comparison.stages import ComparedStage

LEAST_TOKENS = 4
"""Fewer log-probabilities than this show no pattern."""
SERVE = "serve with the model's own template: `--chat-template-file` of llama.cpp, `--chat-template` of vLLM"
BEGIN = (
    "switch one of them off: in a GGUF file `tokenizer.ggml.add_bos_token`, with vLLM "
    "`add_special_tokens` of a request"
)
STOPS = "send the same stop tokens: `eos_token_id` of generation_config.json, `stop` of a request"
GREEDY = (
    "`temperature: 0` without penalties, `logit_bias`, `top_k` or `top_p` in the server's defaults "
    "(generation_config.json of vLLM)"
)


@dataclass(frozen=True, slots=True)
class ServedCause:
    text: str
    hint: str | None
    is_shown: bool = False


Pair = tuple[Exchange, ServedAnswer, ScoredTokens]


def served_cause(
    exchanges: Sequence[Exchange],
    special: ReferenceTokens,
    stages: Sequence[ComparedStage],
    tolerance: float,
    stored_type: str | None,
    decode: Decode,
) -> ServedCause:
    """Return the cause of the first stage that differs. `stored_type`: of the server's weights, if it returns
    it."""
    status = {stage.name: stage.status for stage in stages}
    if (found := cause_of_tokens(exchanges, special, decode)) is not None:
        text, hint = found
        if status["same_tokens"] == "equal":
            return ServedCause(
                f"{text}; with A's tokens as the prompts its log-probabilities are A's", hint, is_shown=True
            )
        if (how := _begun(exchanges, special, tolerance)) is not None:
            return ServedCause(
                f"the server's prompts {how}; with such prompts A's log-probabilities are the server's",
                BEGIN,
                is_shown=True,
            )
        return ServedCause(text, hint)
    if status.get("special_tokens") == "different":
        return ServedCause(
            "the server's files name another token", "convert or copy the tokenizer of the model again"
        )
    pairs = list(_pairs(exchanges))
    if "different" in (status["logprobs"], status["same_tokens"]):
        return _of_logprobs(pairs, tolerance, stored_type)
    return _of_answers(
        exchanges,
        pairs,
        special,
        tolerance,
        is_compared="equal" in (status["logprobs"], status["same_tokens"]),
    )


def _pairs(exchanges: Sequence[Exchange]) -> Iterator[Pair]:
    """Yield the answers whose tokens were scored, those to A's own tokens if the server takes them."""
    for each in exchanges:
        if each.same is not None and each.same_score is not None and each.same_score.tokens:
            yield each, each.same, each.same_score
        elif each.score is not None and each.score.tokens:
            yield each, each.answer, each.score


# ---- Log-probabilities that differ


def _of_logprobs(pairs: Sequence[Pair], tolerance: float, stored_type: str | None) -> ServedCause:
    if (by := _shift(pairs, tolerance)) is not None:
        text = (
            "the server's log-probabilities are shifted by one position: each is A's at the "
            f"{'next' if by > 0 else 'previous'} one"
        )
        return ServedCause(text, "the logits of a position are those of the token after it", is_shown=True)
    if (scale := scale_of([(answer, score) for _, answer, score in pairs])) is not None:
        return ServedCause(
            f"the server's logits are {scale:g} times A's",
            "a temperature, a scale of the logits or a soft cap: see its settings",
        )
    if _are_renormalised(pairs, tolerance):
        text = (
            "the server's log-probabilities are A's but for a constant of each position: top-k, top-p or "
            "min-p comes first"
        )
        return ServedCause(text, GREEDY, is_shown=True)
    for of_prompt in (False, True):
        if (penalty := _penalty(pairs, tolerance, of_prompt=of_prompt)) is not None:
            least, largest = penalty
            is_constant = largest - least <= OF_ONE_TOKEN * tolerance
            where = "prompt or answer" if of_prompt else "answer"
            amount = (
                f"by {(least + largest) / 2:.3g} nats"
                if is_constant
                else f"by {least:.3g} to {largest:.3g} nats"
            )
            text = (
                f"a penalty on repeated tokens: those that the {where} already has are less probable "
                f"{amount}, and no others"
            )
            return ServedCause(text, GREEDY, is_shown=is_constant)
    stored = f"; its weights are stored as {stored_type}" if stored_type else ""
    hint = (
        f"is it this model? Rounding is less than `--tolerance {tolerance:g}` on average, and "
        f"{OF_ONE_TOKEN:g} times that for one token"
    )
    return ServedCause(f"not shown: other weights, or weights of another type{stored}", hint)


def _shift(pairs: Sequence[Pair], tolerance: float) -> int | None:
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


def _are_renormalised(pairs: Sequence[Pair], tolerance: float) -> bool:
    """Return whether the differences are one constant for all tokens of a position, never negative."""
    offs = [np.array([off for _, off in position.offsets]) for position in _compared_positions(pairs)]
    if len(offs) < LEAST_TOKENS:
        return False
    constants = np.array([off.mean() for off in offs])
    spread = max(float(np.ptp(off)) for off in offs)
    return spread <= tolerance and float(constants.min()) >= -tolerance and float(constants.max()) > tolerance


def _penalty(pairs: Sequence[Pair], tolerance: float, *, of_prompt: bool) -> tuple[float, float] | None:
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


# ---- Answers that differ though no log-probability does


def _of_answers(
    exchanges: Sequence[Exchange],
    pairs: Sequence[Pair],
    special: ReferenceTokens,
    tolerance: float,
    *,
    is_compared: bool,
) -> ServedCause:
    if (found := _end(exchanges, special, tolerance)) is not None:
        return found
    if not is_compared:
        text = (
            "not shown: other weights, weights of another type, or answers that are not greedy; the "
            "server returns no log-probabilities"
        )
        return ServedCause(text, GREEDY)
    wrong = [
        (set(score.tokens[:at]) | set(each.ids), answer, score, at)
        for each, answer, score in pairs
        for at, token in enumerate(score.tokens)
        if token != score.best[at] and score.best_logprobs[at] - score.logprobs[at] > tolerance
    ]
    if wrong and all(score.best[at] in before for before, _, score, at in wrong):
        text = (
            "a penalty on repeated tokens: the server's log-probabilities are A's, but it chooses no "
            "token that A repeats"
        )
        return ServedCause(text, GREEDY, is_shown=all(_is_best_of_new(*each) for each in wrong))
    text = (
        "not shown: the server does not choose the most probable tokens, though its log-probabilities "
        "are A's: a temperature, top-k, a bias"
    )
    return ServedCause(text, GREEDY)


def _is_best_of_new(before: set[int], answer: ServedAnswer, score: ScoredTokens, at: int) -> bool:
    """Return whether the server's token is the most probable one that did not occur before."""
    top = zip(answer.tokens[at].top, score.top[at] if at < len(score.top) else (), strict=False)
    new = [
        (value, one.id)
        for one, value in top
        if value is not None and one.id is not None and one.id not in before
    ]
    return bool(new) and max(new)[1] == score.tokens[at]


def _end(exchanges: Sequence[Exchange], special: ReferenceTokens, tolerance: float) -> ServedCause | None:
    """Return the cause if every difference is where an answer ends."""
    found: list[tuple[Exchange, Found]] = []
    for each in exchanges:
        if (difference := answer_difference(each, special, tolerance)) is not None:
            found.append((each, difference))
    goes_on = [
        each
        for each, (_, a, b) in found
        if a.startswith("ends") and (b.startswith("goes on") or b == "does not end")
    ]
    ends = [each for each, (_, _, b) in found if b == "ends"]
    if not found or len(goes_on) + len(ends) < len(found):
        return None
    if goes_on:
        is_shown = all(_follows(each, tolerance) for each in goes_on)
        stops = ", ".join(sorted({repr(text) for text in special.ends.values()}))
        return ServedCause(
            f"stop tokens: the server does not end its answers at {stops}, as A does", STOPS, is_shown
        )
    return ServedCause(
        "stop tokens: the server ends answers where A goes on, at a stop text or another end of text",
        STOPS,
        is_shown=False,
    )


def _follows(each: Exchange, tolerance: float) -> bool:
    """Return whether all tokens of the server's answer, those after A's end too, are those that A finds most
    probable."""
    score = each.score
    return score is not None and all(
        token == best or gap <= tolerance
        for token, best, gap in zip(
            score.tokens,
            score.best,
            np.subtract(score.best_logprobs[: len(score.tokens)], score.logprobs),
            strict=False,
        )
    )


# ---- Prompts


def cause_of_tokens(
    exchanges: Sequence[Exchange], special: ReferenceTokens, decode: Decode
) -> tuple[str, str] | None:
    """Return why the tokens of prompts differ, and what to do; None if they do not."""
    wrong = next(
        (each for each in exchanges if each.prompt.ids is not None and each.prompt.ids != each.ids), None
    )
    if wrong is None:
        return _of_counts(exchanges)
    a, b, bos = wrong.ids, wrong.prompt.ids or (), special.bos_id
    if bos is not None and b[1:] == a and b[:1] == (bos,):
        how = (
            "twice: the template writes it and the server adds it"
            if a[:1] == (bos,)
            else "which training did not have"
        )
        return f"the server's prompts begin with {special.bos!r} {how}", BEGIN
    if bos is not None and a[1:] == b and a[:1] == (bos,):
        return (
            f"the server's prompts lack {special.bos!r}, with which they began in training",
            "in a GGUF file: `tokenizer.ggml.add_bos_token`",
        )
    start = shared_length(a, b)
    end = min(shared_length(a[::-1], b[::-1]), len(a) - start, len(b) - start)
    ours, theirs = (decode(each[start : len(each) - end]) for each in (a, b))
    if not ours:
        return f"the server adds {quoted(theirs)}", SERVE
    if not theirs:
        return f"the server leaves out {quoted(ours)}", SERVE
    return f"the server has {quoted(theirs)} in the place of {quoted(ours)}", SERVE


def begun_otherwise(each: Exchange, special: ReferenceTokens) -> list[int] | None:
    """Return the prompt with one beginning of text more or less, if the server reads that many tokens and
    does not return them."""
    if each.prompt.ids is not None or each.answer.prompt_tokens is None or special.bos_id is None:
        return None
    more = each.answer.prompt_tokens - len(each.ids)
    if more == -1 and each.ids[:1] == (special.bos_id,):
        return list(each.ids[1:])
    return [special.bos_id, *each.ids] if more == 1 else None


def _begun(exchanges: Sequence[Exchange], special: ReferenceTokens, tolerance: float) -> str | None:
    """Return how the server's prompts begin, if A's log-probabilities after such prompts are the server's."""
    found = [logprob_differences(each.answer, each.begun_score) for each in exchanges]
    if not found or any(
        each is None or not len(each.known) or each.first(tolerance) is not None for each in found
    ):
        return None
    if (exchanges[0].answer.prompt_tokens or 0) < len(exchanges[0].ids):
        return f"lack {special.bos!r}, with which they began in training"
    has_own = exchanges[0].ids[:1] == (special.bos_id,)
    return f"begin with {special.bos!r} " + ("twice" if has_own else "which training did not have")


def _of_counts(exchanges: Sequence[Exchange]) -> tuple[str, str] | None:
    """Return the same of a server that returns only how many tokens a prompt has."""
    off = {
        (each.answer.prompt_tokens or 0) - len(each.ids)
        for each in exchanges
        if each.answer.prompt_tokens is not None
    }
    if off <= {0}:
        return None
    if len(off) > 1:
        return "not shown: the server returns only how many tokens it reads", SERVE
    (more,) = off
    what = (
        "the beginning of text, twice or not at all"
        if abs(more) == 1
        else "a system prompt or other turns of the template"
    )
    return (
        f"not shown: each prompt has {abs(more)} tokens {'more' if more > 0 else 'fewer'} on the "
        f"server, such as {what}",
        SERVE,
    )
