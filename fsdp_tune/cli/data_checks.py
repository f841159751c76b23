"""What `validate` looks at in tokenizer and data: that they are there, and that the first rows of each source can be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem

if TYPE_CHECKING:
    from fsdp_tune.data.format.inputs import Input
    from fsdp_tune.recipe.schema import Recipe

FIRST_ROWS = 200
SHOWN_BAD_ROWS = 5
OUT_OF_REACH = "hub-unreachable"


@dataclass(slots=True)
class DataFacts:
    vocabulary_size: int | None = None
    """Tokens of the tokenizer; None where it could not be loaded."""
    inputs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    problems: list[Problem] = field(default_factory=list[Problem])
    notices: list[Notice] = field(default_factory=list[Notice])
    unchecked: list[str] = field(default_factory=list[str])

    def take(self, error: FsdpTuneError) -> None:
        """What only the network keeps from being checked is no mistake of the recipe."""
        for problem in error.problems:
            if problem.code == OUT_OF_REACH:
                self.unchecked.append(problem.message)
            else:
                self.problems.append(problem)


def data_facts(recipe: Recipe) -> DataFacts:
    """Loads the tokenizer, opens every source, and reads its first rows; nothing is written."""
    from fsdp_tune.data.format.inputs import open_inputs
    from fsdp_tune.data.tokenise.tokenizer import load_encoder

    found = DataFacts()
    try:
        encoder = load_encoder(recipe)
    except FsdpTuneError as error:
        found.take(error)
        _find_sources(recipe, found)
        return found
    found.vocabulary_size = encoder.vocabulary_size
    found.notices.extend(encoder.notices)
    try:
        inputs = open_inputs(recipe, encoder)
    except FsdpTuneError as error:
        found.take(error)
        return found
    for opened in inputs:
        _first_rows(opened, found)
    return found


def _find_sources(recipe: Recipe, found: DataFacts) -> None:
    """Without a tokenizer the rows cannot be judged, but a missing file is missing."""
    from fsdp_tune.data.read.sources import find_source

    for key, entry in recipe.data.sources:
        try:
            find_source(entry, key)
        except FsdpTuneError as error:
            found.take(error)


def _first_rows(opened: Input, found: DataFacts) -> None:
    from fsdp_tune.data.format.inputs import bad_row_problem, raw_rows
    from fsdp_tune.data.read.json_rows import BadRow, RowError

    bad: list[tuple[int, BadRow]] = []
    seen = 0
    try:
        for row in islice(raw_rows([opened]), FIRST_ROWS):
            seen += 1
            if isinstance(row, tuple):
                bad.append(row)
                continue
            try:
                opened.settings.example(row.values)
            except RowError as error:
                bad.append((row.file, BadRow(row.number, str(error))))
    except FsdpTuneError as error:
        found.take(error)
    names = opened.source.names
    shown = [bad_row_problem(names[file - opened.first_file], row) for file, row in bad[:SHOWN_BAD_ROWS]]
    if bad:
        total = f"`{opened.source.key}`: {len(bad)} of the first {seen} rows cannot be used"
        hint = "mend them, or leave them out by `--set data.on_bad_row=skip`"
        found.problems.extend([*shown, Problem("bad-rows", total, hint=hint)])
    found.inputs.append(
        {
            "key": opened.source.key,
            "set": opened.set_name,
            "path": opened.entry.path,
            "format": opened.settings.format,
            "loss_on": opened.settings.loss_on,
            "rows_looked_at": seen,
        }
    )
