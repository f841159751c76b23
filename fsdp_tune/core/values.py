"""Parsed values whose type is not known, as of YAML or JSON: test for a list or a mapping, or take one."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def as_list(value: object) -> list[Any]:
    """Return a list as it is, and an empty one for any other value."""
    return value if is_list(value) else []


def as_items(value: object) -> list[object]:
    """Return a list as it is, and a list of one item for any other value."""
    return value if is_list(value) else [value]


def as_mapping(value: object) -> dict[str, object]:
    """Return a mapping as it is, and an empty one for any other value."""
    return value if is_mapping(value) else {}


def json_object(value: object) -> dict[str, object]:
    """`as_mapping` of JSON from another program, whose values have to be narrowed too."""
    return as_mapping(value)


def json_list(value: object) -> list[object]:
    """`as_list` of JSON from another program, whose items have to be narrowed too."""
    return as_list(value)
