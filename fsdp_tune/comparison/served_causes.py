"""Why a server answers otherwise than the model: prompts, stop tokens, penalties, sampling, scaled or shifted
log-probabilities, weights.

A cause is shown if undoing it gives what the model computes. None contradicts a stage that was found equal: a
server whose log-probabilities are the model's has the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_tune.answer.model_requests import ReferenceTokens, ScoredTokens
from fsdp_tune.comparison.exchanges import Decode, Exchange, Found
from fsdp_tune.comparison.openai_server import ServedAnswer
from fsdp_tune.comparison.served_answers import answer_difference, has_tokens
from fsdp_tune.comparison.served_logprob_patterns import Pair, are_renormalised, penalty_of, shift_of
from fsdp_tune.comparison.served_logprobs import OF_ONE_TOKEN, scale_of
from fsdp_tune.comparison.served_prompt_causes import BEGIN, beginning_of_prompts, cause_of_tokens
from fsdp_tune.comparison.stages import ComparedStage

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
        if (how := beginning_of_prompts(exchanges, special, tolerance)) is not None:
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


def _of_logprobs(pairs: Sequence[Pair], tolerance: float, stored_type: str | None) -> ServedCause:
    if (by := shift_of(pairs, tolerance)) is not None:
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
    if are_renormalised(pairs, tolerance):
        text = (
            "the server's log-probabilities are A's but for a constant of each position: top-k, top-p or "
            "min-p comes first"
        )
        return ServedCause(text, GREEDY, is_shown=True)
    for of_prompt in (False, True):
        if (penalty := penalty_of(pairs, tolerance, of_prompt=of_prompt)) is not None:
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
    return (
        score is not None
        and has_tokens(each)
        and all(
            token == best or gap <= tolerance
            for token, best, gap in zip(
                score.tokens,
                score.best,
                np.subtract(score.best_logprobs[: len(score.tokens)], score.logprobs),
                strict=False,
            )
        )
    )
