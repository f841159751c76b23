"""The only writer to the terminal: lines, tables, notices and problems, a copy of each line in a log, and one
JSON document.

Lines go to stdout; with `--json` they go to stderr, and stdout gets one document.
A terminal that closes never stops a command: a run must outlive the window it was started from.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import typer

from fsdp_tune.cli.nonblocking_streams import GONE, OutletStream
from fsdp_tune.cli.terminal_log import TerminalLog
from fsdp_tune.cli.terminal_text import LEAST_LAST_COLUMN, fitted, printable, problem_lines, wrapped
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import Notice, Problem

NARROW = 100
"""Columns below which a terminal gets short forms."""


class Terminal:
    """The terminal of a command. With `json_output`, only `document` reaches stdout, once, when the command
    ends."""

    def __init__(self, *, json_output: bool) -> None:
        self.json_output = json_output
        self._document: dict[str, object] = {}
        self._notices: list[Notice] = []
        self._log: TerminalLog | None = None
        self._shown: list[str] = []
        """Lines shown before there is a log file."""
        self._waited_for: tuple[TextIO, TextIO] | None = None
        """stdout and stderr while outlets stand in for them."""
        self._has_result = False
        self._has_asked = False
        self._collected: list[str] | None = None
        self.began = time.monotonic()
        self.is_quiet = False
        """Whether lines go to the log alone. Notices, warnings and problems are printed."""

    @property
    def talk(self) -> TextIO:
        """The stream of lines. Looked up at each call, since tests and `| head` replace it."""
        return sys.stderr if self.json_output or self._has_result else sys.stdout

    @property
    def is_live(self) -> bool:
        """Whether lines may be redrawn in place."""
        return not self.is_quiet and self.talk.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def is_narrow(self) -> bool:
        """Whether this is a terminal that gets short forms."""
        return self.talk.isatty() and self._width() < NARROW

    @property
    def wrap_width(self) -> int | None:
        """The columns at which text is wrapped; None where this is no terminal, which gets lines as they
        are."""
        return self._width() if self.talk.isatty() else None

    @property
    def draws(self) -> bool:
        """Whether this is a terminal that shows sparklines."""
        encoding = self.talk.encoding or "utf-8"  # rich's stand-in for a stream under a live bar has none
        return self.is_live and encoding.lower().startswith("utf")

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[str]]:
        """Collect lines instead of printing them."""
        self._collected = []
        try:
            yield self._collected
        finally:
            self._collected = None

    def log_to(self, path: Path) -> None:
        """Append every line to a file too, starting with the lines that were shown before. A file that fails
        is closed with a warning."""
        self._log = TerminalLog(path, failed=self._log_failed)
        if self._waited_for is not None:
            self._log.stop_waiting()
        for line in self._shown:
            self._log.write(line)
        self._shown.clear()

    def stop_waiting(self) -> None:
        """From now on neither a reader of stdout or stderr nor the disk of the log delays this command
        (`cli.nonblocking_streams`)."""
        if self._waited_for is not None:
            return
        self._waited_for = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (
            OutletStream(stream, partial(self._stream_failed, name)) if _has_descriptor(stream) else stream
            for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr"))
        )
        if self._log is not None:
            self._log.stop_waiting()

    def _wait_again(self) -> None:
        """Let the readers take what waits, and write to them directly from now on."""
        if self._waited_for is None:
            return
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, OutletStream):
                stream.drain()
        sys.stdout, sys.stderr = self._waited_for
        self._waited_for = None

    def _stream_failed(self, name: str, error: OSError) -> None:
        """Called in the thread of an outlet."""
        if error.errno in GONE:
            return
        text = _closed(name, error)
        self._record(text)
        if name == "stdout":
            write_text(sys.stderr, text + "\n")

    def next_run(self) -> None:
        """Close the file of `log_to`: lines from now on are for the next one, and times count from now."""
        self.began = time.monotonic()
        if self._log is not None:
            self._log.close()
            self._log = None

    def message(self, text: str, *, indent: int | None = None, wraps: bool = True) -> None:
        """Print a line. A terminal gets it as `wrapped` returns it, unless it `wraps` not: a table, or a
        command to be copied. A pipe and the log get one line."""
        lines = [text]
        if wraps and self.talk.isatty():
            lines = [line for part in text.split("\n") for line in wrapped(part, self._width(), indent)]
        if self._collected is not None:
            self._collected.extend(map(printable, lines))
            return
        self._record(text)
        for line in lines:
            self._print(line)

    def _print(self, line: str) -> None:
        if not self.is_quiet:
            write_text(self.talk, printable(line) + "\n")

    def result(self, text: str) -> None:
        """Print the text that a command is run for on stdout, unchanged; lines go to stderr from now on."""
        self._has_result = True
        write_text(sys.stdout, text, is_result=True)

    def piece(self, text: str) -> None:
        """Print a part of a line, which later parts continue. It is not copied into the log."""
        write_text(self.talk, printable(text))

    def ask(self, prompt: str) -> str | None:
        """Return a line of stdin without its end; None at the end of the input. A line that is not typed is
        printed after the prompt."""
        stdin = sys.stdin
        if not self._has_asked and isinstance(stdin, io.TextIOWrapper):
            stdin.reconfigure(errors="replace")  # before the first read alone
        self._has_asked = True
        is_typed = sys.stdin.isatty()
        if is_typed and sys.stdout.isatty() and self.talk is sys.stdout:
            return self._ask_with_history(prompt)
        if is_typed:
            self.piece(prompt)
        line = sys.stdin.readline()
        if line and not is_typed:
            self.message(prompt + line.rstrip("\n"), wraps=False)
        return line.rstrip("\n") if line else None

    def _ask_with_history(self, prompt: str) -> str | None:
        with contextlib.suppress(ImportError):
            import readline as readline  # gives `input` a history and keys to edit a line
        try:
            return input(prompt)
        except EOFError:
            self.message("")
            return None

    def fields(self, fields: Sequence[str], narrow: Sequence[str]) -> None:
        """Print `fields` on one line. A terminal that is too narrow gets `narrow`, the most important first,
        as far as they fit; a pipe and the log file get all fields."""
        line = "  ".join(fields)
        self._record(line)
        is_cut = self.talk.isatty() and len(line) > self._width()
        self._print(fitted(narrow, self._width()) if is_cut else line)

    def warn(self, text: str) -> None:
        self._record(text)
        write_text(sys.stderr, printable(text) + "\n")

    def _record(self, text: str) -> None:
        if self._log is None:
            self._shown.append(printable(text))
        else:
            self._log.write(printable(text))

    def _log_failed(self, path: Path, error: OSError) -> None:
        write_text(
            sys.stderr,
            printable(
                f"warning: {path} cannot be written ({error.strerror}) and is closed; the run continues\n"
            ),
        )

    def _width(self, stream: TextIO | None = None) -> int:
        """Return the columns of the terminal behind `stream`, None: `talk`; 80 if they are unknown."""
        try:
            return (
                int(os.environ.get("COLUMNS") or 0)
                or os.get_terminal_size((stream or self.talk).fileno()).columns
                or 80
            )
        except (OSError, ValueError):
            return 80

    def notices(self, notices: Sequence[Notice]) -> None:
        """Print each notice once, on stderr, and add it to the JSON document."""
        for notice in notices:
            if notice in self._notices:
                continue
            self._notices.append(notice)
            place = str(notice.where)
            self._paint("notice:", "yellow", f" {place}: {notice.message}" if place else f" {notice.message}")
            if notice.hint:
                self._paint("hint:", "cyan", f" {notice.hint}")

    def _paint(self, head: str, colour: str, tail: str) -> None:
        self._record(head + tail)
        wants_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        text = (
            "\n".join(wrapped(head + tail, self._width(sys.stderr))) if sys.stderr.isatty() else head + tail
        )
        shown = printable(text).removeprefix(head)
        write_text(
            sys.stderr, (typer.style(head, fg=colour, bold=True) if wants_colour else head) + shown + "\n"
        )

    def problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            first, *rest = problem_lines(problem)
            self._paint("error:", "red", first.removeprefix("error:"))
            for line in rest:
                head, colon, tail = line.partition(":")
                if head in ("hint", "ways out"):
                    self._paint(head + colon, "cyan", tail)
                else:
                    self.warn(line)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        pipe_width: int | None = None,
        droppable: Sequence[str] = (),
    ) -> None:
        """Print a table under its title. A pipe gets one line for each row, unless a width is given.

        Where the table is wider than that, `droppable` columns are left out, the first ones first.

        Within a width the last column is wrapped to fit, as `wrapped` does: paths and commands stay whole, so
        that they can be copied. If the others leave no room for it, its words are below each row; if they do
        not fit either, rows are printed as records.
        """
        width = self._width() if self.talk.isatty() else pipe_width
        cells = [[printable(str(cell).replace("\n", " ")) for cell in row] for row in rows]
        if width is not None:
            columns, cells = _fitting_columns(columns, cells, width, droppable)
        widths = _widths(columns, cells)
        if title:
            self.message(title)
        indent = 2 + sum(width + 2 for width in widths[:-1])
        if width is not None:
            room = width - indent
            if room < min(widths[-1], LEAST_LAST_COLUMN):
                is_below = len(columns) > 2 and widths[-1] > LEAST_LAST_COLUMN and indent - 2 <= width
                (self._rows_with_words_below if is_below else self._records)(columns, cells, width)
                return
            widths[-1] = min(widths[-1], room)
        for line in [list(columns), ["─" * width for width in widths], *cells]:
            first, *rest = wrapped(line[-1], widths[-1], 0)
            padded = (cell.ljust(width) for cell, width in zip([*line[:-1], first], widths, strict=True))
            self.message("  " + "  ".join(padded).rstrip(), wraps=False)
            for part in rest:
                self.message(" " * indent + part, wraps=False)

    def _rows_with_words_below(
        self, columns: Sequence[str], cells: Sequence[Sequence[str]], width: int
    ) -> None:
        """Print a table without its last column, whose words are indented below each row."""
        widths = [max(len(line[index]) for line in [columns, *cells]) for index in range(len(columns) - 1)]
        for *row, words in [list(columns), ["─" * each for each in widths] + [""], *cells]:
            self.message(
                "  " + "  ".join(cell.ljust(each) for cell, each in zip(row, widths, strict=True)).rstrip(),
                wraps=False,
            )
            for line in wrapped(f"      {words}", width, 6) if words else ():
                self.message(line, wraps=False)

    def _records(self, columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> None:
        """Print each row of a table that is too wide as its first cell, and below it a line for each other
        cell."""
        name_width = max((len(name) for name in columns[1:]), default=0)
        indent = 4 + name_width + 2
        for first, *others in cells:
            self.message(f"  {first}".rstrip(), wraps=False)
            for name, cell in zip(columns[1:], others, strict=True):
                parts = wrapped(cell, max(width - indent, LEAST_LAST_COLUMN), 0) if cell.strip() else []
                for number, part in enumerate(parts):
                    self.message(f"    {'' if number else name:<{name_width}}  {part}", wraps=False)

    def document(self, value: JsonAnswer | dict[str, object]) -> None:
        """Set the command's JSON document. A later failure adds its `errors` to it."""
        self._document = value.as_dict() if isinstance(value, JsonAnswer) else value

    def close(self, problems: Sequence[Problem] = ()) -> None:
        """End the command: print the problems, close the log, and print the JSON document."""
        self.problems(problems)
        if self._log is not None:
            self._log.close()
        self._wait_again()
        if not self.json_output:
            return
        document = dict(self._document)
        if self._notices:
            document.setdefault("notices", [notice.as_dict() for notice in self._notices])
        if problems:
            document["errors"] = [problem.as_dict() for problem in problems]
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, default=str)
        write_text(sys.stdout, text + "\n", is_result=True)


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(line[index]) for line in [columns, *cells]) for index in range(len(columns))]


