"""Text as a terminal shows it: without escapes of its own, wrapped between words, and as far as it fits."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Any

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.units import sparkline

TREND = 20
"""Values of a sparkline."""
KEPT = "\n\t\u200c\u200d"
"""Control characters that are printed: line ends, tabs, and the joiners of letters and emoji."""
LEAST_LAST_COLUMN = 20
"""Characters. A table whose last column would be narrower is printed as a list of records."""


def printable(text: str) -> str:
    """Return `text` with control characters escaped: names and rows from files may hold terminal escapes."""
    return "".join(
        char if char in KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs") else repr(char)[1:-1]
        for char in text
    )


def problem_lines(problem: Problem) -> list[str]:
    """Return `error: recipe.yaml:14:3: message`, then a line for each hint."""
    place = str(problem.where)
    lines = [f"error: {place}: {problem.message}" if place else f"error: {problem.message}"]
    if problem.hint:
        lines.append(f"hint: {problem.hint}")
    if problem.ways_out:
        lines.append("ways out:")
        lines.extend(f"  {way}" for way in problem.ways_out)
    return lines


def fitted(fields: Sequence[str], width: int) -> str:
    """Join `fields`, most important first, with two spaces, and leave out those at the end that do not fit
    into `width` columns."""
    line = fields[0]
    for field in fields[1:]:
        if len(line) + 2 + len(field) > width:
            break
        line += f"  {field}"
    return line


def trend(values: Sequence[float], *, is_narrow: bool) -> str:
    """Return a sparkline of the last `TREND` values, of half as many on a narrow terminal; "" for fewer than
    two."""
    shown = values[-(TREND // 2 if is_narrow else TREND) :]
    return sparkline(shown) if len(shown) > 1 else ""


def wrapped(text: str, width: int, indent: int | None = None) -> list[str]:
    """Wrap a line between words. What is in backticks, to be typed as it is, and words longer than a line
    stay on one line.

    Later lines are indented by `indent`; None: by two more than the first.
    """
    if len(text) <= width or not text.strip():
        return [text]
    kept = _CODE.sub(lambda match: match[0].replace(" ", _NO_BREAK), text)
    margin = " " * (len(text) - len(text.lstrip()) + 2 if indent is None else indent)
    lines = textwrap.wrap(
        kept, max(width, len(margin) + LEAST_LAST_COLUMN), subsequent_indent=margin, **_BETWEEN_WORDS
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


_CODE = re.compile(r"`[^`]+`")
_NO_BREAK = "\x00"
_BETWEEN_WORDS: dict[str, Any] = {
    "break_long_words": False,
    "break_on_hyphens": False,
    "replace_whitespace": False,
    "expand_tabs": False,
}
