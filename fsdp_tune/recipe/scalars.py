"""Parse plain YAML scalars by the core schema of YAML 1.2, in which `no` is text and `2e-5` is a number.

YAML 1.1, which PyYAML implements, reads `2e-5` as text, `0123` as 83, `no` as false and `12:30` as 750. Text that the two
versions read differently stays text and has a `suspicion`, which is shown if the key does not take text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

Value = str | int | float | bool | None

_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_BASED_INTEGER = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_UNDERSCORED = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?")
_OLD_BOOLEANS = {"yes": "true", "y": "true", "on": "true", "no": "false", "n": "false", "off": "false"}
MAX_DIGITS = 18
SHOWN_CHARACTERS = 60


class ScalarError(ValueError):
    """A plain scalar that is invalid for every key."""


def parse_plain(text: str) -> tuple[Value, str | None]:
    """Return the value of an unquoted scalar, and its suspicion or None. Raises: ScalarError for a number that cannot be represented."""
    if text in _NULLS:
        return None, None
    if text in _BOOLEANS:
        return _BOOLEANS[text], None
    if _INTEGER.fullmatch(text):
        return _integer(text, 10), None
    if _BASED_INTEGER.fullmatch(text):
        return _integer(text, 8 if text[1] == "o" else 16), None
    if _LEADING_ZERO.fullmatch(text):
        return text, f"some programs read `{text}` as an octal number: write {text.lstrip('+-0') or '0'}"
    if _FLOAT.fullmatch(text):
        return _float(text), None
    if _NOT_FINITE.fullmatch(text):
        raise ScalarError(f"`{text}` is not a number that a recipe can contain")
    return text, suspicion(text)


def suspicion(text: str) -> str | None:
    """Explain why a text that looks like a number or a boolean is text; None if it does not look like one."""
    if text.lower() in _OLD_BOOLEANS:
        return f"`{text}` is text: write {_OLD_BOOLEANS[text.lower()]}"
    if "_" in text and _UNDERSCORED.fullmatch(text):
        return f"`{text}` is text: write {text.replace('_', '')}"
    return None


def _integer(text: str, base: int) -> int:
    digits = text.lstrip("+-")
    if len(digits) > MAX_DIGITS:
        raise ScalarError(f"`{digits[:12]}…` has {len(digits)} digits: too large for any key")
    return int(text, base)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ScalarError(f"`{text[:40]}` is too large for a number")
    if value == 0.0 and re.search(r"[1-9]", re.split(r"[eE]", text)[0]):
        raise ScalarError(f"`{text[:40]}` is too small for a number: it would become 0")
    return value


def printable(text: str) -> str:
    """Escape everything in a text that a terminal would interpret."""
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in text)


def shown(text: str) -> str:
    """Return `printable(text)`, truncated to `SHOWN_CHARACTERS`."""
    safe = printable(text)
    return safe if len(safe) <= SHOWN_CHARACTERS else f"{safe[:SHOWN_CHARACTERS]}…"


def enumerated(parts: Sequence[str], word: str = "or") -> str:
    """Join without duplicates: ["a", "b", "a", "c"] → `a, b or c`."""
    unique = list(dict.fromkeys(parts))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} {word} {unique[-1]}"
