"""The page of disturbances names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROWS = re.compile(r"^\| (?!situation|---).*\| `(tests/[\w/]+\.py)::(test_\w+)` \|$", re.MULTILINE)


def test_each_row_of_the_page_names_an_existing_test(repository: Path) -> None:
    page = (repository / "docs" / "evidence" / "disturbances.md").read_text(encoding="utf-8")
    rows = [
        line
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith(("| situation", "| ---"))
    ]
    named = ROWS.findall(page)
    assert len(named) == len(rows) > 20, "each row ends with its test"
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (repository / file).read_text(encoding="utf-8")
    ]
    assert missing == []
