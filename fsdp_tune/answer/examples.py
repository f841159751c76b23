"""Rows of an evaluation with their prompts and answers, the requests to the processes that run models, and the statistics of the answers.

A row has a total and a count. A metric is the sum of the totals over the sum of the counts: rows that match over rows, token losses over
tokens. So rows are the units that are resampled, and tokens of one row stay together. Levels of intervals are 95 %.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.core.files import expanded
from fsdp_tune.core.hub import MODEL_FILES, HubResource, snapshot
from fsdp_tune.core.tensors.file_formats import CONFIG_FILE
from fsdp_tune.data.account import examples_of
from fsdp_tune.data.store import IGNORE_INDEX, Row, RowStore
from fsdp_tune.data.tokenise.encoder import Encoder, closing_tokens, end_of_text
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.run.base_model import BASE_FILE, BaseModel, open_base
from fsdp_tune.run.directory import RunDir, checkpoint_step, run_of
from fsdp_tune.run.written_files import require_unchanged_output


@dataclass(frozen=True, slots=True)
class EvaluatedExample:
    row: Row
    """Its ids and labels."""
    where: Where
    """Its file and line."""
    is_cut: bool
    """Whether tokens were cut off at `data.max_length`."""

    @property
    def answer(self) -> tuple[int, int]:
        """Begin and end of the last run of trained tokens. The tokens before it are the prompt."""
        trained = np.flatnonzero(self.row.labels != IGNORE_INDEX)
        end = int(trained[-1]) + 1
        before = np.flatnonzero(self.row.labels[:end] == IGNORE_INDEX)
        return int(before[-1]) + 1, end

    @property
    def targets(self) -> int:
        return int(np.count_nonzero(self.row.labels != IGNORE_INDEX))


def read_examples(rows: RowStore, *, most: int | None = None) -> list[EvaluatedExample]:
    """Return the first `most` examples of a prepared set in the order in which they were read, packed or not; all pieces of each."""
    segments = rows.segments()
    order = np.lexsort((segments.starts, segments.examples))
    chosen = np.isin(segments.examples, np.unique(segments.examples)[:most])
    first_of_row = np.searchsorted(segments.rows, segments.rows)
    return [_example(rows, int(segments.rows[at]), int(at - first_of_row[at])) for at in order if chosen[at]]


def _example(store: RowStore, index: int, position: int) -> EvaluatedExample:
    file, line = store.origins(index)[position]
    return EvaluatedExample(examples_of(store[index])[position], Where(file, line), not store.are_complete(index)[position])


def refuse_without_prompt(examples: Sequence[EvaluatedExample]) -> None:
    """Refuse rows whose answer begins at the first or second token, which in most tokenizers is after BOS. Raises: usage error."""
    for example in examples:
        if example.answer[0] < 2:
            raise usage_error(
                "no-prompt",
                "the row has no prompt: all of it is trained, so there is nothing to answer",
                where=example.where,
                hint="exact_match needs rows with prompts (prompt_completion, alpaca, messages); --metric perplexity takes any row",
            )


class AnswerReader:
    """Turns tokens into the text that is compared: without special tokens at the end, or only the match of a pattern."""

    def __init__(self, encoder: Encoder, pattern: str | None) -> None:
        """Raises: usage error for a pattern that is not a regular expression."""
        self._encoder = encoder
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise usage_error("answer-pattern", f"`--answer {pattern}` is not a regular expression: {error}") from error

    def text(self, ids: Sequence[int]) -> str:
        """Return the decoded ids, without the special tokens at their end."""
        return self._encoder.decode(list(ids[: end_of_text(ids, self._encoder)]))

    def end_ids(self, examples: Sequence[EvaluatedExample]) -> set[int]:
        """Return the tokens after which a generated answer ends: EOS, and the token that ends the answers of the rows."""
        found = {self._encoder.eos_id}
        for example in examples:
            begin, end = example.answer
            found |= closing_tokens(example.row.input_ids[begin:end].tolist(), self._encoder)
        return found

    def compared(self, text: str) -> str | None:
        """Return what is compared: the text without white space around it, or the first match of the pattern; None without a match."""
        if self._pattern is None:
            return text.strip()
        match = self._pattern.search(text)
        found = None if match is None else match[1 if match.re.groups else 0]  # None also if an optional group takes no part
        return None if found is None else found.strip()

    def target(self, example: EvaluatedExample) -> str:
        """Return the answer of the row as it is compared. Raises: usage error if the pattern is not in it."""
        begin, end = example.answer
        found = self.compared(self.text(example.row.input_ids[begin:end].tolist()))
        if found is None:
            message = "`--answer` matches nothing in the answer of this row"
            raise usage_error("answer-pattern", message, where=example.where, hint=r"for GSM8K: --answer '#### (.*)'")
        return found


Measure = Literal["generate", "loss", "extension"]
OF_A_RUN = ("merged", "merged-quantised", "adapter")
PROMPT_TYPES = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")
"""Types of PEFT whose values PEFT's wrapper adds to the input (`PeftConfig.is_prompt_learning`)."""


