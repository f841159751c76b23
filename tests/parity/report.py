"""Results of the parity tests: a summary for the terminal, docs/evidence/data/parity.json and the page made
of it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.evidence import Evidence, Results, table

Row = Mapping[str, Any]
_KEYS = ("section", "case")
PLANTED = "planted bugs"
FAULTS_OF_STACK = "faults of the stack"

HEAD = """# Parity

Each run is one of the real worker on CPU ranks over gloo (torch {torch}, transformers {transformers}, accelerate {accelerate}),
compared with the [plain loop](numerics.md), in which each example goes through the model alone.
`scripts/test --suite parity --write` writes this page and [parity.json](data/parity.json), which has a row for each run.
A run takes 22 optimizer steps of 16 rows over 4 epochs, the last batch with 3 rows; vocabulary
(257) and widths are not divisible by any number of ranks.

Numbers are relative deviations, the largest of all runs: `loss` and `grad norm` of any step, `mean` the mean signed one of the loss,
`parameters` the norm of the difference after the last step over the norm of the update.
The tests require loss, eval loss and gradient norm within 1e-5 and parameters
within 1e-4; of Muon, which orthogonalises in bf16, 5e-5 and 0.02.

{coverage}
"""  # noqa: E501
LOW_PRECISION = """## Low precision

Deviations from one device in fp32, next to those of one device that computes in bf16.
"""
BUGS = """## Planted bugs

The comparison detects all {number} (`tests/parity/breaks.py`).
"""
STACK = """## Faults of the stack

{number} cases compare the stock path with the one here ([Numerics](numerics.md#faults-of-the-stack-and-where-they-are-fixed)).
"""  # noqa: E501
DRAWN = "## Recipes drawn from the schema"
"""Heading of the last section of docs/evidence/parity.md, which is hand-written from the output of
`scripts/test --suite fuzz`."""


def by_section(rows: Iterable[Row]) -> dict[str, list[Row]]:
    sections: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        sections[row["section"]].append(row)
    return sections


def _columns(members: Sequence[Row]) -> list[str]:
    """Of all rows: a planted bug that stops the run leaves words instead of numbers."""
    return [name for name in dict.fromkeys(name for row in members for name in row) if name not in _KEYS]


def _worst(members: Sequence[Row]) -> dict[str, str]:
    """Column → the largest of its numbers; columns of words are left out."""
    found = {name: _largest([row[name] for row in members if name in row]) for name in _columns(members)}
    return {name: value for name, value in found.items() if value is not None}


def _largest(values: list[str]) -> str | None:
    try:
        return max(values, key=lambda value: abs(float(value)))
    except ValueError:
        return None  # words


def summary(rows: Iterable[Row]) -> list[str]:
    """One line a section: cases, and the largest of each number."""
    return [
        f"{section}: {len(members)} cases  "
        f"{'  '.join(f'{name} ≤ {value}' for name, value in _worst(members).items())}"
        for section, members in by_section(rows).items()
    ]


def page(results: Results, previous: str) -> str:
    """Return the new docs/evidence/parity.md. The section DRAWN of the previous one is kept."""
    sections = by_section(results.rows)
    bugs, stack = sections.pop(PLANTED, []), sections.pop(FAULTS_OF_STACK, [])
    tables: dict[tuple[str, ...], list[list[object]]] = defaultdict(list)
    for section, members in sections.items():
        worst = {name: value for name, value in _worst(members).items() if name != "worst tensor"}
        tables[*worst].append([section, len(members), *worst.values()])
    parts = [
        HEAD.format(
            **results.about, coverage=coverage(row for members in sections.values() for row in members)
        )
    ]
    for names, lines in tables.items():
        parts += [LOW_PRECISION] if any("one device" in name for name in names) else []
        parts.append(table(["comparison", "runs", *names], lines))
    parts += [BUGS.format(number=len(bugs)), STACK.format(number=len(stack))]
    _, heading, drawn = previous.partition(DRAWN)
    return "\n".join([*parts, heading + drawn])


def coverage(rows: Iterable[Row]) -> str:
    """List the models, ranks, strategies and switches of the cases, whose names have them in this order."""
    named: tuple[Counter[str], ...] = (Counter(), Counter(), Counter(), Counter())
    for row in rows:
        words = re.split(r", (?![^(]*\))", row["case"])
        for number, word in enumerate(words if len(words) > 2 and words[1].endswith(" ranks") else ()):
            if not word.startswith("("):
                named[min(number, 3)][word if number in (0, 2) else word.split()[0]] += 1
    *counted, switches = named
    titles = ("Models", "Ranks", "Strategies")
    lines = [
        f"- {title}: {', '.join(f'{name} ({n})' for name, n in each.most_common())}"
        for title, each in zip(titles, counted, strict=True)
    ]
    return "\n".join([*lines, f"- Switches, in pairs: {', '.join(sorted(switches))}"])


EVIDENCE = Evidence(Path("evidence/parity.md"), page)
