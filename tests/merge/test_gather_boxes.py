"""Boxes tile a tensor in output order, intersections with chunks are exact, and complete covers are
recognised."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_tune.core.tensors.dtypes import Extent, is_row_major
from fsdp_tune.merge.copy.boxes import boxes, intersection
from fsdp_tune.merge.read.dcp import gap_or_overlap, without_replicas
from fsdp_tune.merge.read.reader import Chunk

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)
NOWHERE = Extent("", 0, (), 0, 0)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 60))
def test_boxes_tile_a_tensor_in_order_and_fit(shape, most):
    numbers = np.arange(math.prod(shape)).reshape(shape)
    at = 0
    for box in boxes(shape, most):
        piece = numbers[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
        assert box.first == at
        assert piece.reshape(-1).tolist() == list(range(at, at + box.elements))
        assert box.elements <= most
        at += box.elements
    assert at == math.prod(shape)


def test_empty_tensor_has_no_boxes_and_scalar_has_one():
    assert list(boxes((3, 0, 2), 10)) == []
    assert [box.elements for box in boxes((), 10)] == [1]


def grid(shape, cuts):
    """Chunks of the product of cuts along each dimension, as a mesh leaves them."""
    edges = [
        sorted({0, size, *(cut % (size + 1) for cut in along)})
        for size, along in zip(shape, cuts, strict=True)
    ]
    pairs = [list(itertools.pairwise(edge)) for edge in edges]
    return [
        Chunk(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds), NOWHERE)
        for bounds in itertools.product(*pairs)
    ]


@st.composite
def covered_shapes(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    return shape, grid(shape, [draw(st.lists(st.integers(0, 6), max_size=3)) for _ in shape])


@settings(max_examples=75, deadline=None)
@given(covered_shapes(), st.integers(1, 30))
def test_chunk_intersections_cover_each_box_once(covered, most):
    shape, chunks = covered
    count = np.zeros(shape, int)
    for box in boxes(shape, most):
        for chunk in chunks:
            shared = intersection(box, chunk.offsets, chunk.sizes)
            if shared is not None:
                in_box, in_chunk, sizes = shared
                low = [a + b for a, b in zip(box.offsets, in_box, strict=True)]
                assert low == [a + b for a, b in zip(chunk.offsets, in_chunk, strict=True)]
                count[tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))] += 1
    assert (count == 1).all()


@settings(max_examples=75, deadline=None)
@given(covered_shapes(), st.data())
def test_gaps_and_overlaps_are_detected(covered, data):
    shape, chunks = covered
    assert gap_or_overlap(shape, chunks) is None
    victim = data.draw(st.sampled_from(chunks))
    rest = [chunk for chunk in chunks if chunk is not victim]
    assert gap_or_overlap(shape, rest) is not None
    moved = Chunk(tuple(0 for _ in shape), victim.sizes, NOWHERE)
    if moved.offsets != victim.offsets:
        assert gap_or_overlap(shape, [*rest, moved]) is not None
    out = Chunk((victim.offsets[0] + shape[0], *victim.offsets[1:]), victim.sizes, NOWHERE)
    assert "reaches out" in str(gap_or_overlap(shape, [*rest, out]))


def test_replicas_count_once_and_empty_chunks_not_at_all():
    one, other = Chunk((0,), (2,), NOWHERE), Chunk((2,), (1,), NOWHERE)
    assert without_replicas([other, one, one, Chunk((3,), (0,), NOWHERE)]) == (one, other)


def test_strides_of_single_elements_do_not_matter():
    assert is_row_major((1, 5), (999, 1))
    assert is_row_major((0, 5), (7, 7))
    assert not is_row_major((5, 2), (1, 5))
