"""Open the recipe's data entries: find the source of each, its format, and the settings for converting its
rows."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.files import expanded
from fsdp_tune.data.bad_rows import bad_row_examples
from fsdp_tune.data.format.formats import FormatSettings, matching_formats, needed_columns, other_columns
from fsdp_tune.data.format.row_account import WORSE_ANSWERS, ignoring_option
from fsdp_tune.data.format.templates import KEY, suggestion, template_of_source
from fsdp_tune.data.read.readers import read_rows
from fsdp_tune.data.read.row_files import BadRow, RowError, kind_of
from fsdp_tune.data.read.shapes import delimiter_hint, shape_hint
from fsdp_tune.data.read.sources import RowSource, find_source
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.data.tokenise.rows import RawRow
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.row_formats import ROW_FORMATS
from fsdp_tune.recipe.schema.value_kinds import NO_TEMPLATE

TRAIN = "train"
"""The set of the training rows, among those of `data.eval` by their labels."""
PAIRS = (
    ("question", "answer"),
    ("prompt", "response"),
    ("prompt", "generation"),
    ("prompt", "chosen"),
    ("question", "response"),
    ("INSTRUCTION", "RESPONSE"),
    ("article", "summary"),
    ("message_1", "message_2"),
    ("input", "output"),
    ("problem", "solution"),
    ("problem", "generated_solution"),
)
"""Other names of a prompt and its completion in published data sets."""


@dataclass(frozen=True, slots=True)
class Input:
    source: RowSource
    settings: FormatSettings
    columns: tuple[str, ...]
    """Columns of the first row, after renaming."""
    set_name: str
    """`train`, or the label of an eval set."""
    overlong: str
    first_file: int
    """Index of its first file, counted over all inputs."""

    @property
    def entry(self) -> DataSource:
        return self.source.entry


def open_inputs(recipe: Recipe, encoder: Encoder, *, train_only: bool = False) -> list[Input]:
    """Open the entries of `data.train` and of a list in `data.eval`. Raises: FsdpTuneError with the problems
    of every entry."""
    inputs, errors = opened_inputs(recipe, encoder, train_only=train_only)
    if errors:
        raise FsdpTuneError(*(problem for error in errors for problem in error.problems))
    return inputs


def opened_inputs(
    recipe: Recipe, encoder: Encoder, *, train_only: bool = False
) -> tuple[list[Input], list[FsdpTuneError]]:
    """Return the entries that can be opened, and the errors of the others."""
    if not recipe.data.train:
        hint = "data.train: [{path: data.jsonl}]"
        return [], [
            usage_error(
                "no-data", "the recipe names no training data", hint=hint, where=Where(key="data.train")
            )
        ]
    inputs: list[Input] = []
    errors: list[FsdpTuneError] = []
    files = 0
    try:
        entries = _entries(recipe)
    except FsdpTuneError as error:
        return [], [error]
    for set_name, key, entry in entries:
        if train_only and set_name != TRAIN:
            continue
        try:
            opened = _open(recipe, entry, key, set_name, encoder, files)
        except FsdpTuneError as error:
            errors.append(error)
            continue
        inputs.append(opened)
        files += len(opened.source.names)
    return inputs, errors


class _Entry(NamedTuple):
    """A source of the recipe, the set that it belongs to, and its key in the recipe."""

    set_name: str
    key: str
    source: DataSource


def _entries(recipe: Recipe) -> list[_Entry]:
    entries = [_Entry(TRAIN, f"data.train[{index}]", entry) for index, entry in enumerate(recipe.data.train)]
    if not isinstance(recipe.data.eval, list):
        return entries
    labels: set[str] = set()
    for index, (label, entry) in enumerate(zip(recipe.data.eval_labels, recipe.data.eval, strict=True)):
        if label in labels or label == TRAIN:
            raise usage_error(
                "label-twice",
                f"two sets are labelled `{label}`",
                where=Where(key=f"data.eval[{index}].label"),
            )
        labels.add(label)
        entries.append(_Entry(label, f"data.eval[{index}]", entry))
    return entries


def _open(
    recipe: Recipe, entry: DataSource, key: str, set_name: str, encoder: Encoder, first_file: int
) -> Input:
    source = find_source(entry, key, streaming=recipe.data.streaming and set_name == TRAIN)
    try:
        first = _first_row(source)
        columns = tuple(
            column for column in first if _name_in_file(entry, column) not in recipe.data.ignore_columns
        )
        settings = _settings(recipe, source, first, columns, encoder)
    except FsdpTuneError as error:
        raise _with_shape(error, source) from error
    _check_kinds(source, settings.format)
    overlong = recipe.data.overlong
    if overlong == "auto":
        overlong = "split" if settings.format == "text" else "truncate"
    return Input(source, settings, columns, set_name, overlong, first_file)


def _with_shape(error: FsdpTuneError, source: RowSource) -> FsdpTuneError:
    """Return an error with the command that makes rows of the file, if it holds something else than rows."""
    first = source.files[0] if source.files else None
    hint = None if first is None else shape_hint(first.path, first.kind, _is_row, source.entry.split)
    if hint is None or error.problems[0].code not in _OF_SHAPE:
        return error
    return FsdpTuneError(replace(error.problems[0], hint=hint))


def _check_kinds(source: RowSource, format_: str) -> None:
    """Check that files of a directory with another ending than the first, such as a manifest, hold rows too.
    Raises: usage error."""
    others = {Path(file.path).suffix: file for file in reversed(source.files)}
    if not source.files or len(others) == 1 or not expanded(source.entry.path).is_dir():
        return
    suffix = Path(source.files[0].path).suffix
    for file in (file for other, file in others.items() if other != suffix):
        try:
            row = next((row for row in read_rows(file.path, file.kind) if not isinstance(row, BadRow)), None)
            fits = row is not None and all(
                column in _renamed(row[1], source.entry) for column in needed_columns(format_, row[1])
            )
        except (FsdpTuneError, KeyError):
            fits = False
        if not fits:
            message = f"it does not hold rows like those of {Path(source.files[0].path).name}"
            hint = f"read only the files with rows: `path: {source.entry.path}/*{suffix}`"
            raise usage_error(
                "columns-differ", message, where=Where(str(file.path), key=source.key), hint=hint
            )


_OF_SHAPE = frozenset({"no-format", "bad-row", "data-unreadable", "columns-differ", "no-such-column"})


def _is_row(columns: Collection[str]) -> bool:
    """Return whether columns fit a format, at least after renaming."""
    renamed = set(_renames(tuple(columns), {}).values())
    return bool(
        matching_formats(columns) or renamed - {"text"} or {"input", "preferred_output"} <= set(columns)
    )


def _first_row(source: RowSource) -> dict[str, object]:
    """Return the first readable row, with renamed columns. Raises: usage error (exit 2) if no row is
    readable."""
    bad: list[tuple[int, BadRow]] = []
    for file, row in source.read():
        if not isinstance(row, BadRow):
            return select(row[1], source.entry, source.names[file])
        bad.append((file, row))
        if len(bad) == 1000:
            break
    if bad:
        raise FsdpTuneError(*bad_row_examples(bad, source.names))
    hint = "write at least one row; docs/guide/data-formats.md shows a row of each format"
    raise usage_error("no-rows", "it has no rows", where=Where(source.names[0], key=source.key), hint=hint)


def select(row: dict[str, object], entry: DataSource, name: str) -> dict[str, Any]:
    """Return the row with the kept columns, renamed. Raises: usage error (exit 2) if a column is missing."""
    for old in (*(entry.columns or ()), *entry.rename_columns):
        if old not in row:
            raise usage_error(
                "no-such-column",
                f"it has no column `{old}`",
                hint=_other_columns(old, row),
                where=Where(name),
            )
    renamed = _renamed(row, entry)
    if (twice := _name_of_two(row, renamed, entry)) is not None:
        message = f"after `rename_columns` two columns have the name `{twice}`"
        raise usage_error("column-twice", message, where=Where(name))
    return renamed


def _name_of_two(row: Collection[str], renamed: Collection[str], entry: DataSource) -> str | None:
    """Return the name that two columns of a row have once they are renamed; None if none do."""
    columns = entry.columns or row
    if len(renamed) == len(columns):
        return None
    names = Counter(entry.rename_columns.get(column, column) for column in columns)
    return names.most_common(1)[0][0]


def _other_columns(wanted: str, row: Collection[str]) -> str:
    only = next(iter(row)) if len(row) == 1 else ""
    if sign := next((sign for sign in ";|\t," if sign in only), None):
        return (
            f"its one column is `{only}`: fields are separated by `,` in .csv files and by tabs in .tsv "
            f"files, not by `{sign}`"
        )
    close = difflib.get_close_matches(wanted, row, n=1)
    return f"did you mean `{close[0]}`?" if close else f"it has: {', '.join(row) or 'none'}"


def _renamed(row: dict[str, object], entry: DataSource) -> dict[str, object]:
    kept = {column: row[column] for column in entry.columns} if entry.columns else row
    return {entry.rename_columns.get(column, column): value for column, value in kept.items()}


def _settings(
    recipe: Recipe, source: RowSource, first: dict[str, object], columns: Sequence[str], encoder: Encoder
) -> FormatSettings:
    format_ = _format(source.entry.format or recipe.data.format, source, first, columns)
    held: object = first[needed_columns(format_, columns)[0]]
    is_nested = isinstance(held, dict) or (
        isinstance(held, list) and not any(isinstance(each, dict) for each in cast("list[object]", held))
    )
    if is_nested and not ROW_FORMATS[format_].marks_trained and source.files:
        column = needed_columns(format_, columns)[0]
        message = (
            f"column `{_name_in_file(source.entry, column)}` holds {kind_of(cast('object', held))} "
            "instead of one value"
        )
        problem = usage_error("bad-row", message, where=Where(source.names[0], key=source.key))
        if _with_shape(problem, source) is not problem:
            raise problem
    return format_settings(recipe, source.entry, source.key, format_, encoder, columns)


def format_settings(
    recipe: Recipe, entry: DataSource, key: str, format_: str, encoder: Encoder, columns: Sequence[str] = ()
) -> FormatSettings:
    """Return how rows of an entry are converted. Raises: usage error for a chat without a template, or a
    `loss_on` that does not fit."""
    data = recipe.data
    where = Where(key=key)
    template_key = f"{key}.chat_template" if entry.chat_template else KEY
    template = template_of_source(entry.chat_template, template_key, encoder.chat_template)
    if ROW_FORMATS[format_].holds == "chat" and template is None:
        lacking = (
            f"`{template_key}` is `{NO_TEMPLATE}`"
            if entry.chat_template
            else "the tokenizer has no chat template"
        )
        raise usage_error(
            "no-chat-template",
            f"`{entry.path}` holds conversations, and {lacking}",
            where=where,
            hint=suggestion(encoder.encode, template_key),
        )
    wanted = entry.loss_on or data.loss_on
    possible, marks_trained = ROW_FORMATS[format_].loss_on, ROW_FORMATS[format_].marks_trained
    if wanted != "auto" and wanted not in possible:
        allowed = (
            "mark what is trained themselves"
            if marks_trained
            else f"can be trained on: {', '.join(possible)}"
        )
        raise usage_error(
            "loss-on",
            f"`loss_on: {wanted}` does not fit `{entry.path}`: {format_} rows {allowed}",
            where=where,
        )
    append_eos = not marks_trained if data.append_eos == "auto" else data.append_eos
    loss_on = possible[0] if wanted == "auto" else wanted
    names = {new: old for old, new in entry.rename_columns.items()}
    return FormatSettings(
        format_,
        loss_on,
        template,
        data.separator,
        append_eos,
        encoder.vocabulary_size,
        data.roles,
        data.special_tokens_in_content,
        names,
        template_key,
        tuple(sorted(data.ignore_columns)),
        other_columns(format_, columns),
    )


def _name_in_file(entry: DataSource, column: str) -> str:
    return next((old for old, new in entry.rename_columns.items() if new == column), column)


def _format(wanted: str, source: RowSource, first: dict[str, object], columns: Sequence[str]) -> str:
    where = Where(key=source.key)
    if wanted != "auto":
        missing = [column for column in needed_columns(wanted, columns) if column not in columns]
        if missing:
            raise usage_error(
                "no-such-column",
                f"`{source.entry.path}` has no column `{missing[0]}`, which the format {wanted} needs",
                where=where,
                hint=f"it has: {', '.join(columns)}; rename columns with `rename_columns`",
            )
        return wanted
    found = matching_formats(columns)
    if len(found) == 1:
        return found[0]
    if found:
        raise usage_error(
            "two-formats",
            f"`{source.entry.path}` looks like {' and like '.join(found)}: its columns are "
            f"{', '.join(columns)}",
            where=where,
            hint=_choice(sorted(found, key=lambda name: name == "text")),
        )
    message = f"`{source.entry.path}` fits no format: its columns are {', '.join(columns)}"
    only = columns[0] if len(columns) == 1 else ""
    sign = next((sign for sign in ";|\t," if sign in only), None)
    if sign is not None and source.files and source.files[0].kind in ("csv", "tsv"):
        raise usage_error("no-format", message, where=where, hint=delimiter_hint(source.files[0].path, sign))
    raise usage_error("no-format", message, where=where, hint=_renaming_hint(columns, first))


def _choice(formats: Sequence[str]) -> str:
    """Return the hint for rows that fit several formats; the first is that whose answers alone are
    trained."""
    others = " and ".join(f"`{name}`" for name in formats[1:])
    all_of_it = ", which trains every token" if formats[1:] == ["text"] else ""
    return (
        f"name one: `--set data.format={formats[0]}` (or {others}{all_of_it}); the columns of the other "
        "are then ignored"
    )


def _renaming_hint(columns: Sequence[str], first: dict[str, object]) -> str:
    """Return a hint with the columns to rename, so that a file that fits no format fits one; those of
    preferences to the better answer."""
    renames = _renames(columns, first)
    if {"input", "preferred_output"}.issubset(columns):  # OpenAI's preferences: the question is below `input`
        program = "{prompt: .input.messages, completion: .preferred_output, tools: .input.tools}"
        return f"write the better answers as rows of their own: `jq -c '{program}' OLD.jsonl > NEW.jsonl`"
    if not renames:
        return (
            "a format needs `prompt` and `completion`, `instruction` and `output`, `messages`, or `text`: "
            "rename columns with `rename_columns: {OLD: NEW}` of the source, or write such rows"
        )
    shown = ", ".join(f"{old}: {new}" for old, new in renames.items() if old != new)
    hint = f"rename them, for example `rename_columns: {{{shown}}}`"
    if renames.keys() >= {"query", "answers"}:
        return (
            f"{hint}: calls are then trained as their text; as `tool_calls` of `messages` they follow "
            "the chat template"
        )
    if "messages" in renames.values():
        hint += " (or to `text`, if they are no lists of messages)"
    worse = [column for column in columns if column in WORSE_ANSWERS]
    return f"{hint}, and ignore the worse answers: `{ignoring_option(worse)}`" if worse else hint


def _renames(columns: Sequence[str], first: dict[str, object]) -> dict[str, str]:
    """Return what to rename; {} if no known names are among the columns. `first` is the first row."""
    if {"query", "answers"}.issubset(columns):  # xLAM: its `tools` are those of the row here too
        return {"query": "instruction", "answers": "output"}
    if {"system", "chat"}.issubset(columns):  # glaive: the functions are a text before the conversation
        return {"system": "prompt", "chat": "completion"}
    pair = next((pair for pair in PAIRS if all(column in columns for column in pair)), None)
    system = next((column for column in ("system", "system_prompt") if column in columns), None)
    if pair and isinstance(first.get(pair[0]), list):  # Nemotron: messages, and the answer to the last
        return {pair[0]: "prompt", pair[1]: "completion"} | ({system: "system"} if system else {})
    if pair and system:  # prompts and completions are text, and have no system message
        return {pair[0]: "instruction", pair[1]: "output", system: "system"}
    if pair:
        return {pair[0]: "prompt", pair[1]: "completion"}
    if "chosen" in columns and "instruction" in columns:
        return {"chosen": "output"}
    better = next((column for column in ("chosen", "chosen_messages") if column in columns), None)
    if better:
        return {better: "messages"}
    return {columns[0]: "text"} if len(columns) == 1 and columns[0] != "prompt" else {}


def raw_rows(inputs: Sequence[Input]) -> Iterator[RawRow | tuple[int, BadRow]]:
    """Yield the rows of all inputs with renamed columns; bad rows with the index of their file."""
    for number, opened in enumerate(inputs):
        wanted, last_file = opened.entry.max_rows, -1
        for taken, (file, row) in enumerate(opened.source.read()):
            if wanted is not None and taken >= wanted:
                break
            if isinstance(row, BadRow):
                yield opened.first_file + file, row
                continue
            name = opened.source.names[file]
            try:
                values = (
                    select(row[1], opened.entry, name)
                    if file != last_file
                    else kept_columns(row[1], opened.entry)
                )
            except RowError as error:
                yield opened.first_file + file, error.bad_row(row[0])
                continue
            if file != last_file:
                _check_same_columns(opened, name, values)
                last_file = file
            yield RawRow(number, opened.first_file + file, row[0], values)


def kept_columns(row: dict[str, object], entry: DataSource) -> dict[str, object]:
    """Do `select` for the later rows of a file. Raises: RowError, so that a missing column, or two of one
    name, are a problem of this row alone."""
    if not entry.columns and not entry.rename_columns:
        return row
    missing = next(
        (column for column in (*(entry.columns or ()), *entry.rename_columns) if column not in row), None
    )
    if missing is not None:
        raise RowError(f"it has no column `{missing}`; it has {', '.join(row) or 'none'}")
    renamed = _renamed(row, entry)
    if (twice := _name_of_two(row, renamed, entry)) is not None:
        raise RowError(f"after `rename_columns` two columns have the name `{twice}`")
    return renamed


def _check_same_columns(opened: Input, name: str, values: dict[str, object]) -> None:
    """Check that every file of an entry has the columns of its format. Raises: usage error."""
    if not all(column in values for column in needed_columns(opened.settings.format, values)):
        raise usage_error(
            "columns-differ",
            f"its columns are {', '.join(values)}, and those of {opened.source.names[0]} are "
            f"{', '.join(opened.columns)}",
            where=Where(name),
            hint="put files with other columns in a separate entry",
        )
