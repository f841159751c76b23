"""Where the greedy answer of a server becomes another one than the model's, up to a near tie of two tokens,
which rounding decides."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_tune.answer.model_requests import ReferenceTokens, ScoredTokens
from fsdp_tune.comparison.exchanges import REPLACEMENT, Exchange, Found, quoted, shared_length
from fsdp_tune.comparison.openai_server import ServedAnswer
from fsdp_tune.comparison.served_logprobs import IN_FP32, ROUNDED, logprob_differences


def has_tokens(each: Exchange) -> bool:
    return each.score is not None and bool(each.score.tokens)


def answer_difference(each: Exchange, special: ReferenceTokens, tolerance: float) -> Found | None:
    """Return where the server's answer is another one than A's; None if it is not, or if it cannot be
    compared."""
    if not has_tokens(each) and (
        each.answer.text is None or parts_within_character(each.answer.text, each.reference.answer_text)
    ):
        return None
    return difference_or_tie(each, special, tolerance)[0]


def difference_or_tie(
    each: Exchange, special: ReferenceTokens, tolerance: float
) -> tuple[Found | None, bool]:
    """Return the first difference, and whether the answers part at a near tie: as near as the
    log-probabilities of the answer differ."""
    found = logprob_differences(each.answer, each.score)
    is_known = found is not None and len(found.known) > 0
    limit = max(IN_FP32, ROUNDED * float(found.known.max())) if found is not None and is_known else tolerance
    if each.score is not None and each.score.tokens:
        return _by_tokens(
            each.answer, each.score, {int(token): text for token, text in special.ends.items()}, limit
        )
    return _by_text(each, limit)


def parts_within_character(a: str, b: str) -> bool:
    at = shared_length(a, b)
    return REPLACEMENT in (a[at : at + 1], b[at : at + 1])


def _by_tokens(
    answer: ServedAnswer, score: ScoredTokens, ends: Mapping[int, str], tolerance: float
) -> tuple[Found | None, bool]:
    """Return the first difference, and whether the answers part at a near tie."""
    known, best = score.tokens, score.best
    texts = [*score.texts, *(token.text for token in answer.tokens[len(known) :])]
    for at, token in enumerate(known):
        if token != best[at]:
            gap = score.best_logprobs[at] - score.logprobs[at]
            if gap <= tolerance:
                return None, True
            return (f", token {at}", f"{score.best_texts[at]!r}, by {gap:.3g}", repr(texts[at])), False
        if token in ends and at < len(texts) - 1:
            return (f", token {at}", f"ends with {ends[token]!r}", f"goes on with {texts[at + 1]!r}"), False
    is_complete = len(known) == len(texts)
    if (
        is_complete
        and answer.finish_reason == "stop"
        and known[-1] not in ends
        and best[len(known)] not in ends
    ):
        return (f", token {len(known)}", f"goes on with {score.best_texts[len(known)]!r}", "ends"), False
    return None, False


def _by_text(each: Exchange, tolerance: float) -> tuple[Found | None, bool]:
    a, b = each.reference.answer_text, each.answer.text or ""
    lengths, margins = each.reference.lengths, each.reference.margins
    if a == b:
        ended = each.answer.finish_reason == "stop"
        if each.answer.finish_reason is None or ended is each.reference.is_ended:
            return None, False
        shown = {True: "ends", False: "does not end"}
        return (f", after {len(lengths)} tokens", shown[each.reference.is_ended], shown[ended]), False
    at = next((index for index, length in enumerate(lengths) if a[:length] != b[:length]), len(lengths) - 1)
    if margins and margins[at] <= tolerance:
        return None, True
    shared = shared_length(a, b)
    return (f", token {at}", quoted(a[shared:]), quoted(b[shared:])), False