@dataclass(frozen=True, slots=True)
class ModelToEvaluate:
    name: str
    """As the user named it."""
    weights: str
    """Directory or hub id of a complete model."""
    adapter: str | None = None
    """Directory of a PEFT adapter on `weights`."""
    revision: str = "main"
    """Of `weights` on the hub: the one that the adapter was trained on."""

    @property
    def trained_base(self) -> BaseModel | None:
        """What the adapter's base.json records; None for models and for adapters of other tools."""
        return BaseModel.read(Path(self.adapter) / BASE_FILE) if self.adapter is not None else None

    @property
    def tokenizer(self) -> str:
        """Directory or hub id with the tokenizer: the adapter's own, if it has one."""
        has_own = self.adapter is not None and (Path(self.adapter) / "tokenizer_config.json").is_file()
        return self.adapter if self.adapter is not None and has_own else self.weights


def find_model(name: str) -> ModelToEvaluate:
    """Return the model that is named: a directory of Hugging Face, RUN (its merged model), RUN/adapter, or else a hub id.

    Raises: usage error for a directory without a model, and for a run that is not merged.
    """
    path = expanded(name)
    if path.is_dir():
        require_unchanged_output(path / "merged" if run_of(path) is not None else path)
    if not path.is_dir():
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise usage_error("model-not-found", f"there is no model directory `{name}`", hint="give a model directory, a run or a hub id")
        return _of_hub(name)
    if (path / CONFIG_FILE).is_file() and run_of(path) is None:
        return _adapter(name, path)
    if run_of(path) is None:
        if not (path / "config.json").is_file():
            raise usage_error(
                "model-not-found", f"`{name}` has no config.json", hint="give a directory that transformers can load, or a run"
            )
        return ModelToEvaluate(name, str(path))
    if checkpoint_step(path) is None and (path / "merged" / "config.json").is_file():
        return ModelToEvaluate(name, str(path / "merged"))
    options = "" if checkpoint_step(path) is None else f" --step {checkpoint_step(path)}"
    run = path if checkpoint_step(path) is None else path.parent
    hint = f"`fsdp-tune merge-checkpoint {run}{options}` writes one"
    raise usage_error("run-not-merged", f"`{name}` holds sharded checkpoints, and no merged model", hint=hint)


def _of_hub(name: str) -> ModelToEvaluate:
    """Return a repository's model, or its adapter: loaded by name, transformers would leave out what base.json records."""
    repository = HubResource("model", name, "MODEL", "model-not-found")
    if not (snapshot(repository, (CONFIG_FILE, BASE_FILE)) / CONFIG_FILE).is_file():
        return ModelToEvaluate(name, name)
    return _adapter(name, snapshot(repository, (*MODEL_FILES, "*.bin")))


def _adapter(name: str, folder: Path) -> ModelToEvaluate:
    """Return an adapter with its base. Raises: usage error if it is not one of layers, or if its base is unknown or has changed."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        message = f"`{name}`: its {CONFIG_FILE} cannot be read: {error}"
        raise usage_error("model-not-found", message, hint="give the directory that PEFT wrote") from error
    if config.get("peft_type") in PROMPT_TYPES:
        message = f"it trains a prompt ({config['peft_type']}), which is not part of the model's layers"
        raise usage_error("model-not-found", f"`{name}` cannot be evaluated: {message}", hint="give an adapter of layers, such as LoRA")
    base = open_base(config, folder / BASE_FILE)
    if base.name is None:
        message = f"{CONFIG_FILE} does not name the base model"
        raise usage_error("model-not-found", f"`{name}`: {message}", hint="set `base_model_name_or_path` in it to a directory or hub id")
    if Path(base.name).is_dir():
        require_unchanged_output(Path(base.name))
    correct = f"correct `base_model_name_or_path` in {folder / CONFIG_FILE}"
    if can_only_be_a_path(base.name) and not Path(base.name).is_dir():
        raise usage_error("model-not-found", f"`{name}`: there is no directory `{base.name}`, its base", hint=correct)
    if Path(base.name).is_dir() and base.has_other_weights(Path(base.name)):
        message = f"`{name}`: the weights of {base.name} are not those that the adapter was trained on"
        raise usage_error("base-changed", message, ways_out=("restore the weights that it was trained on", correct))
    return ModelToEvaluate(name, base.name, str(folder), base.revision or "main")


def run_of_model(model: ModelToEvaluate) -> RunDir | None:
    """Return the run that wrote a model: RUN, RUN/merged, RUN/merged-quantised or RUN/adapter; None for any other."""
    path = Path(model.adapter or model.weights)
    return run_of(path.parent) if path.name in OF_A_RUN else None


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
    """Of the batches of each set, every `parts`-th is scored, from `part` on: another process has the others."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        raw = json.loads(text)
        sets = {label: SetRequest(**each) for label, each in raw["sets"].items()}
        return cls(**raw | {"models": [ModelToEvaluate(**each) for each in raw["models"]], "sets": sets})


