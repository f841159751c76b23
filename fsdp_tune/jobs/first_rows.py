"""Read the first rows of each data source as a preparation does, and judge those that cannot be used by the
same rule."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.bad_rows import BadRows
from fsdp_tune.data.format.row_account import KeyUse, key_account
from fsdp_tune.data.inputs import Input, raw_rows
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.report import KeyAccount
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.data.tokenise.rows import RawRow, Tokeniser, content_bytes

FIRST_ROWS = 200
RENDERED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedSource(JsonAnswer):
    """The first rows of a data source."""

    key: str
    set: str
    path: str
    format: str
    loss_on: str
    rows_looked_at: int
    keys: list[KeyAccount]


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first rows of a source, and what a preparation would find in them."""

    checked: CheckedSource
    bad: list[tuple[int, BadRow]]
    unencoded: int
    """Rows that were read without encoding them; 0 if all that can be read were encoded."""
    bad_unencoded: int
    """Bad rows among these."""
    has_more: bool
    """Whether the source has more rows than were read."""
    error: FsdpTuneError | None
    """Why reading ended."""


def read_first_rows(opened: Input, encoder: Encoder, *, is_encoding: bool = True) -> FirstRows:
    """Convert the first rows, and render and encode those of them that take less than RENDERED_BYTES, as a
    preparation does.

    Without `is_encoding`, none is rendered or encoded.
    """
    bad: list[tuple[int, BadRow]] = []
    rows: list[RawRow] = []
    has_more, failure = False, None
    try:
        every = raw_rows([opened])
        for row in islice(every, FIRST_ROWS):
            if isinstance(row, RawRow):
                rows.append(row)
            else:
                bad.append(row)
        has_more = next(every, None) is not None
    except FsdpTuneError as error:
        failure = error
    seen = len(rows) + len(bad)
    sizes = accumulate(content_bytes(row.values) for row in rows)
    # Chat templates are rendered under a time limit that only the main thread can have.
    can_render = is_encoding and threading.current_thread() is threading.main_thread()
    rendered = sum(size < RENDERED_BYTES for size in sizes) if can_render else 0
    settings = opened.settings
    tokeniser = Tokeniser(encoder, (settings,))
    chunks = [tokeniser.chunk(rows[:rendered]), tokeniser.chunk(rows[rendered:], check_only=True)]
    unencoded, bad_unencoded = (
        (seen - rendered, len(bad) + len(chunks[1].bad)) if rendered < len(rows) else (0, 0)
    )
    bad += [each for chunk in chunks for each in chunk.bad]
    bad.sort(key=lambda each: (each[0], each[1].number))
    keys = key_account(
        sum((chunk.keys for chunk in chunks), Counter[tuple[int, KeyUse]]()), rows[0].source if rows else 0
    )
    checked = CheckedSource(
        key=opened.source.key,
        set=opened.set_name,
        path=opened.entry.path,
        format=settings.format,
        loss_on=settings.loss_on,
        rows_looked_at=seen,
        keys=list(keys),
    )
    return FirstRows(checked, bad, unencoded, bad_unencoded, has_more, failure)


def bad_first_rows(inputs: Sequence[Input], first: Sequence[FirstRows]) -> BadRows:
    """Return the bad rows among the first ones of all sources."""
    return BadRows(
        [each for of_source in first for each in of_source.bad],
        [name for opened in inputs for name in opened.source.names],
        rows_read=sum(of_source.checked.rows_looked_at for of_source in first),
        unencoded=sum(of_source.unencoded for of_source in first),
        bad_unencoded=sum(of_source.bad_unencoded for of_source in first),
        is_beginning=any(of_source.has_more for of_source in first),
    )
