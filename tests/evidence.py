"""Measured results: a JSON document in docs/evidence/data/ with one row a line, and a page of the docs that
is generated from it.

The suites write both. `scripts/generate --check` fails where a page is not what its data make.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True)
class Results:
    about: Mapping[str, Any]
    """What holds for all rows: versions of libraries, limits."""
    rows: Sequence[Mapping[str, Any]]

    def dump(self) -> str:
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in self.rows)
        return f'{{\n "about": {json.dumps(self.about, ensure_ascii=False)},\n "rows": [\n{rows}\n ]\n}}\n'


@dataclass(frozen=True)
class Evidence:
    """A page and the data file that it is generated from."""

    page: Path
    """Relative to docs/."""
    make: Callable[[Results, str], str]
    """The text of the page for results; the second argument is its present text, of which hand-written
    sections are kept."""

    @property
    def data(self) -> Path:
        return DOCS / "evidence" / "data" / f"{self.page.stem}.json"

    def read(self) -> Results:
        return Results(**json.loads(self.data.read_text(encoding="utf-8")))

    def text(self) -> str:
        path = DOCS / self.page
        return self.make(self.read(), path.read_text(encoding="utf-8") if path.exists() else "")

    def write(self, results: Results) -> None:
        self.data.parent.mkdir(exist_ok=True)
        self.data.write_text(results.dump(), encoding="utf-8")
        (DOCS / self.page).write_text(self.text(), encoding="utf-8")


def installed(*packages: str) -> dict[str, str]:
    """Return versions without the local part, such as `+cpu`."""
    return {name: version(name).split("+")[0] for name in packages}


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table that ends with a line break."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace('<', '&lt;') for cell in line)} |\n"
        for line in lines
    )
