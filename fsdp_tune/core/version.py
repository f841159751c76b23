"""The version of this package, and where it is installed."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

PACKAGE = Path(__file__).parents[1]
