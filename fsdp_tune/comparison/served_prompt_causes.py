"""Why the tokens of a server's prompts differ from the model's: a beginning of text more or less, another
template, other turns."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_tune.answer.model_requests import ReferenceTokens
from fsdp_tune.comparison.exchanges import Decode, Exchange, quoted, shared_length
from fsdp_tune.comparison.served_logprobs import logprob_differences

SERVE = "serve with the model's own template: `--chat-template-file` of llama.cpp, `--chat-template` of vLLM"
BEGIN = (
    "switch one of them off: in a GGUF file `tokenizer.ggml.add_bos_token`, with vLLM "
    "`add_special_tokens` of a request"
)


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


def beginning_of_prompts(
    exchanges: Sequence[Exchange], special: ReferenceTokens, tolerance: float
) -> str | None:
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
