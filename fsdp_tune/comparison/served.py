"""Compare what a server makes of prompts with what the trained model makes of them: tokens,
log-probabilities, greedy answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fsdp_tune.answer.model_requests import ReferenceTokens, ScoreRequest
from fsdp_tune.comparison.exchanges import Decode, Exchange, Found, text_difference, token_difference
from fsdp_tune.comparison.openai_server import ServedAnswer
from fsdp_tune.comparison.served_answers import difference_or_tie, has_tokens, parts_within_character
from fsdp_tune.comparison.served_logprobs import FAR, LogprobDifferences, logprob_differences
from fsdp_tune.comparison.stages import ComparedStage, StageDifference

TITLES = {
    "special_tokens": "tokens that begin and end a text",
    "template": "prompts as the chat template renders them",
    "prompt_tokens": "tokens of the prompts",
    "prompt_counts": "number of tokens of the prompts",
    "logprobs": "log-probabilities of the served answers",
    "same_tokens": "log-probabilities with A's tokens as the prompts",
    "answers": "greedy answers",
}


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
        stages.append(_stage("template", [(name, text_difference(a, b)) for name, a, b in texts]))
    known = [each for each in exchanges if each.prompt.ids is not None]
    if known:
        stages.append(
            _stage(
                "prompt_tokens",
                [(each.name, token_difference(each.ids, each.prompt.ids or (), decode)) for each in known],
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


def _stage(name: str, places: Sequence[tuple[str, Found | None]], detail: str | None = None) -> ComparedStage:
    wrong = [(place, found) for place, found in places if found is not None]
    first = StageDifference(f"{wrong[0][0]}{wrong[0][1][0]}", *wrong[0][1][1:]) if wrong else None
    return ComparedStage(
        name, TITLES[name], "different" if wrong else "equal", detail, first, len(places), len(wrong)
    )


def _without(name: str, why: str) -> ComparedStage:
    return ComparedStage(name, TITLES[name], "not_compared", why)


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


def _at(found: LogprobDifferences, at: int) -> str:
    part, index = ("prompt", at + 1) if at < found.of_prompt else ("answer", at - found.of_prompt)
    return f", token {index} of the {part}, {found.texts[at]!r}"


def _answers(
    exchanges: Sequence[Exchange], special: ReferenceTokens, tolerance: float, left_out: list[str]
) -> ComparedStage:
    """Compare greedy answers up to a near tie: where A's two most probable tokens are within the tolerance,
    rounding decides."""
    places: list[tuple[str, Found | None]] = []
    ties = 0
    for each in exchanges:
        if not has_tokens(each) and each.answer.text is None:
            left_out.append(
                f"the answer to {each.name}: the server has taken it apart (reasoning, calls of "
                "tools), and returns no tokens"
            )
            continue
        if not has_tokens(each) and parts_within_character(
            each.answer.text or "", each.reference.answer_text
        ):
            left_out.append(
                f"the answer to {each.name}: it has bytes that are no character, which servers write "
                "in other ways"
            )
            continue
        found, is_tie = difference_or_tie(each, special, tolerance)
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
