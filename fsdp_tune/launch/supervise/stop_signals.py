"""The signals that stop a launch: recorded, reported, and passed on to the ranks."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.signals import STOP_SIGNALS, without_ignored
from fsdp_tune.launch.supervise.launch_events import Message
from fsdp_tune.launch.supervise.rank_watch import RankWatch
from fsdp_tune.launch.supervise.signal_relay import SignalRelay
from fsdp_tune.launch.supervise.stop_message import stop_line

ECHO_SECONDS = 0.5
"""Signals this close together count as one, such as a scheduler's signal to both the group and the
process."""


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Of the stop signals, those that reach the ranks as they are. To a rank SIGUSR2 is a request for stacks;
SIGTERM stands for the others."""


UNUSED = (signal.SIGALRM, signal.SIGIO)
"""Signals that end a command which does not use them, such as an alarm that its caller has set. Here they
stop it."""


class StopSignals:
    """The signals to one launch. `relay` once its launcher has been started."""

    def __init__(self) -> None:
        self.received: list[tuple[int, float]] = []
        """Each with its time, in order."""
        self.relay: SignalRelay | None = None
        self.gave_up_saving = False
        self._is_announced = False

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.received]

    def add(self, number: int) -> None:
        # `LIVED` has a lock, which the thread of a handler may hold
        self.received.append((number, time.monotonic()))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals instead of dying of them. SIGKILL cannot be caught; `core.processes` covers it."""

        def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the signature of a handler
            if number == signal.SIGXCPU:  # the kernel repeats it each second
                signal.signal(number, signal.SIG_IGN)
                if self.received:  # no second request
                    return
            self.add(number)
            self._forward()

        unused = [number for number in UNUSED if signal.getsignal(number) is signal.SIG_DFL]
        before = {number: signal.signal(number, note) for number in [*without_ignored(STOP_SIGNALS), *unused]}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self) -> None:
        """Send the first signal to the ranks. The handler calls it too: the loop may wait."""
        if self.relay is not None and self.received:
            first, _ = self.received[0]
            self.relay.send(first if first in FORWARDED else signal.SIGTERM)

    def pass_on(
        self, watch: RankWatch, total_steps: int | None, step_seconds: float | None
    ) -> Iterator[Message]:
        """Report where the ranks stop after the first signal; a second one ends the wait for them."""
        if not self.received:
            return
        (first, first_at), (last, last_at) = self.received[0], self.received[-1]
        self._forward()
        if not self._is_announced:
            watch.read_all()
            self._is_announced = True
            what = stop_line(list(watch.beats.values()), total_steps, step_seconds)
            limit = " (the limit of CPU time, `ulimit -t`)" if first == signal.SIGXCPU else ""
            yield Message(
                f"{signal.Signals(first).name}{limit}: {what}; a second signal stops at once, without saving"
            )
        if self.relay is not None and (text := self.relay.help(watch.alive)) is not None:
            yield Message(text)
        if not self.gave_up_saving and LIVED.at(last_at) - LIVED.at(first_at) > ECHO_SECONDS:
            self.gave_up_saving = True
            yield Message(f"{signal.Signals(last).name}: stopping at once")
