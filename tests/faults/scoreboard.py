"""Results of the fault catalogue: docs/evidence/data/faults.json, in which rows that run again replace
theirs, and the page made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import page as chaos
from tests.evidence import Evidence, Results, table
from tests.faults.plants import PLANTS
from tests.faults.table import GROUPS, PROMISES, REFUSED, ROWS, SURVIVED, Row

MISSING, NOT_RUN, WRONG, STUCK = "missing", "not run", "wrong", "stuck"

HEAD = """# Faults, as measured

Each row of the catalogue (`tests/faults/table.py`) injects one fault and runs the tests of the promised behaviour, on CPU ranks
over gloo. *Survived*: the run ends as if nothing had happened, or with the documented stop. *Refused clearly*: one error with its
reason and exit code, and nothing changed. *Wrong*: a test failed. *Stuck*: a test did not end. A
[planted bug](../development/testing.md#planted-bugs) must fail the tests of its rows.
[faults.json](data/faults.json) has each row; `scripts/test --suite faults --write` and `scripts/test --suite chaos --write`
write it, and this page.
"""  # noqa: E501


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
    def of(cls, results: Results) -> Board:
        standings = {
            row["id"]: Standing(row["state"], row["cases"], tuple(row["planted"])) for row in results.rows
        }
        return cls(list(results.about["runs"]), standings, Counter(results.about["counts"]))

    def results(self, chaos_parts: Sequence[Mapping[str, Any]]) -> Results:
        """What is kept, with the chaos tests of `chaos_parts`."""
        group_of = {row.id: name for name, rows in GROUPS.items() for row in rows}
        rows = [
            {
                "id": row.id,
                "group": group_of[row.id],
                "promise": PROMISES[row.promise],
                "fault": row.injection,
                "state": one.state,
                "cases": one.cases,
                "planted": list(one.planted),
            }
            for row in ROWS
            if (one := self.standings.get(row.id))
        ]
        return Results({"runs": self.what, "counts": dict(self.counts), "chaos": list(chaos_parts)}, rows)

    def run_again(self, later: Board) -> None:
        """Takes over the rows of `later`. Counts are of tests, not of rows: those that grew or are new are
        taken."""
        self.standings |= later.standings
        self.counts |= later.counts
        self.what += later.what

    def page(self) -> str:
        promises = [
            f"{number}. {promise}: {sum(row.promise == number and bool(row.tests) for row in ROWS)}"
            for number, promise in PROMISES.items()
        ]
        return (
            "\n".join(
                [
                    HEAD,
                    *self.summary(),
                    "",
                    "## Promises",
                    "",
                    "With the number of faults that test each:",
                    "",
                    *promises,
                ]
            )
            + "\n"
        )

    def summary(self) -> list[str]:
        """As Markdown that reads well in a terminal too."""
        names = ["", "rows", "cases", "survived", "refused clearly", "wrong", "stuck", "with a planted bug"]
        lines = [*(f"- {each}" for each in self.what), ""]
        lines += [
            table(names, [self._line(name, rows) for name, rows in {**GROUPS, "**all**": ROWS}.items()])
        ]
        counted = ", ".join(
            f"{number:,} {kind.replace('_', ' ')}" for kind, number in sorted(self.counts.items())
        )
        red = {row: one.planted for row, one in self.standings.items() if one.planted}
        seen = len({name for names in red.values() for name in names})
        lines += [
            f"Among the cases: {counted}. {seen} of {len(PLANTS)} planted bugs seen, by {len(red)} rows.",
            "",
        ]
        missing = [row for row in ROWS if self.standings[row.id].state == MISSING]
        lines += [f"Not implemented: {row.id} ({row.injection}): {row.absent}." for row in missing]
        if idle := [row for row, one in self.standings.items() if one.state == NOT_RUN]:
            lines += [f"Not run, since all their tests are slow: {', '.join(idle)}.", ""]
        unplanted = [row for row, one in self.standings.items() if one.state != MISSING and not one.planted]
        return [
            *lines,
            *([f"Held by tests, without a planted bug: {', '.join(unplanted)}."] if unplanted else []),
        ]

    def _line(self, name: str, rows: Sequence[Row]) -> list[str]:
        mine = [self.standings[row.id] for row in rows]
        states = Counter(one.state for one in mine)
        held = [one for one in mine if one.state not in (MISSING, NOT_RUN)]
        cells = [name, f"{len(held)} of {len(mine)}", str(sum(one.cases for one in held))]
        cells += [str(states[state]) for state in (SURVIVED, REFUSED, WRONG, STUCK)]
        return [*cells, str(sum(bool(one.planted) for one in held))]


def page(results: Results, _previous: str = "") -> str:
    return f"{Board.of(results).page()}\n{chaos.section(results.about['chaos'])}"


EVIDENCE = Evidence(Path("evidence/faults.md"), page)


def record_chaos(part: Mapping[str, Any]) -> None:
    """Keep the results of chaos tests on as many machines as `part` has, and write the page."""
    kept = EVIDENCE.read()
    EVIDENCE.write(Results({**kept.about, "chaos": chaos.with_part(kept.about["chaos"], part)}, kept.rows))
