"""The comparison of a trained model with a server: `compare RUN http://HOST:PORT/v1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fsdp_tune.answer.model_requests import ReferenceAnswer, ReferenceTokens
from fsdp_tune.comparison.exchanges import Exchange
from fsdp_tune.comparison.openai_server import (
    OpenAIServer,
    RefusedError,
    ServedAnswer,
    ServedPrompt,
    is_url,
    key_of,
)
from fsdp_tune.comparison.served import compare_served, is_near, score_request
from fsdp_tune.comparison.served_causes import served_cause
from fsdp_tune.comparison.served_logprobs import TOLERANCE
from fsdp_tune.comparison.served_numbers import numbers_of
from fsdp_tune.comparison.served_prompt_causes import begun_otherwise
from fsdp_tune.comparison.verdicts import evidence_of, verdict
from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.data.prompts import prompt_of_row
from fsdp_tune.data.read.row_files import BadRow, RowError
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.jobs.compare_answer import (
    Cause,
    CompareAnswer,
    SideAnswer,
    first_of,
    not_compared_lines,
)
from fsdp_tune.jobs.generate import AnsweringModel, AskedPrompt, open_model, read_prompts
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, CompareOptions, GenerateOptions
from fsdp_tune.jobs.recipes import code_not_allowed
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.run.directory import run_of

PROMPTS_OF_A_RUN = 8
NEVER_COMPARED = (
    "sampling: the server was asked for greedy answers (temperature 0)",
    "answers after `--max-new-tokens`, and many requests at a time, which some servers compute in "
    "another order",
)


def compare_with_server(a: str, url: str, options: CompareOptions, observer: Observer) -> CompareAnswer:
    """Compare prompts, log-probabilities and greedy answers of a server with those of the model, computed
    here on the CPU in fp32.

    Raises: FsdpTuneError for a model or prompts that cannot be read, and a server that cannot be reached or
    answers otherwise.
    """
    if is_url(a):
        raise usage_error(
            "usage",
            f"A is a server, `{a}`; pass the run or model that it serves as A, and the server as B",
            hint=f"fsdp-tune compare RUN {url}",
        )
    prompts = (
        read_prompts(str(options.prompts))
        if options.prompts is not None
        else _prompts_of_run(a, options.allowed)
    )
    observer.phase(f"connecting to {url}")
    server = OpenAIServer(url, key_of(options.api_key_env), options.served_model)
    loading = GenerateOptions(
        max_new_tokens=options.max_new_tokens, device="cpu", dtype="fp32", allowed=options.allowed
    )
    with open_model(a, loading, observer=observer) as model:
        exchanges, special, refused = _exchanges(model, server, prompts, options.max_new_tokens, observer)
        found = _answer(a, server, exchanges, special, refused, model, options)
    stored = server.stored_type or ""
    is_off = any(
        stage.status == "different" for stage in found.stages if stage.name in ("logprobs", "same_tokens")
    )
    if not is_off or options.tolerance is not None or stored.endswith("F32") or not is_near(exchanges):
        return found
    observer.phase("computing A in half precision")
    dtype = "fp16" if stored.endswith("F16") and not stored.endswith("BF16") else "bf16"
    with open_model(a, replace(loading, dtype=dtype), observer=observer) as model:
        _score(model, exchanges, special, is_half=True)
        return _answer(a, server, exchanges, special, refused, model, options)


def _prompts_of_run(name: str, allowed: Allowed) -> list[AskedPrompt]:
    """Return the first prompts of a run's first training source. Raises: usage error if it has none that can
    be sent, or if a loader reads it that is not allowed."""
    hint = (
        "`--prompts FILE`: rows with `messages`, `prompt` or `text`, or a text file with a prompt on "
        "each line"
    )
    run = run_of(Path(name)) if Path(name).is_dir() else None
    if run is None:
        raise usage_error(
            "compare-prompts", f"`{name}` is not a run, so it has no prompts to send", hint=hint
        )
    recipe, key = read_resolved(run), "data.train[0]"
    if refused := [
        problem
        for problem in code_not_allowed(recipe, allowed, starts_ranks=False)
        if problem.where.key == f"{key}.loader"
    ]:
        raise FsdpTuneError(*refused)
    source = find_source(recipe.data.train[0].model_copy(update={"max_rows": PROMPTS_OF_A_RUN}), key)
    found: list[AskedPrompt] = []
    for file, row in islice(source.read(), PROMPTS_OF_A_RUN):
        where = Where(source.names[file], row.number if isinstance(row, BadRow) else row[0])
        try:
            if isinstance(row, BadRow):
                raise RowError(row.reason)
            found.append(AskedPrompt((prompt_of_row(row[1], is_line=False),), where))
        except RowError as error:
            raise usage_error(
                "compare-prompts",
                f"the rows of the run cannot be sent as prompts: {error}",
                where=where,
                hint=hint,
            ) from error
    if not found:
        raise usage_error("compare-prompts", f"the first source of `{name}` has no rows", hint=hint)
    return found


class _Exchanged(NamedTuple):
    """The answers of model and server to each prompt."""

    exchanges: list[Exchange]
    special: ReferenceTokens
    """Special tokens of the model."""
    refused: list[str]
    """What the server's own endpoints contradict."""


