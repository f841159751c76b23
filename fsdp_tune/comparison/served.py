"""Compare what a server makes of prompts with what the trained model makes of them: tokens,
log-probabilities, greedy answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdp_tune.answer.examples import ReferenceAnswer, ReferenceTokens, ScoredTokens, ScoreRequest
from fsdp_tune.comparison.openai_server import ServedAnswer, ServedPrompt
from fsdp_tune.comparison.stages import ComparedStage, StageDifference
from fsdp_tune.core.command import JsonAnswer

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
TITLES = {
    "special_tokens": "tokens that begin and end a text",
    "template": "prompts as the chat template renders them",
    "prompt_tokens": "tokens of the prompts",
    "prompt_counts": "number of tokens of the prompts",
    "logprobs": "log-probabilities of the served answers",
    "same_tokens": "log-probabilities with A's tokens as the prompts",
    "answers": "greedy answers",
}
Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ComparedPrompt(JsonAnswer):
    prompt: str
    """The question, or the last message of the user."""
    row: str | None
    tokens_a: int
    tokens_b: int | None
    """Null: the server does not return it."""
    answer_a: str
    """The model's greedy answer."""
    answer_b: str | None
    """The server's."""
    scored_tokens: int
    """Tokens of the server's answer whose log-probabilities were compared."""
    mean_difference: float | None
    """Of the absolute differences of these log-probabilities, in nats."""
    max_difference: float | None


@dataclass(frozen=True, slots=True)
class ServedNumbers(JsonAnswer):
    """How far the log-probabilities of a server are from the model's: with the model's own tokens as prompts
    if the server takes them, else with the server's prompts."""

    server: str
    """llama.cpp, vLLM, or OpenAI-compatible."""
    model: str
    """As the server names it."""
    stored_type: str | None
    """Type of the server's weights, if it returns it."""
    scored_tokens: int
    mean_difference: float | None
    """Of the absolute differences, in nats; null if no log-probability could be compared."""
    max_difference: float | None
    signed_difference: float | None
    """Mean of the server's minus the model's."""
    scale: float | None
    """The server's logits over the model's, if one factor explains the differences."""
    prompts: list[ComparedPrompt]


