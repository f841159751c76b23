"""A limit for a call that must not wait: it fails the test, where a blocked `open` would stop it for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def limited(what: object, seconds: int = 20) -> Iterator[None]:
    """Fail the test if the block takes longer; only in the main thread."""

    def fail(*_: object) -> None:
        pytest.fail(f"it waits: {what}")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
