"""A choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass

WRITTEN = "set in the recipe"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A value of a recipe key, and why it was chosen."""

    value: str
    reason: str
