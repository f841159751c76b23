"""The account of the training data: rows read, kept and left out with reasons, supervised tokens, EOS and BOS
tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np

from fsdp_tune.data.format.row_account import account_line
from fsdp_tune.data.inputs import TRAIN
from fsdp_tune.data.packing import PackedRows
from fsdp_tune.data.report import DataReport, DecodedExample, InputAccount, NamedRows, SetAccount, Spread
from fsdp_tune.data.sets import NAMED_ROWS, Cut, Examples
from fsdp_tune.data.store import IGNORE_INDEX, Int64, Row, RowStore
from fsdp_tune.data.tokenise.encoder_protocol import Encoder


def set_account(cut: Cut, packed: PackedRows, names: Sequence[str], max_length: int) -> SetAccount:
    rows = len(packed.rows) - 1
    tokens = int(cut.segments[:, 1].sum())
    return SetAccount(
        rows=rows,
        examples=len(cut.segments),
        tokens=tokens,
        supervised_tokens=int(cut.supervised.sum()),
        supervised_tokens_per_example=spread(cut.supervised),
        tokens_per_example=spread(cut.segments[:, 1]),
        cut_by_packing=len(packed.cuts),
        truncated=len(cut.truncated),
        first_truncated=rows_named(cut.truncated, names).first,
        split=cut.split,
        dropped_too_long=rows_named(cut.dropped, names),
        dropped_nothing_left=rows_named(cut.emptied, names),
        fill=tokens / (rows * max_length) if rows else 0.0,
    )


def source_accounts(count: int, available: Examples, drawn: Examples, pieces: Cut) -> list[InputAccount]:
    """Return the share of each of `count` sources in an epoch: rows, repeats of each row, tokens and their
    share of the set.

    `available` are the examples of a set, `drawn` those of one epoch, `pieces` the segments of `drawn` after
    cutting.
    """
    rows = np.bincount(available.sources, minlength=count)
    drawn_rows = np.bincount(drawn.sources, minlength=count)
    tokens = np.bincount(pieces.sources, pieces.segments[:, 1], minlength=count)
    supervised = np.bincount(pieces.sources, pieces.supervised, minlength=count)
    return [
        InputAccount(
            rows=int(rows[source]),
            rows_drawn=int(drawn_rows[source]),
            repeats=float(drawn_rows[source] / max(rows[source], 1)),
            tokens=int(tokens[source]),
            supervised_tokens=int(supervised[source]),
            share=float(tokens[source] / max(tokens.sum(), 1)),
        )
        for source in range(count)
    ]


def mean_tokens(report: DataReport) -> list[float]:
    """Return the tokens of a mean row of each training source; of one that is not drawn, those of a mean row
    of all."""
    sources = [account for account in report.inputs if account.set == TRAIN]
    drawn = sum(account.rows_drawn for account in sources)
    of_all = sum(account.tokens for account in sources) / max(drawn, 1)
    return [account.tokens / account.rows_drawn if account.rows_drawn else of_all for account in sources]


def source_lines(report: DataReport) -> list[str]:
    """Return one line for each training source about its share of an epoch; no lines for a single source, and
    for a stream one line on what was read of it."""
    sources = [given for given in report.inputs if given.set == TRAIN]
    if rows := report.stream_sample_rows:
        return [f"a stream: these figures are of the first rows of each source, at most {rows:,}"]
    if len(sources) < 2:
        return []
    return [
        f"{given.name}: {given.rows:,} rows, each drawn {given.repeats:,.4g} times an epoch, "
        f"{given.tokens:,} tokens ({given.share:.1%} of the training tokens)"
        for given in sources
    ]


def duplicate_lines(report: DataReport) -> list[str]:
    """Return the line on duplicates in the training set; no line if there are none. Of a stream they are not
    counted."""
    account = report.sets[TRAIN]
    same = "the tokens and targets of"
    if report.stream_sample_rows:
        return ["duplicates of rows are not counted in a stream"]
    if dropped := account.dropped_duplicates.rows:
        return [
            f"{dropped:,} training rows with {same} an earlier or held-out one were left out; "
            f"{account.dropped_duplicates.describe_first()}"
        ]
    if repeated := account.repeated.rows:
        how = "`data.drop_duplicates: true` leaves them out"
        return [
            f"{repeated:,} training rows have {same} an earlier one ({how}); "
            f"{account.repeated.describe_first()}"
        ]
    return []


def key_lines(report: DataReport) -> list[str]:
    """Return one line for each source: which keys of its rows are read, and which are ignored."""
    stored = [(given, account_line(given.keys)) for given in report.inputs]
    return [f"{given.name}: {line}" for given, line in stored if line]


def spread(values: Int64) -> Spread:
    """Return minimum, median and maximum; zeros if there are no values."""
    return Spread(int(values.min()), float(np.median(values)), int(values.max())) if len(values) else Spread()


def rows_named(origins: Int64, names: Sequence[str]) -> NamedRows:
    return NamedRows(
        len(origins), tuple(f"{names[file]}:{row}" for file, row in origins[:NAMED_ROWS].tolist())
    )


def rows_renamed(stored: Any, names: Mapping[str, str]) -> Any:
    """Return a report or its notices as JSON, with rows (`file:row`) by the `names` that their files have
    now, by their old names."""
    if not names:
        return stored
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    row = re.compile(rf"(?<![^\s`(])({'|'.join(longest_first)})(?=:\d)")

    def renamed(value: Any) -> Any:
        match value:
            case dict():
                return {name: renamed(each) for name, each in cast(dict[str, Any], value).items()}
            case list():
                return [renamed(each) for each in cast(list[Any], value)]
            case str():
                return row.sub(lambda found: names[found[1]], value)
            case _:
                return value

    return renamed(stored)


@dataclass(frozen=True, slots=True)
class SourceSample:
    """Examples of one training source, as packing and `overlong` left them."""

    account: InputAccount
    lengths: Int64
    """Number of tokens of each example or part of one."""
    cut: int
    """Number of them that are a part of an example."""
    examples: list[DecodedExample]
    """Some of them."""


def sample_sources(
    store: RowStore, inputs: Sequence[InputAccount], encoder: Encoder, count: int
) -> list[SourceSample]:
    """Return `count` examples of each training source, spread evenly; `inputs` are those of the report."""
    segments = store.segments()
    first_of_row = np.searchsorted(segments.rows, np.arange(len(store)))
    samples: list[SourceSample] = []
    files = 0
    for account in inputs:
        own = np.flatnonzero((segments.files >= files) & (segments.files < files + account.files))
        files += account.files
        if account.set != TRAIN:
            continue
        examples: list[DecodedExample] = []
        for at in spread_indices(len(own), count):
            segment = int(own[at])
            row = int(segments.rows[segment])
            examples.append(decoded_row(store, row, encoder)[segment - int(first_of_row[row])])
        samples.append(
            SourceSample(account, segments.lengths[own], int(segments.is_cut[own].sum()), examples)
        )
    return samples


def spread_indices(length: int, count: int) -> list[int]:
    """Return at most `count` indices below `length`, spread evenly."""
    count = min(count, length)
    return [(2 * at + 1) * length // (2 * count) for at in range(count)]


def decoded_row(store: RowStore, row: int, encoder: Encoder) -> list[DecodedExample]:
    examples = zip(store.origins(row), examples_of(store[row]), strict=True)
    return [_decoded(example, encoder, f"{file}:{number}") for (file, number), example in examples]


def _decoded(row: Row, encoder: Encoder, where: str) -> DecodedExample:
    """Return the row as text, in runs that are trained or not, with their ids. Joined, the runs are the
    decoded row.

    Tokens are decoded from the beginning of the row each time, because some tokenizers write the space of a
    token only if another token precedes it.
    """
    flags = row.labels != IGNORE_INDEX
    runs: list[tuple[str, bool]] = []
    ids: list[list[int]] = []
    tokens: list[int] = row.input_ids.tolist()
    done, begin = "", 0
    for trained, run in groupby(flags.tolist()):
        end = begin + sum(1 for _ in run)
        text = encoder.decode(tokens[:end])
        runs.append((text[len(done) :], trained))
        ids.append(tokens[begin:end])
        done, begin = text, end
    return DecodedExample(where, runs, ids)


def examples_of(row: Row) -> list[Row]:
    """Return the examples of a packed row, each as a row."""
    ends = np.cumsum(row.lengths)
    return [
        Row(row.input_ids[end - length : end], row.labels[end - length : end], (length,), row.row_id)
        for end, length in zip(ends.tolist(), row.lengths, strict=True)
    ]