@dataclass(frozen=True, slots=True)
class RowScore:
    """What the metric of an evaluation makes of a row: total and count, or of a generated answer its ids, which are not compared yet."""

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
    """Of what is drawn, with the prompt and its number among equal ones: an answer does not depend on the prompts before it."""
    shows_special_tokens: bool


@dataclass(slots=True)
class ModelsRequest:
    """The first line on stdin of `fsdp_tune.answer.generate`; each further line is a list of prompts for every model."""

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
    """The model's log-probabilities of a server's answer, up to the first token that is not identified, and what it would have said."""

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


Z = 1.959963984540054
"""Quantile of the normal distribution at 97.5 %."""
RESAMPLES = 2000
SEED = 0
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """Total and count of each row."""

    totals: Floats
    counts: Floats

    def value(self) -> float:
        return float(self.totals.sum() / self.counts.sum())


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def exponential(self) -> Estimate:
        """Return a loss as a perplexity: the interval of a monotonic function has the function's values as its ends."""
        return Estimate(*(math.exp(min(each, 700.0)) for each in (self.value, self.low, self.high)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first model minus the second on the same rows."""

    difference: float
    low: float
    high: float
    p: float
    """Probability of such a difference, in either direction, if the models were equally good."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def wilson(matches: int, rows: int) -> Estimate:
    """Return a proportion with its Wilson score interval (Wilson, 1927), which holds for few rows and for proportions near 0 and 1."""
    share = matches / rows
    middle = (share + Z**2 / (2 * rows)) / (1 + Z**2 / rows)
    half = Z / (1 + Z**2 / rows) * math.sqrt(share * (1 - share) / rows + Z**2 / (4 * rows**2))
    return Estimate(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def bootstrap(scores: Scores) -> Estimate:
    """Return a quotient of sums with its percentile interval over resampled rows."""
    low, high = np.nanquantile(_resampled(scores)[0], (0.025, 0.975))
    return Estimate(scores.value(), float(low), float(high))


def mcnemar(first: Floats, second: Floats) -> Comparison:
    """Compare two proportions on the same rows: the exact McNemar test, and Newcombe's interval of the difference.

    `first` and `second` are 1 where a row matches. Newcombe, Statistics in Medicine 17 (1998) 2635, method 10.
    """
    rows = len(first)
    both, only_first = int((first * second).sum()), int((first * (1 - second)).sum())
    only_second = int(second.sum()) - both
    neither = rows - both - only_first - only_second
    one, two = wilson(both + only_first, rows), wilson(both + only_second, rows)
    product = math.sqrt((both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither))
    excess = both * neither - only_first * only_second
    correlation = (max(excess - rows / 2, 0.0) if excess > 0 else excess) / product if product else 0.0

    def distance(left: float, right: float) -> float:
        return math.sqrt(max(left**2 - 2 * correlation * left * right + right**2, 0.0))

    difference = one.value - two.value
    low = difference - distance(one.value - one.low, two.high - two.value)
    high = difference + distance(one.high - one.value, two.value - two.low)
    return Comparison(difference, low, high, _two_sided(min(only_first, only_second), only_first + only_second))


def _two_sided(smaller: int, trials: int) -> float:
    """Return the probability that fair coins fall as unevenly as `smaller` of `trials`, or more so."""
    tail = sum(math.comb(trials, count) for count in range(smaller + 1))
    return min(1.0, 2 * tail / 2**trials)


def paired_bootstrap(first: Scores, second: Scores) -> Comparison:
    """Compare two quotients of sums on the same rows: both are resampled with the same rows."""
    one, two = _resampled(first, second)
    differences = one - two
    low, high = np.nanquantile(differences, (0.025, 0.975))
    # A resample in which a metric counts nothing shows no difference, so it is on both sides.
    above, below = int((~(differences < 0)).sum()), int((~(differences > 0)).sum())
    # Resamples of few rows vary too little. Exchanging the models in each row (a permutation test) gives no smaller p than this; in a row
    # with equal scores that changes nothing.
    least = 2.0 ** (1 - np.count_nonzero((first.totals != second.totals) | (first.counts != second.counts)))
    p = min(1.0, max(least, 2 * (min(above, below) + 1) / (RESAMPLES + 1)))
    return Comparison(first.value() - second.value(), float(low), float(high), p)


def _resampled(*models: Scores) -> list[Floats]:
    """Return the quotient of each model in each resample; all models have the same rows in it."""
    rows = len(models[0].totals)
    generator = np.random.Generator(np.random.PCG64(SEED))
    found = np.empty((len(models), RESAMPLES))
    for resample in range(RESAMPLES):
        times = np.bincount(generator.integers(0, rows, rows), minlength=rows)
        for index, scores in enumerate(models):
            count = times @ scores.counts
            found[index, resample] = times @ scores.totals / count if count else np.nan
    return list(found)
