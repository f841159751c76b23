"""Units that users read and write: GiB, `5GB`, `11h30m`. GiB = 2**30 bytes, GB = 10**9 bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SIZE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)", re.IGNORECASE)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def parse_bytes(text: str) -> int:
    """Parse a size: `5GB` → 5_000_000_000, `512MiB` → 536_870_912. Raises: ValueError with the expected format."""
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


def format_seconds(seconds: float) -> str:
    """Format a duration: 3723.4 → `1h02m03s`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest_seconds = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m{rest_seconds:02d}s"
    return f"{minutes}m{rest_seconds:02d}s" if minutes else f"{seconds:.1f}s"


def format_age(seconds: float) -> str:
    """Format in the largest unit that fits: `3 days`, `2 hours`, `40 seconds`."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{max(0, int(seconds))} seconds"


def sparkline(values: Sequence[float]) -> str:
    """Draw numbers as bars of eight heights, from the least to the greatest: `▇▅▂▁`. NaN and infinity are `×`."""
    finite = [value for value in values if math.isfinite(value)]
    least = min(finite, default=0.0)
    spread = max(finite, default=0.0) - least
    heights = (round(7 * (value - least) / spread) if spread > 0 else 0 for value in finite)
    return "".join("▁▂▃▄▅▆▇█"[next(heights)] if math.isfinite(value) else "×" for value in values)
