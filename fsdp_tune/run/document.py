"""The JSON documents of a run directory: each is a dataclass that writes and reads its own file, with a version of its fields."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter

from fsdp_tune.core.atomic import json_safe, write_json
from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error


@dataclass(frozen=True, slots=True)
class Document:
    """Base of the documents. A field named `facts` holds every field of the file that has no field of its own."""

    VERSION: ClassVar[int] = 1
    """The version that is written, and the newest that is read. Files without one are of version 1."""
    IS_PRIVATE: ClassVar[bool] = False
    """Whether the file is readable by its owner only."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the file without its version."""
        own = asdict(self)
        return own | own.pop("facts", {})

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Return the document of `as_dict`. Raises: ValueError, TypeError or KeyError for other fields."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in raw.items() if name in names}
        if "facts" in names:
            own["facts"] = {name: value for name, value in raw.items() if name not in names}
        return _validator(cls).validate_python(own)

    def content(self) -> dict[str, Any]:
        """Return the file as a JSON object; NaN and infinity are text in it."""
        return json_safe({"version": self.VERSION, **self.as_dict()})

    def write(self, path: Path) -> None:
        """Replace the file. Raises: OSError."""
        write_json(path, self.content(), private=self.IS_PRIVATE)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the document, or None if there is no file. Raises: usage error if the file is damaged or of a newer version."""
        try:
            raw: dict[str, Any] = json.loads(path.read_bytes())
            version = int(raw.pop("version", 1))
            if version > cls.VERSION:
                message = f"was written by a newer fsdp-tune (version {version}; this one reads up to {cls.VERSION})"
                raise _unreadable(path, message, "continue with the fsdp-tune that wrote it, or start over in another directory")
            return cls.from_dict(raw)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise _unreadable(path, f"is damaged: {reason}", "remove it: each start of the run writes it again") from error


@functools.cache
def _validator(kind: type[Document]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unreadable(path: Path, message: str, hint: str) -> FsdpTuneError:
    return usage_error("run-unreadable", message, hint=hint, where=Where(str(path)))
