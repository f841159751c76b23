"""The interface by which long work reports its progress."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Bar(Protocol):
    def advance(self, n: int = 1) -> None:
        """Add `n` finished units; may be called from several threads."""
        ...


class OpenBar(Protocol):
    """Opens a bar for `total` units (None: unknown), as a context manager."""

    def __call__(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Bar]: ...
