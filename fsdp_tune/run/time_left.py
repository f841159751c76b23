"""Estimate when a run ends from its lines of metrics.jsonl: the one estimate of the bar of `train` and of
`status`.

A step costs what the last lines of this launch measured. Their `step_seconds` exclude evaluations and saves.
The line with the first step, which allocates and compiles, is left out. Evaluations still to come cost what
the last one did, and so do waits for the scores of checkpoints (`evaluation.when: between_steps`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fsdp_tune.run.events import number

WINDOW_LINES = 20
"""Training lines that are averaged."""


@dataclass(slots=True)
class _Recurring:
    """Something for which training stops at regular steps."""

    steps: list[int] = field(default_factory=list[int])
    """The last two."""
    seconds: float = 0.0
    """Of the last one."""

    def add(self, step: int, seconds: float) -> None:
        self.steps, self.seconds = [*self.steps[-1:], step], seconds

    def seconds_until(self, end: int) -> float:
        """Return the seconds of those that are still to come up to and with a step."""
        if len(self.steps) < 2:
            return 0.0
        before, last = self.steps
        return self.seconds * (max(0, (end - last) // (last - before)) if last > before else 0)


@dataclass(slots=True)
class TimeLeft:
    """Takes the lines of a run in order. `total_steps` is that of the newest `train_started`, or what the
    caller knows."""

    total_steps: int | None = None
    clock: Callable[[], float] = time.time
    _step: int | None = None
    """Of the last line."""
    _time: float | None = None
    """Wall clock of the last line, seconds."""
    _first_seconds: float | None = None
    """Seconds a step of the line with the first step: used until there is another one."""
    _seen: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """First and last step that a heartbeat had since the start, and when: used until there is a line."""
    _window: deque[tuple[int, float]] = field(
        default_factory=lambda: deque[tuple[int, float]](maxlen=WINDOW_LINES)
    )
    """Steps and seconds of the last lines."""
    _evaluations: _Recurring = field(default_factory=_Recurring)
    _waits: _Recurring = field(default_factory=_Recurring)
    """For scores of checkpoints; not after the last step, where the ranks end."""

    def add(self, line: Mapping[str, object]) -> None:
        """Take the next line; an event other than `train_started` and those of a wait changes nothing."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            return
        if line.get("event") == "train_started":
            total = line.get("total_steps")
            self.total_steps = total if isinstance(total, int) else self.total_steps
            self._step, self._time, self._first_seconds = step, None, None
            self._window.clear()
            self._seen.clear()
        elif (waited := number(line.get("ranks_waited_seconds"))) is not None:
            self._waits.add(step, waited)
            self._time = number(line.get("time")) or self._time
        elif "event" in line:
            return
        elif "loss" in line:
            self._add_step(step, line)
        elif "eval_loss" in line:
            self._evaluations.add(step, number(line.get("eval_seconds")) or 0.0)
            self._time = number(line.get("time")) or self._time

    def _add_step(self, step: int, line: Mapping[str, object]) -> None:
        seconds, before = number(line.get("step_seconds")), self._step
        if seconds is not None and before is not None and step > before:
            if self._first_seconds is None:
                # A line of several steps ends with one that is none of the first; its own time is measured
                # separately.
                last = number(line.get("last_step_seconds")) if step > before + 1 else None
                self._first_seconds = seconds if last is None else last
            else:
                self._window.append((step - before, seconds * (step - before)))
        self._step = step
        self._time = number(line.get("time"))

    def see(self, step: int) -> None:
        """Take the number of finished steps of a heartbeat."""
        if self._step is not None and step > (self._seen[-1][0] if self._seen else self._step):
            self._seen[1:] = [(step, self.clock())]

    @property
    def step_seconds(self) -> float | None:
        """Seconds a step; None before the first line of this launch."""
        steps = sum(count for count, _ in self._window)
        if steps:
            return sum(seconds for _, seconds in self._window) / steps
        if self._first_seconds is None and len(self._seen) == 2:
            (first, began), (last, ended) = self._seen
            return (ended - began) / (last - first)
        return self._first_seconds

    def seconds_left(self, step: int = 0) -> float | None:
        """Return the time left now, None while it is unknown. `step`: finished ones, if the caller knows of
        more than the last line."""
        if self.total_steps is None or self._step is None or (each := self.step_seconds) is None:
            return None
        ahead = max(0, self.total_steps - max(step, self._step))
        left = (
            each * ahead
            + self._evaluations.seconds_until(self.total_steps)
            + self._waits.seconds_until(self.total_steps - 1)
        )
        if step <= self._step and self._time is not None:  # a part of the next step has passed
            left -= min(each, max(0.0, self.clock() - self._time))
        return max(0.0, left)

    def ends_at(self, step: int = 0) -> float | None:
        """Return the wall clock, in seconds, at which the run ends if it continues like this."""
        left = self.seconds_left(step)
        return None if left is None else self.clock() + left
