"""Requests to the processes that run models (`answer.score`, `answer.generate`), and what they return."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from fsdp_tune.answer.find_model import ModelToEvaluate

Measure = Literal["generate", "loss", "extension"]


@dataclass(frozen=True, slots=True)
class SetRequest:
    """A prepared set, and how its rows are scored."""

    path: str
    measure: Measure
    max_rows: int | None = None
    max_new_tokens: int = 0
    end_ids: list[int] = field(default_factory=list[int])
    """That end an answer, in addition to those of the model."""
    files: Sequence[str] = ()
    """Names of the source files."""


@dataclass(slots=True)
class Request:
    """The document on stdin of `fsdp_tune.answer.score`."""

    models: list[ModelToEvaluate]
    sets: dict[str, SetRequest]
    """By label."""
    vocabulary_size: int
    pad_id: int
    batch_size: int
    device: str
    dtype: str
    """auto (as stored) | fp32 | bf16 | fp16."""
    metric: dict[str, str] | None = None
    """The extension that `measure: extension` calls."""
    trust_remote_code: bool = False
    part: int = 0
    parts: int = 1
    """Of the batches of each set, every `parts`-th is scored, from `part` on: another process has the
    others."""
    is_of_run: bool = False
    """Whether a run evaluates a checkpoint: hints name keys of its recipe in place of options."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        raw = json.loads(text)
        sets = {label: SetRequest(**each) for label, each in raw["sets"].items()}
        return cls(**raw | {"models": [ModelToEvaluate(**each) for each in raw["models"]], "sets": sets})


@dataclass(frozen=True, slots=True)
class RowScore:
    """What the metric of an evaluation makes of a row: total and count, or of a generated answer its ids,
    which are not compared yet."""

    index: int
    total: float = 0.0
    count: float = 0.0
    ids: list[int] | None = None
    """Without those that end the answer."""
    is_cut: bool = False
    """Whether the answer has not ended."""
    prediction: str | None = None
    """The text of `ids`."""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are generated: the same for a chat and for a file of prompts."""

    max_new_tokens: int
    temperature: float
    """0: the most probable token, always."""
    top_p: float
    seed: int
    """Of what is drawn, with the prompt and its number among equal ones: an answer does not depend on the
    prompts before it."""
    shows_special_tokens: bool


@dataclass(slots=True)
class ModelsRequest:
    """The first line on stdin of `fsdp_tune.answer.generate`; each further line is a list of prompts for
    every model."""

    models: list[ModelToEvaluate]
    """The second is the base."""
    adapter_off: bool
    """Whether the base is the first model without its adapter, so that only one is loaded."""
    recipe: dict[str, Any]
    """What was trained on, with the tokenizer of the run or of the model."""
    data: dict[str, Any] | None
    """RUN/data.json `report`; None without a run."""
    settings: AnswerSettings
    device: str
    dtype: str
    trust_remote_code: bool

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        raw = json.loads(text)
        models = [ModelToEvaluate(**each) for each in raw["models"]]
        return cls(**raw | {"settings": AnswerSettings(**raw["settings"]), "models": models})


@dataclass(frozen=True, slots=True)
class ReferenceTokens:
    """Special tokens of the model that is compared with a server."""

    bos: str | None
    bos_id: int | None
    eos: str
    ends: dict[str, str]
    """Text by id, both as text, of the tokens that end an answer."""


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """A prompt as the model reads it, what a server is sent, and the model's greedy answer."""

    ids: list[int]
    text: str
    messages: list[dict[str, Any]] | None
    """In the form of OpenAI's API; None for a prompt that is a text."""
    tools: list[object] | None
    variables: dict[str, object]
    """Of the chat template."""
    answer_text: str
    lengths: list[int]
    """Characters of the answer up to each of its tokens."""
    margins: list[float]
    """Of the most probable token over the second, in nats, at each token of the answer."""
    is_ended: bool


Identified = tuple[int | None, str]
"""Id, if it is known, and text of a token."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """An answer whose log-probabilities the model computes, after the prompt `ids`."""

    ids: list[int]
    tokens: list[Identified]
    top: list[list[Identified]]
    """Tokens whose log-probabilities are wanted too, by position."""
    scores_prompt: bool = False
    """Whether those of `ids` are wanted too."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The model's log-probabilities of a server's answer, up to the first token that is not identified, and
    what it would have said."""

    tokens: list[int]
    texts: list[str]
    logprobs: list[float]
    best: list[int]
    """The most probable tokens; one more than `tokens`."""
    best_texts: list[str]
    best_logprobs: list[float]
    top: list[list[float | None]]
    """By position; None for a token that is not identified."""
    prompt_texts: list[str]
    prompt: list[float]
    """Of the tokens of the prompt from the second on; empty unless they were requested."""
