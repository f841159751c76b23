"""Bars: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from fsdp_tune.cli.output import Screen

PLAIN_INTERVAL_SECONDS = 10.0


class Bar(Protocol):
    def advance(self, n: int = 1) -> None:
        """Moves on by `n` units; may be called from several threads."""
        ...

    def at(self, done: int, detail: str = "") -> None:
        """Stands at `done` units, with `detail` beside the bar."""
        ...

    def resize(self, total: int) -> None:
        """Sets the total once it is known."""
        ...


class PlainBar:
    """A line every ten seconds and one at the end, if there was a line before: short work stays silent."""

    def __init__(self, screen: Screen, label: str, total: int | None, unit: str) -> None:
        self._screen, self._label, self._total, self._unit = screen, label, total, unit
        self._done, self._detail, self._lines = 0, "", 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lines and kind is None:
            self._print()

    def advance(self, n: int = 1) -> None:
        with self._lock:
            self._done += n
            self._print_when_due()

    def at(self, done: int, detail: str = "") -> None:
        with self._lock:
            self._done, self._detail = done, detail
            self._print_when_due()

    def resize(self, total: int) -> None:
        self._total = total

    def _print_when_due(self) -> None:
        if time.monotonic() - self._last >= PLAIN_INTERVAL_SECONDS:
            self._print()

    def _print(self) -> None:
        share = f" ({100 * self._done / self._total:.0f} %)" if self._total else ""
        of = f" of {self._total:,}" if self._total else ""
        self._screen.say(f"{self._label}: {self._done:,}{of} {self._unit}{share} {self._detail}".rstrip())
        self._lines += 1
        self._last = time.monotonic()


class SilentBar(PlainBar):
    """For work that says its own lines."""

    def _print(self) -> None:
        self._last = time.monotonic()


class LiveBar:
    def __init__(self, screen: Screen, label: str, total: int | None, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn(unit),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeRemainingColumn(),
            console=Console(file=screen.talk),
            transient=False,
        )
        self._task = self._progress.add_task(label, total=total, detail="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress.tasks[0].completed == 0:
            self._progress.live.transient = True  # nothing was to be done: leave no empty bar behind
        self._progress.stop()

    def advance(self, n: int = 1) -> None:
        self._progress.advance(self._task, n)

    def at(self, done: int, detail: str = "") -> None:
        self._progress.update(self._task, completed=done, detail=detail)

    def resize(self, total: int) -> None:
        self._progress.update(self._task, total=total)
