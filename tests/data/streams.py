"""Streams over small files, and the rows of their lanes."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

from fsdp_tune.data.stream.lanes import Lane, StreamRow
from fsdp_tune.data.stream.row_stream import RowStream, open_stream
from tests.data.support import ByteEncoder, recipe_for


def stream_of(
    folder: Path, *entries: Any, lanes: int = 4, training: dict[str, Any] | None = None, **data: Any
) -> RowStream:
    recipe = recipe_for(folder, *entries, streaming=True, stream_lanes=lanes, **data)
    training = {"global_batch_size": 8, "gradient_accumulation_steps": 8, "max_steps": 100} | (training or {})
    return open_stream(
        recipe.model_validate(recipe.model_dump(by_alias=True) | {"training": training}), ByteEncoder(), {}
    )


def rows_of_run(stream: RowStream, count: int) -> list[StreamRow]:
    """Return the first rows of a run, empty ones included."""
    lanes = [iter(Lane(stream, number, stream.first_state())) for number in range(stream.lanes)]
    return [next(lanes[number % stream.lanes]) for number in range(count)]


def rows_of_lanes(stream: RowStream) -> list[StreamRow]:
    """Return all rows of each lane of a stream that ends, one lane after another."""
    lanes = [Lane(stream, number, stream.first_state()) for number in range(stream.lanes)]
    return [row for lane in lanes for row in takewhile(lambda row: row.lengths, lane)]


def read(row: StreamRow) -> str:
    """Return the text of a row."""
    return bytes(int(number) for number in row.input_ids if number < 256).decode()