@dataclass(slots=True)
class Exchange:
    """One prompt, and what model and server make of it."""

    name: str
    shown: str
    row: str | None
    reference: ReferenceAnswer
    prompt: ServedPrompt
    answer: ServedAnswer
    same: ServedAnswer | None = None
    """The answer to A's tokens; None if the server takes none."""
    refused: str = ""
    """What the server says instead."""
    score: ScoredTokens | None = None
    """The model's log-probabilities of `answer`, after A's tokens."""
    same_score: ScoredTokens | None = None
    half_score: ScoredTokens | None = None
    """As `score` and `same_score`, by the model in the server's dtype; None if that was not computed."""
    half_same_score: ScoredTokens | None = None
    begun_score: ScoredTokens | None = None
    """As `score`, after A's tokens with or without the beginning of text, where the server returns how many
    tokens it reads alone."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.reference.ids)


@dataclass(frozen=True, slots=True)
class _Differences:
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


def compare_served(
    exchanges: Sequence[Exchange],
    special: ReferenceTokens,
    properties: Mapping[str, object],
    tolerance: float,
    decode: Decode,
) -> tuple[list[ComparedStage], list[str]]:
    """Return the stages, and what of them could not be compared. `properties`: of the server."""
    left_out: list[str] = []
    stages = [
        _special_tokens(special, properties),
        *_prompt_stages(exchanges, special, decode),
        _logprobs("logprobs", exchanges, tolerance, left_out),
        _logprobs("same_tokens", exchanges, tolerance, left_out),
        _answers(exchanges, special, tolerance, left_out),
    ]
    if not any(each.same is not None and each.same.prompt for each in exchanges):
        left_out.append(
            "log-probabilities of the prompts' own tokens: the server does not return them (`echo`)"
        )
    return stages, left_out


# ---- Prompts


def _special_tokens(special: ReferenceTokens, properties: Mapping[str, object]) -> ComparedStage:
    places = [
        (name, ours, str(properties[key]))
        for name, key, ours in (
            ("beginning of text", "bos_token", special.bos),
            ("end of text", "eos_token", special.eos),
        )
        if key in properties and ours is not None
    ]
    if not places:
        return _without("special_tokens", "the server does not return them")
    ends = {special.eos, *special.ends.values()}
    wrong = [
        each for each in places if each[2] != each[1] and not (each[0] == "end of text" and each[2] in ends)
    ]
    return _stage(
        "special_tokens",
        [(each[0], ("", repr(each[1]), repr(each[2])) if each in wrong else None) for each in places],
    )


def _prompt_stages(
    exchanges: Sequence[Exchange], special: ReferenceTokens, decode: Decode
) -> list[ComparedStage]:
    """Return the stages of rendered prompts and their tokens; of a server that returns neither, their
    number."""
    bos = special.bos or ""
    rendered = [
        each for each in exchanges if each.prompt.text is not None and each.reference.messages is not None
    ]
    stages: list[ComparedStage] = []
    if rendered:
        # llama.cpp leaves out the beginning of text, which it adds as a token: it is compared with the
        # tokens.
        texts = [
            (each.name, *(text.removeprefix(bos) for text in (each.reference.text, each.prompt.text or "")))
            for each in rendered
        ]
        stages.append(_stage("template", [(name, _text_difference(a, b)) for name, a, b in texts]))
    known = [each for each in exchanges if each.prompt.ids is not None]
    if known:
        stages.append(
            _stage(
                "prompt_tokens",
                [(each.name, _token_difference(each.ids, each.prompt.ids or (), decode)) for each in known],
            )
        )
    if not rendered and not known:
        stages += [
            _without(name, "the server does not return them") for name in ("template", "prompt_tokens")
        ]
    if len(known) < len(exchanges):
        counts = [
            (each.name, len(each.ids), each.answer.prompt_tokens)
            for each in exchanges
            if each.prompt.ids is None
        ]
        given = [
            (name, None if a == b else (", in all", str(a), str(b))) for name, a, b in counts if b is not None
        ]
        found = _stage("prompt_counts", given)
        stages.append(
            found
            if given
            else ComparedStage(
                "prompt_counts", TITLES["prompt_counts"], "not_compared", "the server returns no usage"
            )
        )
    return stages


Found = tuple[str, str, str]
"""Where in a place two sides differ, and both sides."""


def _stage(name: str, places: Sequence[tuple[str, Found | None]], detail: str | None = None) -> ComparedStage:
    wrong = [(place, found) for place, found in places if found is not None]
    first = StageDifference(f"{wrong[0][0]}{wrong[0][1][0]}", *wrong[0][1][1:]) if wrong else None
    return ComparedStage(
        name, TITLES[name], "different" if wrong else "equal", detail, first, len(places), len(wrong)
    )


def _without(name: str, why: str) -> ComparedStage:
    return ComparedStage(name, TITLES[name], "not_compared", why)


def _text_difference(a: str, b: str) -> Found | None:
    if a == b:
        return None
    at = shared_length(a, b)
    return f", character {at}", quoted(a[max(at - 10, 0) :]), quoted(b[max(at - 10, 0) :])


def _token_difference(a: Sequence[int], b: Sequence[int], decode: Decode) -> Found | None:
    if tuple(a) == tuple(b):
        return None
    at = shared_length(a, b)
    x, y = (
        f"has ended after {at} tokens" if at >= len(each) else f"{decode([each[at]])!r} (id {each[at]})"
        for each in (a, b)
    )
    return f", token {at}", x, y


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the part that both begin with."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


# ---- Log-probabilities


def logprob_differences(
    answer: ServedAnswer | None, score: ScoredTokens | None, half: ScoredTokens | None = None
) -> _Differences | None:
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
    return _Differences(values, texts, ours, theirs, max(len(answer.prompt) - 1, 0), rounding)


def _values(answer: ServedAnswer, score: ScoredTokens) -> list[float]:
    return [*(score.prompt if answer.prompt else ()), *score.logprobs]


def _logprobs(
    name: str, exchanges: Sequence[Exchange], tolerance: float, left_out: list[str]
) -> ComparedStage:
    is_same = name == "same_tokens"
    places: list[tuple[str, Found | None]] = []
    every: list[npt.NDArray[np.float64]] = []
    rounded: list[npt.NDArray[np.float64]] = []
    unknown = 0
    for each in exchanges:
        answer, score, half = (
            (each.same, each.same_score, each.half_same_score)
            if is_same
            else (each.answer, each.score, each.half_score)
        )
        unknown += (
            0 if answer is None else len(answer.tokens) - (len(score.tokens) if score is not None else 0)
        )
        if (found := logprob_differences(answer, score, half)) is None or not len(found.known):
            continue
        every.append(found.known)
        rounded += [found.rounding] if found.rounding is not None else []
        at = found.first(tolerance)
        places.append(
            (
                each.name,
                None if at is None else (_at(found, at), f"{found.ours[at]:.4f}", f"{found.theirs[at]:.4f}"),
            )
        )
    if unknown:
        left_out.append(
            f"{TITLES[name]}: {unknown} tokens from one on whose text is not that of a token, such "
            "as a part of a character"
        )
    if not places:
        first = exchanges[0].same if is_same else exchanges[0].answer
        refused = f"the server takes no tokens as a prompt ({exchanges[0].refused})"
        why = refused if first is None else first.without_tokens or "no token of it could be identified"
        return _without(name, why)
    pooled = np.concatenate(every)
    detail = f"{len(pooled)} tokens, on average {pooled.mean():.2g} apart, at most {pooled.max():.2g}"
    if rounded:
        half = np.concatenate(rounded)
        detail += f"; A itself moves by {half.mean():.2g} and at most {half.max():.2g} in half precision"
    return _stage(name, places, detail)


def _at(found: _Differences, at: int) -> str:
    part, index = ("prompt", at + 1) if at < found.of_prompt else ("answer", at - found.of_prompt)
    return f", token {index} of the {part}, {found.texts[at]!r}"


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


# ---- Answers


def _answers(
    exchanges: Sequence[Exchange], special: ReferenceTokens, tolerance: float, left_out: list[str]
) -> ComparedStage:
    """Compare greedy answers up to a near tie: where A's two most probable tokens are within the tolerance,
    rounding decides."""
    places: list[tuple[str, Found | None]] = []
    ties = 0
    for each in exchanges:
        if not _has_tokens(each) and each.answer.text is None:
            left_out.append(
                f"the answer to {each.name}: the server has taken it apart (reasoning, calls of "
                "tools), and returns no tokens"
            )
            continue
        if not _has_tokens(each) and _parts_within_character(
            each.answer.text or "", each.reference.answer_text
        ):
            left_out.append(
                f"the answer to {each.name}: it has bytes that are no character, which servers write "
                "in other ways"
            )
            continue
        found, is_tie = _answer_difference(each, special, tolerance)
        ties += is_tie
        places.append((each.name, found))
    if not places:
        return _without("answers", "no answer of the server could be read")
    detail = f"{ties} of {len(places)} up to a near tie of two tokens" if ties else None
    return _stage("answers", places, detail)


def is_near(exchanges: Sequence[Exchange]) -> bool:
    """Return whether the server's log-probabilities are as near to A's as those of another dtype may be."""
    same = any(each.same is not None for each in exchanges)
    pairs = [(each.same, each.same_score) if same else (each.answer, each.score) for each in exchanges]
    found = [
        found.known
        for answer, score in pairs
        if (found := logprob_differences(answer, score)) is not None and len(found.known)
    ]
    return bool(found) and float(np.concatenate(found).mean()) < FAR


def _has_tokens(each: Exchange) -> bool:
    return each.score is not None and bool(each.score.tokens)


def answer_difference(each: Exchange, special: ReferenceTokens, tolerance: float) -> Found | None:
    """Return where the server's answer is another one than A's; None if it is not, or if it cannot be
    compared."""
    if not _has_tokens(each) and (
        each.answer.text is None or _parts_within_character(each.answer.text, each.reference.answer_text)
    ):
        return None
    return _answer_difference(each, special, tolerance)[0]


def _answer_difference(
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


def _parts_within_character(a: str, b: str) -> bool:
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


# ---- The result


def numbers_of(
    exchanges: Sequence[Exchange], server: str, model: str, stored_type: str | None
) -> ServedNumbers:
    """Return the differences over all prompts."""
    has_same = any(each.same is not None and each.same_score is not None for each in exchanges)
    pairs = [(each.same, each.same_score) if has_same else (each.answer, each.score) for each in exchanges]
    found = [logprob_differences(answer, score) for answer, score in pairs]
    values = [each.values[~np.isnan(each.values)] for each in found if each is not None]
    pooled = np.concatenate(values) if values else np.zeros(0)
    return ServedNumbers(
        server=server,
        model=model,
        stored_type=stored_type,
        scored_tokens=len(pooled),
        mean_difference=_rounded(np.abs(pooled).mean()) if len(pooled) else None,
        max_difference=_rounded(np.abs(pooled).max()) if len(pooled) else None,
        signed_difference=_rounded(pooled.mean()) if len(pooled) else None,
        scale=scale_of([(answer, score) for answer, score in pairs if answer is not None]),
        prompts=[_compared(each, of) for each, of in zip(exchanges, found, strict=True)],
    )


def _compared(each: Exchange, found: _Differences | None) -> ComparedPrompt:
    known = found.known if found is not None else np.zeros(0)
    ids = each.prompt.ids
    return ComparedPrompt(
        prompt=each.shown,
        row=each.row,
        tokens_a=len(each.ids),
        tokens_b=len(ids) if ids is not None else each.answer.prompt_tokens,
        answer_a=each.reference.answer_text,
        answer_b=each.answer.text,
        scored_tokens=len(known),
        mean_difference=_rounded(known.mean()) if len(known) else None,
        max_difference=_rounded(known.max()) if len(known) else None,
    )


def _rounded(value: float) -> float:
    return float(f"{float(value):.6g}")


def score_request(ids: Sequence[int], answer: ServedAnswer) -> ScoreRequest:
    """Return what the model is asked about an answer to the prompt `ids`: its tokens, and at each position
    the server's most probable ones, the token before and the token after, by which logits of another position
    are recognised."""
    tokens = [(each.id, each.text) for each in answer.tokens]
    around = list(zip([*tokens[:1], *tokens[:-1]], [*tokens[1:], *tokens[-1:]], strict=True))
    tops = [
        [*((one.id, one.text) for one in each.top), *near]
        for each, near in zip(answer.tokens, around, strict=True)
    ]
    return ScoreRequest(list(ids), tokens, tops, bool(answer.prompt))
