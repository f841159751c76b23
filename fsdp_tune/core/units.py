"""Values as users and other programs write them: sizes, durations, YAML scalars, JSON values, text that is
safe to print.

GiB = 2**30 bytes, GB = 10**9 bytes.

Plain YAML scalars follow the core schema of YAML 1.2, in which `no` is text and `2e-5` is a number. YAML 1.1,
which PyYAML implements, reads `2e-5` as text, `0123` as 83, `no` as false and `12:30` as 750. Text that the
two versions read differently stays text and has a `suspicion`, which is shown if the key does not take text.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,40})?)\s*((?:[KMGT]I?)?B)", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")


def parse_bytes(text: str) -> int:
    """Parse a size: `5GB` → 5_000_000_000, `512MiB` → 536_870_912. Raises: ValueError with the expected
    format."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"`{text}` is not a size: write a number and a unit, such as 5GB or 512MiB")
    size_bytes = round(float(match[1]) * _SIZE_UNITS[match[2].upper()])
    if size_bytes <= 0:
        raise ValueError(f"`{text}` is not a size: it must be more than zero")
    return size_bytes


def parse_seconds(text: str) -> int:
    """Parse a duration: `11h30m` → 41_400. Raises: ValueError, also for a number without unit."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise ValueError(f"`{text}` is not a duration: write it with units, such as 11h30m, 45m or 30s")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    total_seconds = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_seconds == 0:
        raise ValueError(f"`{text}` is not a duration: it must be more than zero")
    return total_seconds


def format_bytes(size_bytes: float) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_figure(value: float) -> str:
    """Format with three significant digits, or all digits before the point: `0.0123`, `1.23`, `1,235`."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def format_short(value: float) -> str:
    """Format with at most five significant digits, below 1e-3 and from 1e5 on with an exponent: `0.05`,
    `2e-5`, `1.5e6`."""
    text = f"{value:.4e}" if 0 < abs(value) < 1e-3 else f"{value:.5g}"
    digits, has_exponent, exponent = text.partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}" if has_exponent else text


def format_seconds(seconds: float) -> str:
    """Format a duration: 3723.4 → `1h02m03s`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest_seconds = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m{rest_seconds:02d}s"
    return f"{minutes}m{rest_seconds:02d}s" if minutes else f"{seconds:.1f}s"


def format_clock(at: float, now: float) -> str:
    """Format a time in the local zone, both in seconds since the epoch: `14:32` today, `Tue 14:32` within six
    days, else with the date."""
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%a %H:%M" if 0 <= at - now < 6 * 86_400 else "%Y-%m-%d %H:%M", then)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Format a number of things: `1 rank`, `2,048 ranks`; `plural` is what the noun gets."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def format_age(seconds: float) -> str:
    """Format in the largest unit that fits: `3 days`, `2 hours`, `40 seconds`."""
    units = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))
    unit, size = next((each for each in units if seconds >= each[1]), units[-1])
    return counted(max(0, int(seconds // size)), unit)


def sparkline(values: Sequence[float]) -> str:
    """Draw numbers as bars of eight heights, from the least to the greatest: `▇▅▂▁`. NaN and infinity are
    `×`."""
    finite = [value for value in values if math.isfinite(value)]
    least = min(finite, default=0.0)
    spread = max(finite, default=0.0) - least
    heights = (round(7 * (value - least) / spread) if spread > 0 else 0 for value in finite)
    return "".join("▁▂▃▄▅▆▇█"[next(heights)] if math.isfinite(value) else "×" for value in values)


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
WORD_CHARACTERS = 1000
"""No path that a user would type is longer."""
_LONG_WORD = re.compile(rf"\S{{{WORD_CHARACTERS + 1},}}")


class ScalarError(ValueError):
    """A plain scalar that is invalid for every key."""


def parse_plain(text: str) -> tuple[Value, str | None]:
    """Return the value of an unquoted scalar, and its suspicion or None. Raises: ScalarError for a number
    that cannot be represented."""
    if text in _NULLS:
        return None, None
    if text in _BOOLEANS:
        return _BOOLEANS[text], None
    if _INTEGER.fullmatch(text):
        return _integer(text, 10), None
    if _BASED_INTEGER.fullmatch(text):
        return _integer(text, 8 if text[1] == "o" else 16), None
    if _LEADING_ZERO.fullmatch(text):
        sign, digits = "-" * text.startswith("-"), text.lstrip("+-0") or "0"
        return text, f"some programs read `{text}` as an octal number: write {sign}{digits}"
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
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def shown(text: str) -> str:
    """Return `printable(text)`, truncated to `SHOWN_CHARACTERS`."""
    safe = printable(text)
    return safe if len(safe) <= SHOWN_CHARACTERS else f"{safe[:SHOWN_CHARACTERS]}…"


def without_long_words(text: str) -> str:
    """Truncate each word above `WORD_CHARACTERS`: a number of 200,000 digits, a file's contents in the place
    of its name."""
    if len(text) <= WORD_CHARACTERS:
        return text
    return _LONG_WORD.sub(lambda found: f"{found[0][:SHOWN_CHARACTERS]}…{_closing(found[0])}", text)


def _closing(word: str) -> str:
    """Return the quotes, brackets and full stops at the end of a word."""
    return word[len(word.rstrip("`'\"(){}[],;:.")) :]


def enumerated(parts: Sequence[str], word: str = "or") -> str:
    """Join without duplicates: ["a", "b", "a", "c"] → `a, b or c`."""
    unique = list(dict.fromkeys(parts))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} {word} {unique[-1]}"
