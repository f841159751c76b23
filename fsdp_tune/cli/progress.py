"""Bars: the count, phase and time left of long work, redrawn on one line of a terminal, or printed now and
then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fsdp_tune.cli.terminal import NARROW, Terminal
from fsdp_tune.cli.terminal_text import printable, trend
from fsdp_tune.core.units import MIB, format_clock, format_seconds

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


PLAIN_INTERVAL_SECONDS = 10.0
MOST_INTERVAL_SECONDS = 600.0
BAR_WIDTH = 24


class ScreenBar:
    """Counts finished units and estimates the time left; subclasses draw."""

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done, self._detail = 0, ""
        self._trend: Sequence[float] = ()
        self._phase, self._phase_began = "", time.monotonic()
        self._started, self._done_at_start = time.monotonic(), 0
        self._updated = self._started
        self._estimate: Callable[[], float | None] | None = None
        self._lock = threading.Lock()

    def estimate_by(self, seconds_left: Callable[[], float | None]) -> None:
        """Take the time left from the caller, which knows more than counts, and show the time of the end
        too."""
        self._estimate = seconds_left

    def advance(self, n: int = 1) -> None:
        """Add `n` finished units; may be called from several threads."""
        with self._lock:
            self._done, self._updated = self._done + n, time.monotonic()
            self._changed()

    def at(self, done: int, detail: str = "", trend: Sequence[float] = ()) -> None:
        """Set the number of finished units, the text next to the bar, and the numbers of a sparkline, newest
        last.

        Fields of the text that two spaces separate are shown as far as they fit.
        """
        with self._lock:
            self._done, self._detail, self._trend, self._updated = (
                done,
                detail,
                tuple(trend),
                time.monotonic(),
            )
            self._changed()

    def enter(self, phase: str) -> None:
        """Show a phase with the time since it began in place of the detail, until the next phase; an empty
        one ends it."""
        with self._lock:
            # `evaluating 3/9 batches` continues `evaluating 2/9 batches`
            if phase.split(" ")[0] != self._phase.split(" ")[0]:
                self._phase_began = time.monotonic()
            self._phase = phase

    def start(self, done: int, total: int) -> None:
        """Set the total once it is known, with `done` units finished earlier: the time left is estimated from
        the others."""
        with self._lock:
            self._done, self._total, self._done_at_start = done, total, done
            self._started = self._updated = time.monotonic()

    def seconds_left(self) -> float | None:
        """Estimate the time left; None before a unit is finished, and if the total is unknown."""
        if self._estimate is not None:
            return self._estimate()
        if self._total is None or self._done <= self._done_at_start:
            return None
        each = (self._updated - self._started) / (self._done - self._done_at_start)
        return max(0.0, each * (self._total - self._done) - (time.monotonic() - self._updated))

    def left(self) -> str:
        """Return the time left as text; "" while it is unknown, and at the end."""
        seconds = self.seconds_left()
        return f"{format_seconds(seconds)} left" if seconds else ""

    def end(self) -> str:
        """Return the time of the end as text, if the caller estimates it; else ""."""
        seconds = self.seconds_left() if self._estimate is not None else None
        return f"ends {format_clock(time.time() + seconds, time.time())}" if seconds else ""

    def _changed(self) -> None: ...


class ByteBar:
    """Counts bytes and shows MiB with the rate: pieces of several threads are not multiples of 1 MiB."""

    def __init__(self, bar: ScreenBar) -> None:
        self._bar, self._bytes, self._started = bar, 0, time.monotonic()
        self._lock = threading.Lock()

    def advance(self, n: int = 1) -> None:
        with self._lock:
            self._bytes += n
            done = self._bytes
        rate = done / max(time.monotonic() - self._started, 1e-9)
        self._bar.at(-(-done // MIB), f"{rate / 1e9:.2f} GB/s")


class PlainBar(ScreenBar):
    """Prints a line after ten seconds, and further ones after twice as long each, up to ten minutes: 11 lines
    for an hour of work.

    A last one is printed at the end if there was one before: short work prints none.
    """

    def __init__(self, screen: Terminal, label: str, total: int | None, unit: str) -> None:
        super().__init__(label, total, unit)
        self._screen, self._lines = screen, 0
        self._last, self._interval_seconds = time.monotonic(), PLAIN_INTERVAL_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines and kind is None:
            self._print()

    def _changed(self) -> None:
        if time.monotonic() - self._last >= self._interval_seconds:
            self._print()
            self._interval_seconds = min(2 * self._interval_seconds, MOST_INTERVAL_SECONDS)

    def _print(self) -> None:
        share = f" ({100 * self._done / self._total:.0f} %)" if self._total else ""
        of = f" of {self._total:,}" if self._total else ""
        rest = ", ".join(part for part in (self._detail, self.left(), self.end()) if part)
        self._screen.message(f"{self._label}: {self._done:,}{of} {self._unit}{share} {rest}".rstrip())
        self._lines += 1
        self._last = time.monotonic()


class SilentBar(PlainBar):
    """Prints nothing, for work that prints lines of its own."""

    def _print(self) -> None:
        self._last = time.monotonic()


class LiveBar(ScreenBar):
    """One line, redrawn ten times a second: count, time left, and those of detail, end, sparkline and bar
    that fit.

    rich colours it where the terminal has colours and `NO_COLOR` is not set.
    """

    def __init__(self, screen: Terminal, label: str, total: int | None, unit: str) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(label, total, unit)
        # of the terminal itself; `Live` replaces sys.stdout
        self._screen_began, self._draws = (
            screen.began,
            screen.draws,
        )
        self._console = Console(file=screen.talk)
        # A stream that is sent to a file stays there; rich would move its lines to the terminal.
        self._live = Live(
            get_renderable=self._line,
            console=self._console,
            refresh_per_second=10,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._done == 0:
            self._live.transient = True  # nothing was done: leave no empty line behind
        self._live.stop()

    def _line(self) -> Text:
        from rich.text import Text

        line = Text(no_wrap=True, overflow="crop")
        for field in self._counted() if self._total is not None or self._done else self._phase_alone():
            gap = "  " if line else ""
            if gap and line.cell_len + len(gap) + field.cell_len > self._console.width:
                continue
            line.append(gap).append_text(field)
        return line

    def _phase_alone(self) -> list[Text]:
        """Return the fields of work that is not counted: the phase, its time, and the time of the command."""
        from rich.text import Text

        now = time.monotonic()
        seconds, all_seconds = now - self._phase_began, now - self._screen_began
        fields = [Text(self._phase or self._label, "cyan"), Text(format_seconds(seconds))]
        return fields + (
            [Text(f"({format_seconds(all_seconds)} since the start)", "dim")]
            if all_seconds - seconds >= 1.0
            else []
        )

    def _counted(self) -> list[Text]:
        from rich.text import Text

        is_narrow = self._console.width < NARROW
        fields = [
            Text(self._label, "bold"),
            Text(f"{self._done:,}{f'/{self._total:,}' if self._total else ''} {self._unit}"),
        ]
        if self._phase:
            fields.append(
                Text(f"{self._phase} {format_seconds(time.monotonic() - self._phase_began)}", "cyan")
            )
        elif left := self.left():
            fields.append(Text(left))
        fields += [
            Text(text) for text in (*self._detail.split("  "), "" if self._phase else self.end()) if text
        ]
        if not self._draws:
            return fields
        if drawn := trend(self._trend, is_narrow=is_narrow):
            fields.append(Text(drawn, "cyan"))
        if self._total:
            width = BAR_WIDTH // 2 if is_narrow else BAR_WIDTH
            filled = min(width, width * self._done // self._total)
            fields.append(Text.assemble(("━" * filled, "green"), ("─" * (width - filled), "dim")))
        return fields


class LiveColumns:
    """Texts that grow next to each other on a terminal, each in a column under its title; the last state
    stays."""

    def __init__(self, screen: Terminal, titles: Sequence[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._titles, self._texts = [printable(title) for title in titles], ["" for _ in titles]
        self._live = Live(
            get_renderable=self._table, console=Console(file=screen.talk), refresh_per_second=10
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def add(self, column: int, piece: str) -> None:
        self._texts[column] += printable(piece)

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="bold")
        for title in self._titles:
            table.add_column(Text(title), ratio=1)
        table.add_row(*(Text(text) for text in self._texts))
        return table


class LiveLines:
    """Lines that replace the previous ones on a terminal, and vanish at the end; elsewhere they are not
    printed."""

    def __init__(self, screen: Terminal) -> None:
        from rich.console import Console
        from rich.live import Live

        self._is_live = screen.is_live
        self._live = Live(console=Console(file=screen.talk), transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, lines: Sequence[str]) -> None:
        from rich.text import Text

        if self._is_live:
            self._live.update(Text("\n".join(lines)), refresh=True)
