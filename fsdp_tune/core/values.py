"""Parsed values whose type is not known, as of YAML or JSON: test for a list or a mapping, or take one."""

from __future__ import annotations

from typing import Any, TypeGuard


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
