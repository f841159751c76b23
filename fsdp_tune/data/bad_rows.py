"""Judge rows that cannot be used: one rule for `validate`, `prepare` and `train`, with an example of each
kind of bad row.

With `data.on_bad_row: error` any bad row is refused; with `skip`, more of them than the share
`data.max_bad_share` of all rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where
from fsdp_tune.data.format.row_account import ignoring_hint
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.recipe.schema.data_section import Data

EXAMPLES = 10
"""Kinds of bad rows that are shown."""
NO_GOOD_ROW = "no row can be used: check the columns, `data.format` and `data.chat_template`"
_MARGIN = 0.1
"""Added to the share of bad rows among the first ones, where that of all is not known."""
_QUOTED, _NUMBER = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\""), re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class BadRows:
    """The bad rows of some sources, in the order of the files."""

    rows: Sequence[tuple[int, BadRow]]
    """(number of the file, bad row)"""
    names: Sequence[str]
    """Of the files."""
    rows_read: int
    unencoded: int = 0
    """Rows that were read without encoding them, which may be bad for reasons that only show then."""
    bad_unencoded: int = 0
    """Bad rows among these."""
    unreadable: int = 0
    """Bad rows that were never rows to encode: of all files, also where the others were not encoded."""
    is_beginning: bool = False
    """Whether more rows follow that have not been read."""

    @property
    def counts(self) -> str:
        """`21 of 60 rows`, or `21 of the first 60 rows`."""
        return f"{len(self.rows):,} of {'the first ' if self.is_beginning else ''}{self.rows_read:,} rows"

    def problems(self, data: Data) -> list[Problem]:
        """Return an example of each kind of bad row and, last, the total; nothing if the rows are to be left
        out."""
        if not self.rows:
            return []
        if data.on_bad_row == "error":
            hint = self.ignoring_unread() or self._skipping(data.max_bad_share)
            return [*self.examples(), Problem("bad-rows", f"{self.counts} cannot be used", hint=hint)]
        if self.is_beginning or not exceeds_bad_share(len(self.rows), self.rows_read, data.max_bad_share):
            return []
        unread = self.ignoring_unread()
        total = too_many(len(self.rows), self.rows_read, data.max_bad_share, unread or "fix them")
        return [
            *self.examples(),
            replace(total, hint=unread) if unread and len(self.rows) >= self.rows_read else total,
        ]

    def notices(self, data: Data) -> list[Notice]:
        """Return what a preparation will leave out, of rows that are not `problems`."""
        if not self.rows or self.problems(data):
            return []
        first, more = self.examples()[0], f"{data.max_bad_share:g}"
        message = f"{self.counts} cannot be used and will be left out, such as {first.where}: {first.message}"
        is_more = exceeds_bad_share(len(self.rows), self.rows_read, data.max_bad_share)
        hint = (
            f"more than `data.max_bad_share: {more}` of these rows; `fsdp-tune prepare` refuses the data "
            "if that is so of all rows"
        )
        return [Notice("bad-rows-skipped", message, hint=hint if is_more else first.hint)]

    def examples(self) -> list[Problem]:
        return bad_row_examples(self.rows, self.names)

    def ignoring_unread(self) -> str | None:
        """Return a hint with the option that ignores what no format reads in any of the rows; None if that
        would not be enough."""
        if not all(row.unread for _, row in self.rows):
            return None
        return ignoring_hint(name for _, row in self.rows for name in row.unread)

    def _skipping(self, most: float) -> str:
        """Return a hint with the options that leave the rows out: with another `data.max_bad_share` if there
        are more than `most`."""
        if len(self.rows) >= self.rows_read:
            return NO_GOOD_ROW
        options, lost = "--set data.on_bad_row=skip", lost_rows(len(self.rows), self.rows_read)
        if self.is_beginning or self.unencoded:
            unreadable = self.unreadable / self.rows_read
            encoded = max(self.rows_read - self.unencoded - self.unreadable, 1)
            bad_encoded = (len(self.rows) - self.bad_unencoded - self.unreadable) / encoded
            share = max(len(self.rows) / self.rows_read, unreadable + (1 - unreadable) * bad_encoded)
            lost = f"about {_percent(share)} of the rows"
            options += f" --set data.max_bad_share={min(1.0, share + _MARGIN):.2f}" if share > most else ""
        elif exceeds_bad_share(len(self.rows), self.rows_read, most):
            options += f" {_raised_share(len(self.rows), self.rows_read)}"
        return f"fix them, or leave them out: `{options}` drops {lost}, which are counted and listed"


def bad_row_problem(name: str, row: BadRow) -> Problem:
    return Problem("bad-row", row.reason, Where(name, row.number, row.column), hint=row.hint)


def bad_row_examples(bad: Sequence[tuple[int, BadRow]], names: Sequence[str]) -> list[Problem]:
    """Return the first row of each kind, with the number of rows of that kind, in the order of the rows; at
    most EXAMPLES.

    Rows are of one kind if their reasons differ in numbers alone. If there are too many kinds, those go first
    that differ in more than quoted names and values.
    """
    kinds: dict[str, list[tuple[int, BadRow]]] = {}
    for file, row in bad:
        kinds.setdefault(_NUMBER.sub("#", row.reason), []).append((file, row))
    coarse: dict[str, str] = {}
    for kind in kinds:
        coarse.setdefault(_QUOTED.sub("…", kind), kind)
    shown = [*coarse.values(), *(kind for kind in kinds if kind not in coarse.values())][:EXAMPLES]
    problems: list[Problem] = []
    for kind in (kind for kind in kinds if kind in shown):
        [(file, row), *others] = kinds[kind]
        problem = bad_row_problem(names[file], row)
        more = f" (as in {len(others):,} more row{'s' if len(others) > 1 else ''})" if others else ""
        problems.append(replace(problem, message=f"{problem.message}{more}"))
    return problems


def exceeds_bad_share(bad: int, rows: int, most: float) -> bool:
    """Return whether more than the share `most` of the rows is bad."""
    return bad > most * rows * (1 + 1e-12)


def refuse_bad_share(bad: int, rows: int, most: float, *, hint: str) -> None:
    """Raise a usage error if more than `data.max_bad_share` of the rows is bad."""
    if exceeds_bad_share(bad, rows, most):
        raise FsdpTuneError(too_many(bad, rows, most, hint))


def too_many(bad: int, rows: int, most: float, hint: str) -> Problem:
    message = f"{lost_rows(bad, rows)} cannot be used, more than `data.max_bad_share: {most:g}`"
    ways = f"{hint}, or leave them out: `{_raised_share(bad, rows)}` drops {lost_rows(bad, rows)}"
    return Problem("too-many-bad-rows", message, hint=NO_GOOD_ROW if bad >= rows else ways)


def lost_rows(bad: int, rows: int) -> str:
    """Return `21 of 60 rows (35 %)`."""
    return f"{bad:,} of {rows:,} rows ({_percent(bad / rows)})"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _raised_share(bad: int, rows: int) -> str:
    percent = next(
        (percent for percent in range(100) if not exceeds_bad_share(bad, rows, percent / 100)), 100
    )
    return f"--set data.max_bad_share={percent / 100:g}"