def _fitting_columns(
    columns: Sequence[str], cells: Sequence[list[str]], width: int, droppable: Sequence[str]
) -> tuple[Sequence[str], Sequence[list[str]]]:
    """Return the columns that fit into `width` after those of `droppable` that are needed for it are left
    out, the first ones first."""
    for name in droppable:
        if sum(each + 2 for each in _widths(columns, cells)) <= width:
            break
        if name in columns:
            at = columns.index(name)
            columns, cells = (
                [*columns[:at], *columns[at + 1 :]],
                [[*row[:at], *row[at + 1 :]] for row in cells],
            )
    return columns, cells


def _has_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError):
        return False


def _closed(name: str, error: OSError) -> str:
    return f"warning: {name} cannot be written ({error.strerror}) and is closed; the command continues"


def write_text(stream: TextIO, text: str, *, is_result: bool = False) -> None:
    """Write at once. A closed pipe or terminal is ignored from then on. After any other failure, such as a
    full disk, the stream is closed
    with a warning: a command must not fail for its lines. Raises: OSError, if the text is what the command is
    run for.
    """
    try:
        encoding = stream.encoding or "utf-8"  # rich's stand-in for a stream under a live bar has none
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        with open(os.devnull, "w") as nowhere:  # for what the stream still holds, too
            os.dup2(nowhere.fileno(), stream.fileno())
        if error.errno not in GONE and is_result:
            raise
        if error.errno not in GONE and stream is sys.stdout:
            write_text(sys.stderr, _closed("stdout", error) + "\n")
