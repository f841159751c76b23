"""The law of streams, stated by a plain model: after k · N rows each of N rows was read k - 1 to k + 1 times,
with `repeats: n` exactly n times; and each prefix of a mixture has the shares of its weights."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_tune.data.stream.dealing import (
    BLOCK_ROUNDS,
    Schedule,
    balanced,
    part_of_pass,
    phases_of,
    planned_sources,
)
from fsdp_tune.data.stream.lanes import Lane, StreamRow
from fsdp_tune.data.stream.row_stream import LaneState, RowStream
from tests.data.row_files import WRITERS, write_parquet
from tests.data.streams import read, stream_of


def run_of_lanes(rows: int, lanes: int, passes: int) -> Iterator[int]:
    """Yield the rows that lanes give in turn, by the planner; the end of the first lane that has none is the
    end of the run."""
    parts = [
        [row for number in range(passes) for row in range(*part_of_pass(rows, lanes, lane, number))]
        for lane in range(lanes)
    ]
    for turn in range(max(map(len, parts)) + 1):
        for part in parts:
            if turn == len(part):
                return
            yield part[turn]


def assert_law(found: Sequence[Any], known: Sequence[Any]) -> None:
    """Model: whatever the division, no row is a complete pass ahead of another, or behind it."""
    counts = Counter(dict.fromkeys(known, 0))
    for number, row in enumerate(found, 1):
        counts[row] += 1
        if number % len(known) == 0:
            passes = number // len(known)
            assert passes - 1 <= min(counts.values()) <= max(counts.values()) <= passes + 1
    assert len(counts) == len(known)


def test_any_divisions_give_each_row_as_often_as_repeats_say() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        rows, lanes, passes = draw.randint(1, 60), draw.randint(1, 24), draw.randint(1, 4)
        found = list(run_of_lanes(rows, lanes, passes))
        assert len(found) == rows * passes, (rows, lanes, passes)
        assert set(Counter(found).values()) == {passes}, (rows, lanes, passes)
        assert_law(found, range(rows))


def assert_shares(sources: Sequence[int], weights: Sequence[float]) -> None:
    """Model: at each prefix from 1,000 rows on a source has its share within one row or 2 % of it."""
    numbers = np.arange(1, len(sources) + 1)
    for source, weight in enumerate(weights):
        expected = numbers * weight / sum(weights)
        difference = np.abs(np.cumsum(np.array(sources) == source) - expected)
        assert (difference[999:] <= np.maximum(1, 0.02 * expected[999:]) + 1e-6).all(), (weights, source)


@pytest.mark.parametrize(
    ("weights", "lanes"),
    [
        ((0.99, 0.01), 1),
        ((0.5, 0.5), 16),
        ((0.6, 0.39, 0.01), 1),
        ((0.6, 0.39, 0.01), 16),
        ((0.01, 0.02, 0.97), 2),
        ((1, 1, 1), 8),
        ((1,) * 8, 16),
        ((0.5, 0.3, 0.1, 0.05, 0.04, 0.01), 1),
        ((0, 1, 2), 2),
    ],
)
def test_each_prefix_of_a_schedule_has_its_shares_and_each_lane_too(
    weights: tuple[float, ...], lanes: int
) -> None:
    rounds = BLOCK_ROUNDS + 1000
    schedule = Schedule(weights, lanes)
    sources = np.stack([schedule.sources(lane, 0, rounds) for lane in range(lanes)], axis=1)
    assert_shares(sources.reshape(-1).tolist(), weights)
    for source, weight in enumerate(weights):
        mine = np.count_nonzero(sources == source, axis=0)
        assert np.abs(mine - rounds * weight / sum(weights)).max() <= 2 + 2 * len(weights)
    begin = BLOCK_ROUNDS - 20
    assert schedule.sources(lanes - 1, begin, 50).tolist() == sources[begin : begin + 50, lanes - 1].tolist()


def test_packed_rows_are_ordered_by_shares() -> None:
    """A row of a rare source follows where it is due, and no row is lost."""
    draw, shares = np.random.default_rng(0), (0.6, 0.39, 0.01)
    sources = np.array([0] * 600 + [1] * 390 + [2] * 10)
    amounts = np.eye(3)[sources] * 100
    order = balanced(draw.permutation(1000), amounts, shares, np.zeros(3))
    assert sorted(order.tolist()) == list(range(1000))
    done = np.cumsum(amounts[order], axis=0)
    off = np.abs(done - done.sum(1, keepdims=True) * np.array(shares))
    random = np.cumsum(amounts[draw.permutation(1000)], axis=0)
    assert off[:800].max() <= 400 < np.abs(random - random.sum(1, keepdims=True) * np.array(shares)).max()


def test_planned_sources_are_smooth_by_tokens() -> None:
    shares, lengths = (0.7, 0.29, 0.01), (30.0, 10.0, 50.0)
    drawn = [0.0, 0.0, 0.0]
    for source in planned_sources(shares, drawn, lengths, (0, 1, 2), phases_of(3, shares, 16), 4000):
        drawn[source] += lengths[source]
    assert all(
        abs(amount - share * sum(drawn)) <= 2 * max(lengths)
        for amount, share in zip(drawn, shares, strict=True)
    )


FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "csv", "tar")


def written(folder: Path, name: str, sizes: Sequence[int]) -> list[str]:
    """Write a file of each size, and return the texts of their rows."""
    texts: list[str] = []
    for file, size in enumerate(sizes):
        rows = [{"text": f"{file}-{row}"} for row in range(size)]
        WRITERS[name](folder / f"{file:02}.{name}", rows)
        texts += [row["text"] for row in rows]
    return texts


def run(stream: RowStream, count: int | None = None) -> list[StreamRow]:
    """Return the rows of a run: `count`, or all until no lane has a row left."""
    lanes = [iter(Lane(stream, number, stream.first_state())) for number in range(stream.lanes)]
    found: list[StreamRow] = []
    while count is None or len(found) < count:
        turn = [next(lane) for lane in lanes]
        found += [row for row in turn if row.lengths]
        if not any(row.lengths for row in turn):
            assert count is None
            break
    return found[:count]


@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 40))]
)
def test_files_of_any_sizes_are_read_by_the_law(tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    name, files = FORMATS[number % len(FORMATS)], draw.randint(1, 8)
    equal = draw.random() < 0.4
    sizes = [12] * files if equal else [max(1, round(draw.lognormvariate(2, 1.3))) for _ in range(files)]
    if sum(sizes) < 40:
        sizes[0] += 40
    known = written(tmp_path, name, sizes)
    options: dict[str, Any] = {
        "lanes": draw.choice([1, 2, 3, 8, 16]),
        "shuffle": draw.random() < 0.8,
        "shuffle_buffer_size": draw.choice([1, 16, 200, 10_000]),
    }
    entry = {"path": str(tmp_path / f"*.{name}")}
    passes = draw.randint(1, 3)
    exact = run(stream_of(tmp_path, {**entry, "repeats": passes}, **options))
    assert Counter(map(read, exact)) == dict.fromkeys(known, passes)
    assert len({row.row_id for row in exact}) == len(exact)
    endless = stream_of(tmp_path, entry, **options)
    rows = run(endless, 3 * len(known))
    assert_law([read(row) for row in rows], known)
    at = draw.randrange(len(rows) - endless.lanes)
    lane = Lane(endless, at % endless.lanes, LaneState.from_list(rows[at].after.as_list()))
    assert next(iter(lane)).origins == rows[at + endless.lanes].origins


def test_mixture_with_repeats_reads_each_row_exactly_as_often(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = []
    for name, sizes, weight, passes in (
        ("parquet", [300, 7, 41], 0.7, 1),
        ("jsonl.gz", [90, 3], 0.29, 2),
        ("csv", [17], 0.01, 3),
    ):
        (tmp_path / name).mkdir()
        written(tmp_path / name, name, sizes)
        entries.append({"path": str(tmp_path / name / f"*.{name}"), "weight": weight, "repeats": passes})
    rows = run(stream_of(tmp_path, *entries, lanes=16, shuffle_buffer_size=64))
    counts = Counter((row.sources[0], read(row)) for row in rows)
    assert Counter(counts.values()) == {1: 348, 2: 93, 3: 17}


def test_prefixes_of_a_streamed_mixture_have_its_shares(tmp_path: Path) -> None:
    weights = (0.6, 0.39, 0.01)
    entries: list[dict[str, Any]] = []
    for number, weight in enumerate(weights):
        (tmp_path / str(number)).mkdir()
        written(tmp_path / str(number), "parquet", [500, 50, 20])
        entries.append({"path": str(tmp_path / str(number) / "*.parquet"), "weight": weight})
    stream = stream_of(tmp_path, *entries, lanes=16)
    assert_shares([row.sources[0] for row in run(stream, 3000)], weights)


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [200, 10_000])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("weights", "means"),
    [((0.6, 0.39, 0.01), (50, 200, 300)), ((0.9, 0.09, 0.01), (300, 100, 20)), ((1, 1), (20, 90))],
)
def test_prefixes_have_the_shares_of_tokens(
    tmp_path: Path, weights: tuple[float, ...], means: tuple[int, ...], packing: bool, buffer: int
) -> None:
    """Model: at each prefix from 1,000 rows on a source has its share of tokens within 3 % of it, or three of
    its longest rows. A lane does not know how long the rows of others are."""
    draw, longest, entries = random.Random(0), list[int](), list[dict[str, Any]]()
    for number, (weight, mean) in enumerate(zip(weights, means, strict=True)):
        texts = ["x" * min(500, max(1, round(mean * draw.lognormvariate(-0.3, 0.8)))) for _ in range(1000)]
        write_parquet(tmp_path / f"{number}.parquet", [{"text": text} for text in texts])
        longest.append(max(map(len, texts)))
        entries.append({"path": str(tmp_path / f"{number}.parquet"), "weight": weight})
    options: dict[str, Any] = {
        "mixture": {"weight_by": "tokens"},
        "packing": packing,
        "max_length": 512,
        "shuffle_buffer_size": buffer,
    }
    stream = stream_of(tmp_path, *entries, lanes=16, **options)
    stream = replace(
        stream,
        sources=tuple(
            replace(each, mean_tokens=mean) for each, mean in zip(stream.sources, means, strict=True)
        ),
    )
    tokens, shares = np.zeros(len(weights)), np.array(weights) / sum(weights)
    for number, row in enumerate(run(stream, 1500 if packing else 6000), 1):
        np.add.at(tokens, list(row.sources), row.lengths)
        if number >= 1000:
            difference = np.abs(tokens - shares * tokens.sum())
            rows = [stream.max_length] * len(longest) if packing else longest
            assert (difference <= np.maximum(3 * np.array(rows), 0.03 * shares * tokens.sum())).all(), (
                number,
                difference,
            )
