"""What a recipe key affects, and whether a resumed run may change it.

Each key declares it next to its type. A declaration holds for a resolved recipe and covers the direct effects
of the key: `training.global_batch_size` affects memory only through `training.gradient_accumulation_steps`,
which declares that effect itself. The name of a cached trace and the classes of changes on resume follow from
the declarations (`recipe.schema.keys.effect_of`). A key without one affects everything and cannot change on
resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, StrEnum, auto


class Affects(Flag):
    NOTHING = 0
    DATA = auto()
    """The rows that are trained on or evaluated, and their order."""
    MEMORY = auto()
    """Device or host memory of a run."""
    TIME = auto()
    """Seconds of a training step."""
    NUMBERS = auto()
    """Losses and weights computed from the same rows, beyond rounding."""
    RESULT = auto()
    """The delivered model, of the same losses: which checkpoint it is, and how its weights are rounded."""


class OnResume(StrEnum):
    FREE = "free"
    """May change: how the run is executed and observed."""
    TRAJECTORY = "trajectory"
    """May change and is reported: what the next steps compute."""
    REFUSED = "refused"
    """May not change: the completed steps depend on it."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Metadata of a recipe field: `key: Annotated[Whole, Effect(MEMORY | TIME, FREE)]`."""

    affects: Affects
    on_resume: OnResume


NOTHING, DATA, MEMORY, TIME, NUMBERS = (
    Affects.NOTHING,
    Affects.DATA,
    Affects.MEMORY,
    Affects.TIME,
    Affects.NUMBERS,
)
RESULT = Affects.RESULT
FREE, TRAJECTORY, REFUSED = OnResume.FREE, OnResume.TRAJECTORY, OnResume.REFUSED
UNDECLARED = Effect(~NOTHING, REFUSED)
