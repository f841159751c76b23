"""The JSON documents of a run directory: how each is written and read, and those that a start of the run leaves.

Each is a dataclass that writes and reads its own file, with a version of its fields.

environment.json, plan.json and readback.json: what a start of the run found on the machine, predicted, and found on the ranks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter

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


class PartialFacts(BaseModel):
    """Base of what a document contains, if some fields do not always apply, or are not in the files of earlier versions.

    A field that is absent has its default, and `as_dict` leaves it out.
    """

    model_config = ConfigDict(frozen=True)

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


@functools.cache
def _validator(kind: type[Document]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unreadable(path: Path, message: str, hint: str) -> FsdpTuneError:
    return usage_error("run-unreadable", message, hint=hint, where=Where(str(path)))


@dataclass(frozen=True, slots=True)
class Environment(Document):
    """environment.json: the machine of the command, at each start."""

    IS_PRIVATE: ClassVar[bool] = True

    versions: dict[str, Any] = field(default_factory=dict[str, Any])
    host: dict[str, Any] = field(default_factory=dict[str, Any])
    devices: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """`kind`, `name` and `memory_bytes` of each visible device."""
    extensions: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """Fields of `recipe.extensions.Extension`."""


@dataclass(frozen=True, slots=True)
class Prediction(Document):
    """plan.json: the plan of this recipe for this machine's GPU. Figures that are unknown are None."""

    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    step_seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of `planner.predict.predict.Plan`."""

    def compared(self, line: Mapping[str, Any]) -> list[tuple[str, str, float, float]]:
        """Return (name, unit, predicted, measured) of each figure that the plan and a training line of metrics.jsonl have."""
        figures = (("peak_allocated_gib", "GiB"), ("peak_reserved_gib", "GiB"), ("step_seconds", "s"))
        found = [(name, unit, getattr(self, name), line.get(name)) for name, unit in figures]
        return [(name, unit, predicted, measured) for name, unit, predicted, measured in found if predicted is not None and measured]


@dataclass(frozen=True, slots=True)
class ReadBack(Document):
    """readback.json: the live state of the ranks and how it differs from the recipe. Rank 0 writes it, and completes it in step 1."""

    ranks: list[dict[str, int]]
    """Bytes of the shard, and growth of the peak resident memory while loading, by rank."""
    differences: list[str]
    warnings: list[str]
    causality_deviation: float | None = None
    """Largest change of an output when later tokens change; None if it could not be measured."""
    packing_deviation: float | None = None
    """Largest change of an output when other examples of a packed row change, likewise."""
    ran_in: dict[str, Any] | None = None
    """Dtypes of the first micro-batch."""
    optimizer_state_bytes: dict[str, int] | None = None
    witness: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of the file: what rank 0 reads from its live objects."""

    @classmethod
    def complete(cls, path: Path, *, warnings: Sequence[str] = (), **values: Any) -> None:
        """Set further fields of the file and add `warnings`, if it exists."""
        if (found := cls.read(path)) is not None:
            replace(found, warnings=[*found.warnings, *warnings], **values).write(path)
