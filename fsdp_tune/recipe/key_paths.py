"""Paths of keys in the tree of a recipe, or of another tool's file: `("data", "train", 0, "path")` is
`data.train[0].path`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_tune.core.values import is_list, is_mapping

KeyPath = tuple[str | int, ...]
NamePath = tuple[str, ...]
"""Without indexes of lists."""


def as_path(key: str | KeyPath) -> KeyPath:
    """Return a key, which may be dotted, as a path."""
    return key if isinstance(key, tuple) else tuple(key.split(".")) if key else ()


def dotted(path: Sequence[str | int]) -> str:
    """Format a path: ("data", "train", 0, "path") → `data.train[0].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def flattened(tree: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Return each key of a part of a recipe with its value; keys of mappings and of lists of mappings are
    keys of their own."""
    if is_mapping(tree) and tree:
        for name, inner in tree.items():
            yield from flattened(inner, (*path, name))
    elif is_list(tree) and tree and all(is_mapping(item) and item != {} for item in tree):
        for index, item in enumerate(tree):
            yield from flattened(item, (*path, index))
    else:
        yield path, tree
