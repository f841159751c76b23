"""Children of a command that ends by an exception."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from fsdp_tune.core import processes as children

SLEEP = (sys.executable, "-c", "import time; time.sleep(30)")


def test_thread_starts_no_child_after_the_block_has_failed() -> None:
    is_started = threading.Event()

    def try_again() -> None:
        for _ in range(2):  # as an inspection that another process did not answer
            child = children.start(SLEEP, os.environ)
            is_started.set()
            child.wait()

    waiting: list[Future[None]] = []

    def interrupt() -> None:
        with children.threads(1) as pool:
            waiting.append(pool.submit(try_again))
            assert is_started.wait(10)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert time.monotonic() - began < 10
    assert isinstance(waiting[0].exception(), InterruptedError)


def test_children_can_be_started_after_a_failed_block() -> None:
    with pytest.raises(KeyboardInterrupt), children.threads(1):
        raise KeyboardInterrupt
    child = children.start((sys.executable, "-c", ""), os.environ)
    children.release(child)
    assert child.wait(30) == 0
