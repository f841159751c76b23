"""The version of this package, and where it is installed."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.2.0"

PACKAGE = Path(__file__).parents[1]


def shipped(installed: str, checkout: str) -> Path:
    """Return the path in the package of an installed wheel if it is there, or else that below the root of a
    checkout."""
    path = PACKAGE / installed
    return path if path.exists() else PACKAGE.parent / checkout
