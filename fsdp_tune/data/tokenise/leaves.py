"""The keys and scalars of a nested value of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast


def leaves(value: Any) -> Iterator[Any]:
    """Yield every key and every scalar of `value`, in order; for a scalar, the value itself."""
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[str, Any]", value).items():
            yield key
            yield from leaves(part)
    elif isinstance(value, list):
        for part in cast("list[Any]", value):
            yield from leaves(part)
    else:
        yield value
