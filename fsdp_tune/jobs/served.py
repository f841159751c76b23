"""What `compare` answers, whatever its sides are, and the comparison of a trained model with a server:
`compare RUN http://HOST:PORT/v1`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fsdp_tune.answer.model_requests import ReferenceAnswer, ReferenceTokens
from fsdp_tune.comparison.causes import DifferentKey, yaml_value
from fsdp_tune.comparison.exchanges import Exchange
from fsdp_tune.comparison.openai_server import (
    OpenAIServer,
    RefusedError,
    ServedAnswer,
    ServedPrompt,
    is_url,
    key_of,
)
from fsdp_tune.comparison.runs import DifferentStep
from fsdp_tune.comparison.served import ServedNumbers, compare_served, is_near, numbers_of, score_request
from fsdp_tune.comparison.served_causes import begun_otherwise, served_cause
from fsdp_tune.comparison.served_logprobs import TOLERANCE
from fsdp_tune.comparison.stages import ComparedStage, StageDifference
from fsdp_tune.comparison.verdicts import Verdict, evidence_of, verdict
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.secrets import MASK
from fsdp_tune.data.prompts import prompt_of_row
from fsdp_tune.data.read.row_files import BadRow, RowError
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.jobs.answers import ImportedKey
from fsdp_tune.jobs.generate import AnsweringModel, AskedPrompt, open_model, read_prompts
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, CompareOptions, GenerateOptions
from fsdp_tune.jobs.recipes import code_not_allowed
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.run.directory import run_of


@dataclass(frozen=True, slots=True)
class SideAnswer(JsonAnswer):
    name: str
    kind: str
    """`recipe`, `run`, or the tool whose configuration it is; `model` and `server` where a server is
    compared."""
    python: str | None
    """The interpreter that computed it; null if nothing was computed."""
    not_carried: list[ImportedKey]
    """Keys of another tool's configuration that the recipe does not have: dropped, or questions."""
    overrides: list[str] = field(default_factory=list[str])
    """`--set` of this side."""
    tool_version: str | None = None
    """Version of the tool that computed it, such as TRL's; null if `import` made a recipe of its
    configuration."""


@dataclass(frozen=True, slots=True)
class FirstDifference(StageDifference):
    stage: str


@dataclass(frozen=True, slots=True)
class Cause(JsonAnswer):
    """Why the first difference arises."""

    keys: list[DifferentKey]
    """With A's values of these keys in B, the difference vanishes."""
    versions: dict[str, list[str | None]]
    """Libraries with their versions in A and B, if the interpreter is the cause."""
    is_shown: bool
    """Whether B was computed again without the cause, and the difference vanished."""
    text: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class LaterDifference(JsonAnswer):
    """The first difference that is left when B has A's values of the causes before it."""

    difference: FirstDifference
    cause: Cause | None
    """Null if no keys were found that make it vanish."""


@dataclass(frozen=True, slots=True)
class CompareAnswer(JsonAnswer):
    """The result, and the document of `compare --json`."""

    equal: bool
    """Whether the verdict is `equal`."""
    a: SideAnswer
    b: SideAnswer
    keys: list[DifferentKey]
    """All that differ in the resolved recipes, those that change numbers first."""
    environment: dict[str, list[str | None]]
    """Versions, and for runs machines, that differ."""
    stages: list[ComparedStage]
    first: FirstDifference | None
    cause: Cause | None
    later: list[LaterDifference]
    first_step: DifferentStep | None
    """Of two runs: the first logged step beyond the tolerance."""
    first_bits: DifferentStep | None
    """Of two runs: the first logged step that is not bitwise equal."""
    rows_of_step: str | None
    """The rows of the global batch of `first_step`."""
    tolerance: float
    not_compared: list[str]
    failed: list[str] = field(default_factory=list[str])
    """Why a tool did not compute its side, or not all of it."""
    served: ServedNumbers | None = None
    """Of a server: how far its log-probabilities are from the model's."""
    verdict: Verdict = "not_comparable"
    """equal: rows and what is computed from them were compared and are equal, and no key that differs may
    change the result; different;
    not_comparable: nothing that shows it was compared, or a tool failed. What the verdict rests on and what
    it leaves out:"""
    compared: list[str] = field(default_factory=list[str])
    """What was compared, and how much of it."""
    unsettled: list[str] = field(default_factory=list[str])
    """Keys that differ, affect rows, numbers or the delivered model, and are not shown to make no
    difference."""


