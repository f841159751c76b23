""""""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.packing import PackedRows, _decreasing, _runs, best_fit, one_a_row, wrapped
from fsdp_tune.data.sets import Cut, Examples, cut, held_out, mixed
from fsdp_tune.data.store import Int64
from fsdp_tune.recipe.schema.data_section import EvalFraction, EvalRows, Mixture


def examples_of(*lengths: int, sources: list[int] | None = None) -> Examples:
    sizes = np.array(lengths, np.int64)
    count = len(sizes)
    return Examples(
        starts=np.cumsum(sizes) - sizes,
        lengths=sizes,
        supervised=sizes - 1,
        sources=np.array(sources or [0] * count, np.int64),
        hashes=np.arange(count, dtype=np.uint64),
        token_hashes=np.arange(count, dtype=np.uint64),
        origins=np.stack([np.zeros(count, np.int64), np.arange(1, count + 1)], axis=1),
    )


def cut_at(limit: int, examples: Examples, *overlong: str, untrained: tuple[int, ...] = ()) -> Cut:
    trained = np.ones(int(examples.lengths.sum()), np.uint8)
    trained[list(untrained)] = 0
    return cut(examples, overlong, limit, trained, ["a.jsonl", "b.jsonl"])


def test_truncate_keeps_the_beginning_and_counts() -> None:
    found = cut_at(4, examples_of(3, 10, 4), "truncate")
    assert found.segments.tolist() == [[0, 3], [3, 4], [13, 4]]
    assert found.supervised.tolist() == [2, 3, 3]
    assert (found.truncated.tolist(), found.split, len(found.dropped)) == ([[0, 2]], 0, 0)


def test_split_cuts_into_pieces_and_loses_nothing_but_first_tokens() -> None:
    found = cut_at(4, examples_of(3, 10), "split")
    assert found.segments.tolist() == [[0, 3], [3, 4], [7, 4], [11, 2]]
    assert found.supervised.tolist() == [2, 3, 3, 1]
    assert found.split == 1


def test_one_token_piece_is_dropped() -> None:
    found = cut_at(4, examples_of(5), "split")
    assert found.segments.tolist() == [[0, 4]]
    assert found.emptied.tolist() == [], "the example itself is still trained"


def test_drop_removes_and_lists_rows() -> None:
    found = cut_at(4, examples_of(3, 10), "drop")
    assert found.segments.tolist() == [[0, 3]]
    assert found.dropped.tolist() == [[0, 2]]


def test_example_without_targets_after_truncation_is_dropped_and_listed() -> None:
    found = cut_at(4, examples_of(3, 10), "truncate", untrained=(3, 4, 5, 6, 7))
    assert found.segments.tolist() == [[0, 3]]
    assert found.emptied.tolist() == [[0, 2]]


def test_overlong_error_names_rows_and_longest() -> None:
    two = examples_of(3, 10, 4, 5)
    two.origins[3] = (1, 7)
    with pytest.raises(
        FsdpTuneError,
        match=r"2 rows are longer than `data.max_length: 4`, the longest has 10 tokens; .*: b.jsonl:7$",
    ) as caught:
        cut_at(4, two, "error")
    assert str(caught.value.problems[0].where) == "a.jsonl:2"
    with pytest.raises(FsdpTuneError, match="it has 10 tokens") as caught:
        cut_at(4, examples_of(3, 10, 4), "error")
    assert str(caught.value.problems[0].where) == "a.jsonl:2"


def test_overlong_is_applied_per_source() -> None:
    found = cut_at(4, examples_of(6, 6, sources=[0, 1]), "split", "drop")
    assert found.segments.tolist() == [[0, 4], [4, 2]]


HASHES = np.random.default_rng(0).integers(0, 2**64, 10_000, dtype=np.uint64)


def test_held_out_fraction_depends_on_content_only() -> None:
    chosen = held_out(HASHES, EvalFraction(fraction=0.1))
    assert 0.08 < chosen.mean() < 0.12
    moved = np.random.default_rng(1).permutation(len(HASHES))
    assert (held_out(HASHES[moved], EvalFraction(fraction=0.1)) == chosen[moved]).all()
    assert (held_out(HASHES[:100], EvalFraction(fraction=0.1)) == chosen[:100]).all()
    assert (held_out(HASHES, EvalFraction(fraction=0.2)) >= chosen).all(), (
        "a larger fraction keeps what was held out"
    )


def test_held_out_row_count_is_exact_and_duplicates_stay_together() -> None:
    assert held_out(HASHES, EvalRows(rows=500)).sum() == 500
    twice = np.concatenate([HASHES, HASHES])
    chosen = held_out(twice, EvalRows(rows=500))
    assert (chosen[: len(HASHES)] == chosen[len(HASHES) :]).all()


def test_holding_out_all_rows_is_refused() -> None:
    with pytest.raises(FsdpTuneError, match="would hold out all of 10,000 rows"):
        held_out(HASHES, EvalRows(rows=10_000))


def counts(sizes: list[int], weights: list[float | None], **mixture: object) -> list[int]:
    sources: Int64 = np.repeat(np.arange(len(sizes)), sizes)
    drawn = mixed(sources, sizes, weights, Mixture.model_validate(mixture))
    return np.bincount(sources[drawn], minlength=len(sizes)).tolist()


def test_without_weights_each_row_is_drawn_once() -> None:
    assert counts([10, 30], [None, None]) == [10, 30]


def test_all_exhausted_repeats_smaller_source() -> None:
    assert counts([10, 30], [0.5, 0.5]) == [30, 30]
    assert counts([10, 30], [3.0, 1.0]) == [90, 30]


