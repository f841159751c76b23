"""A decision together with its reason."""

from __future__ import annotations

from dataclasses import dataclass

WRITTEN = "the recipe says so"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A value of the recipe's vocabulary, and why it was chosen."""

    value: str
    reason: str
