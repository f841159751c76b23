"""One value if all are equal, else all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from fsdp_tune.run.records import OneOrAll

T = TypeVar("T")


def only(values: set[T]) -> T | list[str]:
    """Return the single value, or all of them, sorted, if there are several."""
    return next(iter(values)) if len(values) == 1 else sorted(map(str, values))


def of_all(values: Iterable[OneOrAll]) -> OneOrAll:
    """Return `only` of values that may be several themselves."""
    return only({each for value in values for each in (value if isinstance(value, list) else [value])})
