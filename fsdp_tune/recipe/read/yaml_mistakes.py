"""Mistakes in lines that YAML cannot read, each with its place and what to write instead.

PyYAML reports where it stopped, often the line below the mistake: `max_length:32` is the beginning of a text
that may continue there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_tune.core.units import shown

SPACES = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u200b\u202f\u205f\u3000"
"""Characters that look like a space, or are invisible, and that YAML treats as letters."""
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_INDENT = r"(?P<indent>\s*(?:- +)*)"
UNSPACED = re.compile(rf"(?P<key>{_NAME}):(?P<value>[^\s/].*)")
_LINE_UNSPACED = re.compile(rf"{_INDENT}(?P<key>{_NAME}):(?P<value>[^\s/][^#]*?)\s*(?:#.*)?")
_EQUALS = re.compile(rf"{_INDENT}(?P<key>{_NAME})\s*=\s*(?P<value>[^#]+?)\s*(?:#.*)?")
_WORD = re.compile(rf"{_INDENT}(?P<key>{_NAME})\s*(?:#.*)?")
_BRACES = re.compile(rf"{_INDENT}(?P<key>{_NAME}):\s+(?P<value>\{{[^#]*?\}}[^\s,\]}}#][^#]*?)\s*(?:#.*)?")


@dataclass(frozen=True, slots=True)
class Mistake:
    line: int
    """Counted from 0."""
    column: int
    message: str
    hint: str


def space_mistake(line: int, column: int, text: str) -> Mistake | None:
    """Return the mistake of the first character in `text` that looks like a space, or None; `text` begins at
    `column`."""
    found = next((index for index, character in enumerate(text) if character in SPACES), None)
    if found is None:
        return None
    name = "a no-break space" if text[found] == "\u00a0" else f"the character U+{ord(text[found]):04X}"
    hint = (
        f'replace it with an ordinary space; inside a text write "\\u{ord(text[found]):04x}" in double quotes'
    )
    return Mistake(line, column + found, f"{name}, which is part of the word next to it", hint)


def unspaced(key: str, value: str) -> tuple[str, str]:
    """Return the message and the hint for `key:value`."""
    return f"`{shown(f'{key}:{value}')}` has no space after the colon", f"write `{key}: {shown(value)}`"


def mistake_in_line(number: int, line: str) -> Mistake | None:
    """Return the mistake in a line that is neither a key with its value, a list item, a comment nor empty;
    None if it has none."""
    if (found := space_mistake(number, 0, line.split("#")[0])) is not None:
        return found
    if match := _BRACES.fullmatch(line):
        written = f'{match["key"]}: "{shown(match["value"])}"'
        return Mistake(
            number, match.start("value"), "a text that begins with `{` is not in quotes", f"write `{written}`"
        )
    for pattern in (_LINE_UNSPACED, _EQUALS, _WORD):
        match = pattern.fullmatch(line)
        if match is None:
            continue
        column, key = match.start("key"), match["key"]
        if pattern is _WORD:
            return Mistake(
                number,
                column,
                f"`{shown(key)}` has no colon and no value",
                f"write `{shown(key)}: VALUE`, or remove the line",
            )
        value = match["value"]
        if pattern is _EQUALS:
            return Mistake(
                number,
                column,
                f"`{shown(key)}` is followed by `=` where a colon belongs",
                f"write `{key}: {shown(value)}`",
            )
        return Mistake(number, column, *unspaced(key, value))
    return None


def explain_syntax(error: Any, text: str) -> Mistake | None:
    """Return the mistake that led to a `yaml.MarkedYAMLError`, or None if it is not a known one."""
    lines = re.split("\r\n|\r|\n", text)
    mark, opened = error.problem_mark or error.context_mark, error.context_mark
    detail, context = error.problem or "", error.context or ""
    if mark is None:
        return None
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "'\\t'" in detail or "\t" in re.split(r"[^\s]", line)[0]:
        return _tab(mark.line, mark.column, line)
    if opened is not None and ("scanning an alias" in context or "scanning an anchor" in context):
        return _unquoted(opened.line, opened.column, lines)
    if "scanning a double-quoted scalar" in context and "escape" in detail:
        return _escape(mark, lines)
    for number in _suspects(
        lines, mark.line, opened.line if opened is not None and "simple key" in context else None
    ):
        if (found := mistake_in_line(number, lines[number])) is not None:
            return found
    return None


def _suspects(lines: Sequence[str], here: int, opened: int | None) -> list[int]:
    """Return the lines to examine: where the key began, where the parser stopped, and the nearest line above
    that with content."""
    above = [
        number
        for number in range(min(here, len(lines)) - 1, -1, -1)
        if lines[number].strip() and not lines[number].lstrip().startswith("#")
    ]
    found = [opened, here, *above[:1]]
    return [number for number in dict.fromkeys(found) if number is not None and number < len(lines)]


def _tab(number: int, column: int, line: str) -> Mistake:
    before, tab = line[:column], line.find("\t", column) if "\t" in line[column:] else line.find("\t")
    if not before.strip() or "\t" in re.split(r"[^\s]", line)[0]:
        return Mistake(number, column, "a tab in the indentation", "indent with spaces")
    where = "before the comment" if line[tab:].lstrip().startswith("#") else "between two words"
    return Mistake(number, column, f"a tab {where}", "replace it with a space")


def _unquoted(number: int, column: int, lines: Sequence[str]) -> Mistake:
    found = re.match(r"[^\s,\]}#]+", lines[number][column:])
    word = found[0] if found else lines[number][column : column + 1]
    message = (
        f"`{shown(word)}` is not in quotes, and `{word[:1]}` at the beginning of a value has a special "
        "meaning in YAML"
    )
    return Mistake(number, column, message, f'write `"{shown(word)}"`')


def _escape(mark: Any, lines: Sequence[str]) -> Mistake:
    line: str = lines[int(mark.line)]
    backslash = line.rfind("\\", 0, mark.column + 1)
    opened = line.rfind('"', 0, backslash)
    closed = line.find('"', backslash)
    escape = line[backslash : backslash + 2]
    quoted = line[opened + 1 : closed if closed > 0 else None]
    message = (
        f"`{shown(escape)}` in double quotes begins an escape sequence that is incomplete or does not exist"
    )
    return Mistake(
        mark.line, backslash, message, f"single quotes keep backslashes as they are: `'{shown(quoted)}'`"
    )