def test_first_exhausted_ends_with_the_first_source() -> None:
    assert counts([10, 30], [0.5, 0.5], stopping_strategy="first_exhausted") == [10, 10]


def test_temperature_flattens_the_shares() -> None:
    assert counts([100, 10_000], [None, None], temperature=2.0, stopping_strategy="first_exhausted") == [
        100,
        1000,
    ]


def test_weights_by_tokens_give_shares_of_tokens() -> None:
    sources: Int64 = np.repeat([0, 1], [300, 1000])
    tokens = np.where(sources == 0, 80, 2)
    for weights in ([0.7, 0.3], [1.0, 1.0]):
        drawn = mixed(sources, [300, 1000], weights, Mixture(weight_by="tokens"), tokens=[300 * 80, 1000 * 2])
        share = tokens[drawn][sources[drawn] == 0].sum() / tokens[drawn].sum()
        assert share == pytest.approx(weights[0] / sum(weights), abs=0.001)


def test_every_row_is_drawn_before_any_repeats() -> None:
    sources = np.repeat([0, 1], [10, 25])
    drawn = mixed(sources, [10, 25], [0.5, 0.5], Mixture())
    times = np.bincount(drawn, minlength=35)
    assert set(times[:10].tolist()) == {2, 3}
    assert times.sum() == 50


def test_weights_on_some_sources_only_are_refused() -> None:
    with pytest.raises(FsdpTuneError, match="others do not"):
        counts([10, 10], [1.0, None])


def segments_of(lengths: list[int]) -> Int64:
    sizes = np.array(lengths, np.int64)
    return np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)


def row_sizes(packed: PackedRows) -> list[int]:
    assert packed.rows[0] == 0
    assert packed.rows[-1] == len(packed.segments)
    assert (np.diff(packed.rows) > 0).all(), "no row is empty"
    return [int(size) for size in np.add.reduceat(packed.segments[:, 1], packed.rows[:-1])]


def textbook_rooms(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing, one item after another, in quadratic time: the room left in each row."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        rooms.append((min(fitting) if fitting else capacity) - length)
        if fitting:
            rooms.remove(min(fitting))
    return sorted(rooms)


lengths_and_capacity = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(
        st.lists(st.integers(1, capacity), min_size=1, max_size=120), st.just(capacity)
    )
)


@given(lengths_and_capacity)
def test_best_fit_splits_no_example_and_needs_no_more_rows_than_textbook(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    segments = segments_of(lengths)
    packed = best_fit(segments, capacity)
    sizes = row_sizes(packed)
    assert sorted(map(tuple, packed.segments.tolist())) == sorted(map(tuple, segments.tolist())), (
        "each example once, whole"
    )
    assert max(sizes) <= capacity
    assert len(sizes) <= len(textbook_rooms(lengths, capacity))


@given(lengths_and_capacity)
def test_best_fit_decreasing_is_the_textbook_algorithm(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    decreasing = np.array(sorted(lengths, reverse=True), np.int64)
    rows, row_of = _decreasing(_runs(decreasing), capacity, len(lengths))
    sizes = np.bincount(row_of, weights=decreasing, minlength=rows)
    assert sorted((capacity - sizes).astype(int).tolist()) == textbook_rooms(lengths, capacity)


def test_long_examples_close_rows_early() -> None:
    """Best-fit decreasing alone fills 98.8, 99.4 and 99.7 % of these rows."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.gamma(8.0, 19.0, 7_500).astype(np.int64), 40, 512)
    fill = {}
    for capacity in (512, 1024, 2048):
        packed = best_fit(segments_of(lengths.tolist()), capacity)
        fill[capacity] = lengths.sum() / ((len(packed.rows) - 1) * capacity)
    assert fill[2048] > 0.998
    assert fill[1024] > 0.996
    assert fill[512] > 0.99


@given(lengths_and_capacity)
def test_wrapped_fills_every_row_and_loses_no_token(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packed = wrapped(segments_of(lengths), capacity)
    *full, last = row_sizes(packed)
    assert all(size == capacity for size in full)
    assert 0 < last <= capacity
    tokens = [token for start, length in packed.segments.tolist() for token in range(start, start + length)]
    assert tokens == list(range(sum(lengths)))


@given(lengths_and_capacity)
def test_wrapped_never_joins_two_examples_into_one_segment(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    ends = set(np.cumsum(lengths).tolist())
    for start, length in wrapped(segments_of(lengths), capacity).segments.tolist():
        assert not any(end in ends for end in range(start + 1, start + length))


def test_one_example_per_row_keeps_order() -> None:
    packed = one_a_row(segments_of([3, 1, 2]))
    assert row_sizes(packed) == [3, 1, 2]


@pytest.mark.parametrize("capacity", [2048, 131_072])
def test_many_examples_pack_in_linear_time_and_tightly(capacity: int) -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(capacity / 10), 0.8, 60_000).astype(np.int64), 1, capacity)
    segments = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)
    began = time.process_time()
    packed = best_fit(segments, capacity)
    assert time.process_time() - began < 5.0, (
        "0.2 s on a slow core; the algorithm of the textbook takes minutes"
    )
    assert lengths.sum() / ((len(packed.rows) - 1) * capacity) > 0.995


def test_packing_is_deterministic() -> None:
    segments = segments_of([5, 3, 5, 2, 7, 1, 1, 4])
    first, second = best_fit(segments, 8), best_fit(segments.copy(), 8)
    assert (first.segments == second.segments).all()
    assert (first.rows == second.rows).all()
