from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import pytest

from fsdp_tune.launch.machines import channel as channels
from fsdp_tune.launch.machines.channel import Channel


class Recorder:
    """An exchange that records its lines."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._ended = threading.Event()

    def send(self, line: str) -> None:
        self.sent.append(line)

    def lines(self) -> Iterable[str]:
        self._ended.wait()
        return ()

    def finish(self) -> None:
        self._ended.set()

    kill = finish


def test_document_is_sent_if_the_channel_is_closed_before_its_exchange_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the other machines do not learn why a command has ended, and closing takes its limit."""
    monkeypatch.setattr(channels, "CLOSE_SECONDS", 1.0)
    link = Recorder()

    def start() -> Recorder:
        time.sleep(0.05)
        return link

    channel, began = Channel(start), time.monotonic()
    channel.publish({"state": "ended"})
    channel.close()
    assert link.sent == ['{"state": "ended"}']
    assert time.monotonic() - began < 0.9


def test_channel_whose_exchange_cannot_start_is_closed() -> None:
    def start() -> Recorder:
        raise OSError("no process can be started")

    channel, began = Channel(start), time.monotonic()
    channel.publish({"state": "ended"})
    channel.close()
    assert time.monotonic() - began < 2.0
