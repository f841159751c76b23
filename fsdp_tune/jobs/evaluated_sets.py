"""The rows of a set that a model is evaluated on, with the scores of each model and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp_tune.answer.examples import AnswerReader, read_examples, refuse_without_prompt
from fsdp_tune.answer.find_model import ModelToEvaluate
from fsdp_tune.answer.model_requests import RowScore, SetRequest
from fsdp_tune.answer.statistics import (
    Comparison,
    Estimate,
    Floats,
    Scores,
    bootstrap,
    mcnemar,
    paired_bootstrap,
    wilson,
)
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import Notice, failed_error, usage_error
from fsdp_tune.data.preparation import prepare as prepare_data
from fsdp_tune.data.store import RowStore
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder
from fsdp_tune.jobs.evaluated_recipes import recipe_of_set
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import EvaluateOptions
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.manifest import digest

EXACT_MATCH, PERPLEXITY = "exact_match", "perplexity"
FEW_ROWS = 10


@dataclass(frozen=True, slots=True)
class SetResult(JsonAnswer):
    """A metric on one set, of one model or of two."""

    rows: int
    cut_rows: int
    """Rows longer than `data.max_length`, or divided by packing; exact_match leaves them out."""
    tokens: int
    """Tokens that are scored: the targets, or the answers of the rows."""
    metric: Estimate
    loss: Estimate | None = None
    """With perplexity: its logarithm, in nats a token."""
    base: Estimate | None = None
    comparison: Comparison | None = None
    """Of the metric; with perplexity, of the loss."""


def prepare_set(
    recipe: Recipe, options: EvaluateOptions, label: str, encoder: TokenizerEncoder, observer: Observer
) -> PreparedSet:
    """Prepare the rows of `options.data` as in a run of the recipe. Raises: usage error for rows that cannot
    be scored."""
    (rows,) = prepared_rows(recipe_of_set(recipe, options), options, encoder, observer).values()
    return PreparedSet(label, rows, options, AnswerReader(encoder, options.answer))


def prepared_rows(
    recipe: Recipe, options: EvaluateOptions, encoder: TokenizerEncoder, observer: Observer
) -> dict[str, RowStore]:
    """Return each prepared set by its label."""
    observer.notices(encoder.notices)
    with observer.progress("tokenising", None, "rows") as bar:
        data = prepare_data(recipe, encoder, progress=bar, check_rows=False)
    observer.notices(data.as_notices())
    sets = (
        data.evals if options.data is None else {str(options.source.get("split") or options.data): data.train}
    )
    return {label: data.store(path) for label, path in sets.items()}


class PreparedSet:
    """The rows of a set with the scores of each model."""

    def __init__(self, label: str, rows: RowStore, options: EvaluateOptions, reader: AnswerReader) -> None:
        """Raises: usage error for rows that cannot be evaluated by the metric."""
        self.label, self._rows, self._options, self._reader = label, rows, options, reader
        self.examples = read_examples(rows, most=options.max_rows)
        self._is_match = options.metric == EXACT_MATCH
        self._used = [
            index for index, example in enumerate(self.examples) if not (self._is_match and example.is_cut)
        ]
        self._targets: dict[int, str] = {}
        self._found: list[dict[int, RowScore]] = []
        if self._is_match:
            refuse_without_prompt([self.examples[index] for index in self._used])
            self._targets = {index: reader.target(self.examples[index]) for index in self._used}
        if not self._used:
            message = f"all rows of `{label}` are longer than `data.max_length`, or divided by packing"
            raise usage_error("no-evaluation-data", message, hint="raise `data.max_length`")
        places = [self.examples[index].place for index in self._used]
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        self._row_of = np.array([numbers[place] for place in places])
        """Row of each example that is used: pieces of a long row are examples, and not independent of each
        other."""

    @property
    def digest(self) -> str:
        """Return a digest of the tokens and targets that are scored, in their order, wherever the rows are
        stored."""
        rows = [self.examples[index].row for index in self._used]
        return digest(
            *(np.asarray(part, np.int64).tobytes() for row in rows for part in (row.input_ids, row.labels))
        )

    @property
    def few_rows(self) -> list[Notice]:
        """Return a notice if the bootstrap has too few rows; Wilson's and McNemar's methods hold for any
        number."""
        rows = int(self._row_of.max()) + 1
        if self._is_match or rows >= FEW_ROWS:
            return []
        message = (
            f"the interval of `{self.label}` is too narrow: a bootstrap of {rows} rows "
            "underestimates the variance"
        )
        return [Notice("few-rows", message, hint=f"evaluate {FEW_ROWS} rows or more")]

    def cut_answers(self, models: Sequence[ModelToEvaluate]) -> list[Notice]:
        """Return a notice for each model whose answers did not all end: an answer that is cut seldom
        matches."""
        counts = [sum(found[index].is_cut for index in self._used) for found in self._found]
        ending = f"answers to `{self.label}` did not end within {self._options.max_new_tokens:,} tokens"
        return [
            Notice(
                "answers-cut",
                f"`{model.name}`: {count:,} of {len(self._used):,} {ending}",
                hint="raise `--max-new-tokens`",
            )
            for model, count in zip(models, counts, strict=True)
            if count
        ]

    @property
    def request(self) -> SetRequest:
        options, path, files = self._options, str(self._rows.path), self._rows.files
        if not self._is_match:
            return SetRequest(
                path, "loss" if options.metric == PERPLEXITY else "extension", options.max_rows, files=files
            )
        ends = sorted(self._reader.end_ids([self.examples[index] for index in self._used]))
        return SetRequest(path, "generate", options.max_rows, options.max_new_tokens, ends, files)

    def add(self, model: int, rows: Sequence[RowScore]) -> None:
        while len(self._found) <= model:
            self._found.append({})
        for row in rows:
            scored = row
            if row.ids is not None:
                text = self._reader.text(row.ids)
                is_equal = self._reader.compared(text) == self._targets.get(row.index)
                scored = replace(row, total=float(is_equal), count=1.0, prediction=text)
            self._found[model][row.index] = scored

    def scores(self, model: int) -> Scores:
        """Return the scores of each row; with exact_match, of each answer. Raises: FailedError if the metric
        counted nothing."""
        rows = [self._found[model][index] for index in self._used]
        totals, counts = (
            np.array([row.total for row in rows], float),
            np.array([row.count for row in rows], float),
        )
        if not self._is_match:
            totals, counts = self._by_row(totals), self._by_row(counts)
        scores = Scores(totals, counts)
        if not scores.counts.sum():
            raise failed_error(
                "extension-failed",
                f"the metric `{self._options.metric}` counted nothing in the set `{self.label}`",
            )
        return scores

    def _by_row(self, values: Floats) -> Floats:
        """Return the sum over the pieces of each row."""
        sums = np.zeros(int(self._row_of.max()) + 1)
        np.add.at(sums, self._row_of, values)
        return sums

    def result(self) -> SetResult:
        scores = [self.scores(model) for model in range(len(self._found))]
        estimates = [
            wilson(int(each.totals.sum()), len(each.totals)) if self._is_match else bootstrap(each)
            for each in scores
        ]
        comparison = None
        if len(scores) == 2:
            comparison = (
                mcnemar(scores[0].totals, scores[1].totals) if self._is_match else paired_bootstrap(*scores)
            )
        is_loss = self._options.metric == PERPLEXITY
        shown = [each.exponential() if is_loss else each for each in estimates]
        spans = [self.examples[index].answer for index in self._used]
        return SetResult(
            rows=len(scores[0].totals),
            cut_rows=len({example.place for example in self.examples if example.is_cut}),
            tokens=sum(end - begin for begin, end in spans)
            if self._is_match
            else sum(self.examples[index].targets for index in self._used),
            metric=shown[0],
            loss=estimates[0] if is_loss else None,
            base=shown[1] if len(shown) == 2 else None,
            comparison=comparison,
        )

    def lines(self, names: Sequence[str]) -> list[dict[str, object]]:
        """Return one object for each row and model, for `options.out`."""
        return [
            self._line(index, name, found[index])
            for index in self._used
            for name, found in zip(names, self._found, strict=True)
        ]

    def _line(self, index: int, name: str, row: RowScore) -> dict[str, object]:
        example = self.examples[index]
        begin, end = example.answer
        ids = example.row.input_ids.tolist()
        line: dict[str, object] = {
            "set": self.label,
            "row": str(example.where),
            "model": name,
            "prompt": self._reader.text(ids[:begin]),
        }
        line["target"] = self._reader.text(ids[begin:end])
        if row.prediction is not None:
            return line | {"prediction": row.prediction, "score": row.total}
        return line | {
            "total": row.total,
            "count": row.count,
            "score": row.total / row.count if row.count else None,
        }