def first_of(stages: Sequence[ComparedStage]) -> FirstDifference | None:
    found = next((stage for stage in stages if stage.difference is not None), None)
    return (
        None
        if found is None or found.difference is None
        else FirstDifference(**found.difference.as_dict(), stage=found.name)
    )


def cause_of_keys(
    keys: list[DifferentKey],
    settings: Mapping[str, object],
    sides: tuple[str, str],
    ignored: Mapping[str, bool],
) -> Cause:
    """Return the cause of a difference that vanishes with the values of one side's `keys` in the other.

    `settings`: as `--set` takes them, None for a key that is not written. `sides`: whose values, and where.
    `ignored`: options of the kept side that its tool does not read, and whether the other side has the values
    that they give a recipe.
    """
    kept, changed = sides
    named = ", ".join(f"`{key.key}`" for key in keys)
    text = f"{named}: with {kept}'s value{'s' if len(keys) > 1 else ''} in {changed} the difference vanishes"
    had, others = ([option for option, has in ignored.items() if has is wanted] for wanted in (True, False))
    text = (
        f"{named}: {changed} has it from {', '.join(had)}; with {kept}'s value the difference vanishes"
        if had
        else text
    )
    text += "".join(f"; {kept} is given {option}" for option in others)
    options = " ".join(
        f"--set {shlex.quote(f'{name}={yaml_value(value)}')}"
        for name, value in settings.items()
        if value is not None
    )
    unset = ", ".join(f"`{name}`" for name, value in settings.items() if value is None)
    ways = [*([f"`{options}`"] if options else []), *([f"a recipe without {unset}"] if unset else [])]
    hint = (
        None
        if MASK in options
        else f"{' and '.join(ways)} gives {changed} the numbers of {kept} at this stage"
    )
    return Cause(keys, {}, is_shown=True, text=text, hint=hint)


def cause_in_tool(
    tool: str, name: str, options: Mapping[str, object], open_decisions: Sequence[str]
) -> Cause:
    """Return the cause of a difference from a configuration that no recipe shows: its `options` without which
    it vanishes, if any."""
    if not options:
        text = "; ".join(
            [
                f"no key: {tool} computes this otherwise than the recipe that `import` makes of {name}",
                *open_decisions,
            ]
        )
        return Cause([], {}, is_shown=False, text=text, hint=None)
    named = ", ".join(f"`{key}: {yaml_value(value)}`" for key, value in options.items())
    text = f"{named} of {name}: without it {tool} gives what the other side has"
    return Cause([], {}, is_shown=True, text=text, hint=None)


def cause_of_versions(
    stage: str, versions: dict[str, list[str | None]], keys: Sequence[DifferentKey]
) -> Cause:
    """Return the cause of a difference that vanishes with A's interpreter, and with A's values of `keys`."""
    named = (
        ", ".join(f"{name} {a} / {b}" for name, (a, b) in versions.items())
        or "equal, so it is something else of the interpreter"
    )
    also = f"; and `{'`, `'.join(key.key for key in keys)}`" if keys else ""
    hint = None
    if stage == "defaults":
        hint = (
            "a tool that names no dtype trains in another one: `torch_dtype`/`dtype` decides; a recipe "
            "here always has `model.dtype`"
        )
    text = f"versions: {named}{also}: with A's interpreter{' and values' if keys else ''} B gives the same"
    return Cause(list(keys), versions, is_shown=True, text=text, hint=hint)


def not_compared_lines(found: Iterable[tuple[str, str]]) -> list[str]:
    """Return `what: why` for each pair, in their order; those of the same reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for what, why in found:
        by_reason.setdefault(why, []).append(what)
    return [f"{', '.join(dict.fromkeys(each))}: {why}" for why, each in by_reason.items()]


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
