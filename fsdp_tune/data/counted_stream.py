"""Count the rows of a stream before it is read: whether they suffice, and which of them a run leaves out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.errors import Notice
from fsdp_tune.data.account import mean_tokens
from fsdp_tune.data.account_checks import notice_fields
from fsdp_tune.data.cache import content_key
from fsdp_tune.data.inputs import TRAIN, Input
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.data.report import DataReport
from fsdp_tune.data.skipped_rows import StreamedFiles
from fsdp_tune.data.stream.units import count_units, rows_of, stream_stamps, stream_units
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

UNIT_ROWS = "unit-rows"
"""Folder below `data.cache_dir`: for each set of files of a stream, the numbers of their rows."""
ROWS_FORMAT = 1
"""Incremented when the same files would have other numbers of rows."""


def streamed_files(recipe: Recipe, unit_rows: Mapping[str, int]) -> StreamedFiles:
    assert recipe.data.stream_lanes != "auto", "the recipe is resolved"
    sources = [
        find_source(entry, f"data.train[{index}]", streaming=True)
        for index, entry in enumerate(recipe.data.train)
    ]
    units = [unit for source in sources for unit in stream_units(source, recipe.data.stream_lanes)]

    def last_row(name: str) -> int:
        # Several units have the name of a file that they read in turns (piece p of n: rows p, p + n, …), or
        # that two sources have.
        pieces = [unit for unit in units if unit.name == name]
        return max(
            (row.number if isinstance(row, BadRow) else row[0] for piece in pieces for row in piece.read()),
            default=0,
        )

    return StreamedFiles([unit.name for unit in units], unit_rows, last_row)


class CountedStream(NamedTuple):
    """The files of a stream and their rows."""

    file_stamps: dict[str, str]
    unit_rows: dict[str, int]
    """Of the units that were counted, by name."""
    source_rows: list[int | None]
    """Of each source; None if one of its units was not counted."""


def counted_units(recipe: Recipe, inputs: Sequence[Input], cache_dir: Path) -> CountedStream:
    """Return the rows of a stream, from the cache if its files have not changed, else counted."""
    assert recipe.data.stream_lanes != "auto", "the recipe is resolved"
    of_sources = [
        stream_units(opened.source, recipe.data.stream_lanes) for opened in inputs if opened.set_name == TRAIN
    ]
    units = [unit for of_source in of_sources for unit in of_source]
    stamps = stream_stamps(units)
    record = (
        cache_dir / UNIT_ROWS / f"{content_key([ROWS_FORMAT, stamps, [unit.name for unit in units]])}.json"
    )
    known: dict[str, int] = {}
    # no record, or one that cannot be read: count again
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        known = {str(name): int(rows) for name, rows in json.loads(record.read_bytes()).items()}
    counted = [count_units(of_source, known) for of_source in of_sources]
    found: dict[str, int] = {}
    for unit in [unit for of_source in counted for unit in of_source]:
        if unit.rows is not None:  # two sources without files may have the same name
            found[unit.name] = max(unit.rows, found.get(unit.name, 0))
    if found != known:
        with suppress(OSError):  # the cache is full or read-only: the next start counts again
            DISK.mkdir(record.parent)
            write_json(record, found)
    return CountedStream(stamps, found, [rows_of(of_source) for of_source in counted])


def short_stream(
    recipe: Recipe, source_rows: Sequence[int | None], report: DataReport
) -> list[dict[str, object]]:
    """Return a notice if a stream has rows for fewer steps than the run. With packing their number follows
    from the sample."""
    data, most = recipe.data, int(training_value(recipe.training, "max_steps"))
    full = data.max_length * report.sets[TRAIN].fill
    total = 0.0  # rows of the run
    for source, rows, tokens in zip(data.train, source_rows, mean_tokens(report), strict=True):
        if source.repeats is None or rows is None:
            return []
        total += rows * source.repeats * (tokens / full if data.packing else 1)
    steps = int(total // recipe.global_batch_size)
    if steps >= most:
        return []
    message = (
        f"the stream has rows for {'about ' if data.packing else ''}{steps:,} steps, and "
        f"`training.max_steps` is {most:,}"
    )
    fewer = f"`--set training.max_steps={steps}`" if steps else "lower `training.global_batch_size`"
    hint = f"the run would end there with `stream-ended`: raise `repeats`, or {fewer}"
    return [notice_fields(Notice("stream-short", message, hint=hint))]
