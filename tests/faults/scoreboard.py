"""Results of the fault catalogue as docs/evidence/faults.md. The page is also the record: rows that run again replace theirs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.plants import PLANTS
from tests.faults.table import GROUPS, PROMISES, REFUSED, ROWS, SURVIVED, Row

MISSING, NOT_RUN, WRONG, STUCK = "missing", "not run", "wrong", "stuck"

HEAD = """# Faults, as measured

Written by `scripts/test-faults --write`, on CPU ranks over gloo. Each row of the catalogue (`tests/faults/table.py`) injects one fault
and runs the tests of the promised behaviour. *Survived*: the run ends as if nothing had happened, or with the
documented stop. *Refused clearly*: one error with its reason and exit code, and nothing changed. *Wrong*: a test failed.
*Stuck*: a test did not end. A planted bug (`tests/faults/plants.py`) changes one function in a copy of the package; the tests of its rows
must then fail, or they prove nothing.
"""
_ROW = re.compile(r"\| (F\d{3}) \| .* \| ([a-z ]+) \| (\d*) \| (.*) \|")
_COUNT = re.compile(r"- ([a-z ]+): ([\d,]+)")


@dataclass(frozen=True)
class Standing:
    """Of one row."""

    state: str
    """survived, refused, wrong, stuck, not run (all its tests are slow) or missing."""
    cases: int = 0
    planted: tuple[str, ...] = ()
    """Names of the planted bugs that turned it red."""


@dataclass
class Board:
    what: list[str]
    """Which tests were run, and for how long; a line for each time that rows were run again."""
    standings: dict[str, Standing]
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, page: str) -> Board:
        """Of a page that `page` has written."""
        body = page.removeprefix(HEAD).strip().splitlines()
        counts = {found[1].replace(" ", "_"): int(found[2].replace(",", "")) for line in body if (found := _COUNT.fullmatch(line))}
        rows = [found for line in body if (found := _ROW.fullmatch(line))]
        standings = {row[1]: Standing(row[2], int(row[3] or 0), tuple(name for name in row[4].split("; ") if name)) for row in rows}
        # The first is the sum of the others that begin so.
        what = [line.removeprefix("- ") for line in body[: body.index("")]]
        return cls(what, standings, Counter({kind: number for kind, number in counts.items() if kind != "kill_points"}))

    def run_again(self, later: Board) -> None:
        """Takes over the rows of `later`. Counts are of tests, not of rows: those that grew or are new are taken."""
        self.standings |= later.standings
        self.counts |= later.counts
        self.what += later.what

    def page(self) -> str:
        parts = [HEAD, *self.summary(), "", "## Promises", ""]
        for number, promise in PROMISES.items():
            ids = [row.id for row in ROWS if row.promise == number and self.standings[row.id].state != MISSING]
            parts.append(f"{number}. {promise}: {', '.join(ids)}")
        for name, rows in GROUPS.items():
            parts += ["", f"## {name}", "", "| | injected fault | | cases | planted bug |", "|---|---|---|---|---|"]
            for row in rows:
                one = self.standings[row.id]
                cells = [row.id, row.injection, one.state, str(one.cases or ""), "; ".join(one.planted)]
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(parts) + "\n"

    def summary(self) -> list[str]:
        """As Markdown that reads well in a terminal too."""
        lines = [*self.what, ""]
        lines += [
            "| | rows | cases | survived | refused clearly | wrong | stuck | with a planted bug |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [self._line(name, rows) for name, rows in {**GROUPS, "**all**": ROWS}.items()] + [""]
        kill_points = sum(number for kind, number in self.counts.items() if kind.startswith("kill_points"))
        lines += [f"- kill points: {kill_points:,}"]
        lines += [f"- {kind.replace('_', ' ')}: {number:,}" for kind, number in sorted(self.counts.items())]
        red = {row: one.planted for row, one in self.standings.items() if one.planted}
        lines += [
            f"- planted bugs: {len({name for names in red.values() for name in names})} of {len(PLANTS)} seen, by {len(red)} rows",
            "",
        ]
        missing = [row for row in ROWS if self.standings[row.id].state == MISSING]
        lines += ["Not implemented:", "", *(f"- {row.id} ({row.injection}): {row.absent}" for row in missing), ""]
        if idle := [row for row, one in self.standings.items() if one.state == NOT_RUN]:
            lines += [f"Not run, since all their tests are slow: {', '.join(idle)}.", ""]
        unplanted = [row for row, one in self.standings.items() if one.state != MISSING and not one.planted]
        return [*lines, f"Held by tests, without a planted bug: {', '.join(unplanted) or 'none'}."]

    def _line(self, name: str, rows: Sequence[Row]) -> str:
        mine = [self.standings[row.id] for row in rows]
        states = Counter(one.state for one in mine)
        held = [one for one in mine if one.state not in (MISSING, NOT_RUN)]
        cells = [name, f"{len(held)} of {len(mine)}", str(sum(one.cases for one in held))]
        cells += [str(states[state]) for state in (SURVIVED, REFUSED, WRONG, STUCK)]
        return "| " + " | ".join([*cells, str(sum(bool(one.planted) for one in held))]) + " |"
