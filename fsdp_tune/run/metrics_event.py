"""What an event of metrics.jsonl is: its level and fields, how it is declared, and kinds that several are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, TypeVar, dataclass_transform

from pydantic import JsonValue

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.run.event_parts import SpikeRow, describe, shown_rows

EventLevel = Literal["routine", "news", "warning", "alarm"]
"""`routine`: every healthy run has it. `warning`: the report marks it. `alarm`: a warning that the terminal
prints on stderr."""


@dataclass(frozen=True, slots=True)
class MetricsEvent(JsonAnswer):
    """Base of the events. A field that may be None is None where the line of an earlier version does not have
    it."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"allow_inf_nan": False}
    name: ClassVar[str]
    level: ClassVar[EventLevel]
    is_shown: ClassVar[bool]
    """Whether the terminal prints it."""
    marks_curves: ClassVar[bool]
    """Whether it is a vertical line in the charts of a loss."""
    is_of_run: ClassVar[bool]
    """Written by the command between launches, and kept when the run starts over at step 0."""

    step: int
    time: float | None = field(default=None, kw_only=True)
    """Wall clock, in seconds, at which the line was written; None: it has not been written yet."""

    def line(self, time: float) -> dict[str, JsonValue]:
        """Return the object that metrics.jsonl has of it."""
        return {"event": self.name, **self.as_dict(), "time": time}

    def details(self) -> dict[str, JsonValue]:
        """Return the fields that only this event has."""
        return {key: value for key, value in self.as_dict().items() if key not in COMMON}

    def shown(self) -> list[str]:
        """Return the lines of the terminal."""
        return describe(self.name, self.step, self.details())


@dataclass(frozen=True, slots=True)
class OtherEvent:
    """An event of another version: its name is not known, or its fields are not those of this version."""

    name: str
    step: int | None
    time: float | None
    fields: Mapping[str, JsonValue]

    @property
    def level(self) -> EventLevel:
        return DECLARED[self.name].level if self.name in DECLARED else "news"

    @property
    def is_shown(self) -> bool:
        return self.name not in DECLARED or DECLARED[self.name].is_shown

    @property
    def marks_curves(self) -> bool:
        return self.name in DECLARED and DECLARED[self.name].marks_curves

    def details(self) -> Mapping[str, JsonValue]:
        return self.fields

    def shown(self) -> list[str]:
        return describe(self.name, self.step, self.fields)


AnyEvent = MetricsEvent | OtherEvent
Declared = TypeVar("Declared", bound=MetricsEvent)
DECLARED: dict[str, type[MetricsEvent]] = {}
"""Name → its class, of the modules that were imported; all are in `run/events.py`."""
COMMON = tuple(each.name for each in fields(MetricsEvent))
"""Fields of every event."""


@dataclass_transform(frozen_default=True)
def event(
    name: str,
    level: EventLevel = "news",
    *,
    is_shown: bool = True,
    marks_curves: bool = False,
    is_of_run: bool = False,
) -> Callable[[type[Declared]], type[Declared]]:
    """Declare an event. The docstring of its class is what the reference has of it."""

    def declare(kind: type[Declared]) -> type[Declared]:
        made = dataclass(frozen=True, slots=True)(kind)
        made.name, made.level, made.is_shown, made.marks_curves, made.is_of_run = (
            name,
            level,
            is_shown,
            marks_curves,
            is_of_run,
        )
        DECLARED[name] = made
        return made

    return declare


@dataclass(frozen=True, slots=True)
class MessageEvent(MetricsEvent):
    """An event with a sentence and nothing else."""

    message: str


@dataclass(frozen=True, slots=True)
class SpikeEvent(MetricsEvent):
    """A spike of the loss or of the gradient norm."""

    message: str
    rows: list[SpikeRow] | None
    rows_total: int | None
    """Also of those that are not named."""

    def shown(self) -> list[str]:
        worst = self.worst_rows()
        return [
            *describe(self.name, self.step, {"message": self.message}),
            *([f"  {worst}"] if worst else []),
        ]

    def worst_rows(self) -> str | None:
        """Return the rows of the micro-batch with the highest loss in one line; None if it names none."""
        return (
            shown_rows(self.rows, len(self.rows) if self.rows_total is None else self.rows_total)
            if self.rows
            else None
        )
