"""The chunked loss in a trace at a micro-batch that represents any other (`derive.at_micro_batch`).

The number of slices depends on the micro-batch, so a single slice of a prime number of tokens is run and
its records are marked. All slices do the same work, and each frees its memory before the next begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fsdp_tune.model.kernels import head
from fsdp_tune.planner.trace.fake_gpu import replaced
from fsdp_tune.planner.trace.recorder import Recorder

ENDLESS_TOKENS = 1 << 40


def most_tokens(vocabulary: int) -> int:
    """Return the largest number of tokens in a slice."""
    return head.slice_tokens(ENDLESS_TOKENS, vocabulary)


@contextlib.contextmanager
def one_slice(recorder: Recorder) -> Iterator[None]:
    """Run only the first slice, of `recorder.slice_tokens` tokens; if that is 0, leave the slices as they
    are."""
    if not recorder.slice_tokens:
        yield
        return

    def first(start: int, _stop: int, _step: int) -> Iterator[int]:
        recorder.in_slice = True
        yield start
        recorder.in_slice = False

    with (
        replaced(head, "slice_tokens", lambda *_: recorder.slice_tokens),
        replaced(head, "range", first),
    ):
        yield
