"""A loss that works on a slice of the tokens at a time, at a micro-batch that stands for any other (`blend.at_micro_batch`).

How many slices there are depends on the micro-batch, so one is run, of a prime number of tokens, and what it does is marked: as many
times over it is what all slices do, since each frees what it made before the next begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from fsdp_tune.model.kernels import linear_loss
from fsdp_tune.planner.trace.recorder import Recorder

ENDLESS_TOKENS = 1 << 40


def most_tokens(vocabulary: int) -> int:
    """Of a slice, however many tokens there are."""
    return linear_loss.slice_tokens(ENDLESS_TOKENS, vocabulary)


@contextlib.contextmanager
def one_slice(recorder: Recorder) -> Iterator[None]:
    """Slices of `recorder.slice_tokens` tokens, of which the first alone is run; where that is zero, slices as they are."""
    if not recorder.slice_tokens:
        yield
        return

    def first(start: int, _stop: int, _step: int) -> Iterator[int]:
        recorder.in_slice = True
        yield start
        recorder.in_slice = False

    with (
        mock.patch.object(linear_loss, "slice_tokens", return_value=recorder.slice_tokens),
        mock.patch.object(linear_loss, "range", first, create=True),
    ):
        yield
