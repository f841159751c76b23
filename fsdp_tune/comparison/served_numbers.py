"""How far a server's log-probabilities are from the model's, over all prompts and for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_tune.comparison.exchanges import Exchange
from fsdp_tune.comparison.served_logprobs import LogprobDifferences, logprob_differences, scale_of
from fsdp_tune.core.command import JsonAnswer


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
    """Tokens whose log-probabilities were compared: of the server's answer, and of the prompt if the server
    returns them."""
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


def _compared(each: Exchange, found: LogprobDifferences | None) -> ComparedPrompt:
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
