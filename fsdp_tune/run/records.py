"""environment.json, plan.json and readback.json: what a start of the run found on the machine, predicted, and found on the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from fsdp_tune.run.document import Document


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
