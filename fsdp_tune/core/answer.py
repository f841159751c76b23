"""The base of what commands print with `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """A document of a command, or a part of one. docs/reference/schemas has the JSON Schema of each.

    The fields are those of the JSON; `for_` is written as `for`.
    """

    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self, dict_factory=_named)


def _named(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name.rstrip("_"): value for name, value in fields}