def _exchanges(
    model: AnsweringModel,
    server: OpenAIServer,
    prompts: Sequence[AskedPrompt],
    max_tokens: int,
    observer: Observer,
) -> _Exchanged:
    """Ask model and server for each prompt, and score their answers with the model."""
    observer.phase("computing the answers of A")
    special, references = model.refer(prompts, max_tokens)
    exchanges: list[Exchange] = []
    refused: list[str] = []
    with observer.progress("asking the server", len(prompts), "prompts") as bar:
        for number, (prompt, reference) in enumerate(zip(prompts, references, strict=True), 1):
            name = f"prompt {number}" + (f" ({prompt.where})" if str(prompt.where) else "")
            read, answer = _asked(server, reference, max_tokens)
            each = Exchange(name, prompt.shown, str(prompt.where) or None, reference, read, answer)
            if read.ids is not None and answer.prompt_tokens not in (None, len(read.ids)):
                refused.append(
                    f"the tokens of {name}: the server's endpoint for them returns {len(read.ids)}, "
                    f"and it answered {answer.prompt_tokens}"
                )
                each.prompt = ServedPrompt(read.text, None)
            try:
                each.same = server.complete_ids(reference.ids, max_tokens)
            except RefusedError as error:
                each.refused = str(error)
            exchanges.append(each)
            bar.advance()
    observer.phase("computing the log-probabilities of A")
    _score(model, exchanges, special)
    return _Exchanged(exchanges, special, refused)


def _asked(
    server: OpenAIServer, reference: ReferenceAnswer, max_tokens: int
) -> tuple[ServedPrompt, ServedAnswer]:
    messages = reference.messages
    if messages is None:
        return server.text_prompt(reference.text), server.complete(reference.text, max_tokens)
    extra: dict[str, object] = {"tools": reference.tools} if reference.tools else {}
    extra |= {"chat_template_kwargs": reference.variables} if reference.variables else {}
    return server.chat_prompt(messages, extra), server.chat(messages, extra, max_tokens)


def _score(
    model: AnsweringModel, exchanges: Sequence[Exchange], special: ReferenceTokens, *, is_half: bool = False
) -> None:
    """Add the model's log-probabilities of the server's answers. `is_half`: the model computes in the
    server's dtype."""
    begun = [None if is_half else begun_otherwise(each, special) for each in exchanges]
    requests = [
        request
        for each, ids in zip(exchanges, begun, strict=True)
        for request in (
            score_request(each.reference.ids, each.answer),
            *([score_request(each.reference.ids, each.same)] if each.same is not None else []),
            *([score_request(ids, each.answer)] if ids is not None else []),
        )
    ]
    scores = iter(model.scores(requests))
    for each, ids in zip(exchanges, begun, strict=True):
        own = next(scores)
        same = next(scores) if each.same is not None else None
        if is_half:
            each.half_score, each.half_same_score = own, same
        else:
            each.score, each.same_score = own, same
            each.begun_score = next(scores) if ids is not None else None


def _answer(
    name: str,
    server: OpenAIServer,
    exchanges: Sequence[Exchange],
    special: ReferenceTokens,
    refused: Sequence[str],
    model: AnsweringModel,
    options: CompareOptions,
) -> CompareAnswer:
    def decode(ids: Sequence[int]) -> str:
        return model.texts([ids])[0]

    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    stages, left_out = compare_served(exchanges, special, server.properties, tolerance, decode)
    numbers = numbers_of(exchanges, server.kind, server.model, server.stored_type)
    found = first_of(stages)
    missing = not_compared_lines(
        (stage.title, str(stage.detail)) for stage in stages if stage.status == "not_compared"
    )
    cause = None
    if found is not None:
        why = served_cause(exchanges, special, stages, tolerance, server.stored_type, decode)
        cause = Cause([], {}, is_shown=why.is_shown, text=why.text, hint=why.hint)
    outcome = verdict(stages, ())
    return CompareAnswer(
        equal=outcome == "equal",
        a=SideAnswer(name, "model", None, []),
        b=SideAnswer(server.url, "server", None, []),
        keys=[],
        environment={},
        stages=stages,
        first=found,
        cause=cause,
        later=[],
        first_step=None,
        first_bits=None,
        rows_of_step=None,
        tolerance=tolerance,
        not_compared=list(dict.fromkeys([*missing, *refused, *left_out, *NEVER_COMPARED])),
        served=numbers,
        verdict=outcome,
        compared=evidence_of(stages),
    )
