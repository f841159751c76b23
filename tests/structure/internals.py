"""The entries of `model/internals/`, for the tests that go through all of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from fsdp_tune.model import internals
from fsdp_tune.model.internals.internal import Internal


def entries() -> dict[str, Internal]:
    """Return every entry by module and constant; those of a table by their own name too."""
    found: dict[str, Internal] = {}
    for each in pkgutil.iter_modules(internals.__path__):
        module = importlib.import_module(f"{internals.__name__}.{each.name}")
        for constant, value in vars(module).items():
            found |= {f"{each.name}.{constant}{part}": entry for part, entry in _inside(value)}
    return found


def _inside(value: Any) -> Iterator[tuple[str, Internal]]:
    if isinstance(value, Internal):
        yield "", value
    elif isinstance(value, tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from ((f"[{entry.last}]", entry) for _, entry in _inside(each))
