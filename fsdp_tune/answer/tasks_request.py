"""The request to the process that runs tasks of lm_eval, and the interval of a score with a standard
error."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Self

from fsdp_tune.answer.statistics import Z


@dataclass(frozen=True, slots=True)
class TasksRequest:
    """The document on stdin of `fsdp_tune.answer.tasks`."""

    weights: str
    adapter: str | None
    tasks: list[str]
    """Of lm_eval."""
    rows: int | None
    """Of each task, from its beginning; None: all."""
    batch_size: int
    device: str
    trust_remote_code: bool

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def normal_interval(value: float, standard_error: object) -> tuple[float | None, float | None]:
    """Return the interval of a mean with a known standard error; twice None if it is not a number."""
    if (
        isinstance(standard_error, bool)
        or not isinstance(standard_error, int | float)
        or not math.isfinite(standard_error)
    ):
        return None, None
    return value - Z * standard_error, value + Z * standard_error
