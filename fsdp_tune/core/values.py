"""Parsed values whose type is not known, as of YAML or JSON: test for a list or a mapping, or take one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast


def is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def as_list(value: object) -> list[object]:
    """Return a list as it is, and an empty one for any other value."""
    return value if is_list(value) else []


def as_items(value: object) -> list[object]:
    """Return a list as it is, and a list of one item for any other value."""
    return value if is_list(value) else [value]


def as_mapping(value: object) -> dict[str, object]:
    """Return a mapping as it is, and an empty one for any other value."""
    return value if is_mapping(value) else {}


def texts_below(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each text of a parsed value, with keys like `data.train[0].path`."""
    if isinstance(value, str):
        yield key, value
    elif is_mapping(value):
        for name, inner in value.items():
            yield from texts_below(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(cast(Sequence[object], value)):
            yield from texts_below(inner, f"{key}[{at}]")


def leaves(value: object) -> Iterator[object]:
    """Yield every key and every scalar of `value`, in order; for a scalar, the value itself."""
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[str, object]", value).items():
            yield key
            yield from leaves(part)
    elif isinstance(value, list):
        for part in cast("list[object]", value):
            yield from leaves(part)
    else:
        yield value
