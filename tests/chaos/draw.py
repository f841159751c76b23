"""Draw disturbances: kind, process and phase of a run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

PHASES = (
    *("preparing", "launching", "importing", "loading the model", "reading back", "probing a save"),
    *("training", "saving", "evaluating", "final save", "merging"),
)
"""In the order of a run. `preparing` is the command before `accelerate launch`; `launching` is until the
ranks start to import."""
SIGNALS = ("SIGHUP", "SIGTERM", "SIGINT")
KILL, SHORT_STOP, LONG_STOP = "SIGKILL", "short stop", "long stop"
SLOW_DISK, FULL_DISK, READ_ONLY_DISK = "slow disk", "full disk", "read-only disk"
CLOCK = "clock"
SHORT_CUT, LONG_CUT = "short cut", "long cut"
DISKS = (SLOW_DISK, FULL_DISK, READ_ONLY_DISK)
CUTS = (SHORT_CUT, LONG_CUT)
"""Of the link between two machines."""
KINDS = (KILL, SHORT_STOP, LONG_STOP, *SIGNALS, *DISKS, CLOCK)
HARMLESS = (SHORT_STOP, SLOW_DISK, CLOCK, SHORT_CUT)
"""Kinds that must not end a run, so that others may follow in the same start of it."""
COMMAND, AGENT, RANK, LOADER, CHILD = "command", "agent", "rank", "loader", "child"
"""Processes of a run. A child is any other process that a command has started: it inspects the model, or
checks the merged one."""
TARGETS = (COMMAND, AGENT, RANK, LOADER, CHILD)

OF_COMMAND = ("preparing", "merging")
"""Phases of the command alone and its children."""
_EARLY = ("launching", "importing", "loading the model", "reading back")
"""Phases without processes of a data loader."""
_AT_STEPS = ("training", "saving", "evaluating")
_LONG = ("preparing", "launching", "importing", "merging")
"""Phases of seconds; in a shorter one, a disturbance comes as soon as the phase is seen."""
MOST_IN_A_ROW = 4
"""Starts of a run that are disturbed."""
LONGEST_BEFORE_SECONDS = 4.0
MOST_BEFORE = 4
"""Harmless disturbances of a start, in addition to the one that may end it. They are short, since one has to
end before the next."""
LONGEST_DELAY = 0.6


def kinds_on(machines: int) -> tuple[str, ...]:
    return KINDS if machines == 1 else (*KINDS, *CUTS)


@dataclass(frozen=True)
class Disturbance:
    kind: str
    phase: str
    target: str
    """Which process; a disk and a clock belong to a machine, and a link to both."""
    machine: int = 0
    step: int = 0
    """Not before this step."""
    seconds: float = 0.0
    """How long a stop or a bad disk lasts; for a clock, how far it jumps."""
    delay: float = 0.0
    """How long after the start of the phase, as a share of the shortest time that the phase has taken."""

    def __str__(self) -> str:
        where = (
            f"machine {self.machine}"
            if self.kind in (*DISKS, CLOCK)
            else f"{self.target} of machine {self.machine}"
        )
        where = "the link" if self.kind in CUTS else where
        how = (
            f" {self.seconds:+.0f} s"
            if self.kind == CLOCK
            else f" {self.seconds:.1f} s"
            if self.seconds
            else ""
        )
        when = (
            f" from step {self.step}"
            if self.step
            else f" after {100 * self.delay:.0f}%"
            if self.delay
            else ""
        )
        return f"{self.kind}{how}, {where}, {self.phase}{when}"


@dataclass
class Tally:
    """What was drawn so far."""

    hits: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By kind, phase and target."""
    missed: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Disturbances that were drawn and did not come, because the run ended before or the process was not
    there."""

    def add(self, disturbance: Disturbance, *, is_hit: bool) -> None:
        counter = self.hits if is_hit else self.missed
        counter[disturbance.kind, disturbance.phase, disturbance.target] += 1

    def count(self, kind: str | None = None, phase: str | None = None, target: str | None = None) -> int:
        """Return the hits of a kind, a phase, a target, or a combination of them."""
        return _sum(self.hits, kind, phase, target)

    def drawn(self, kind: str | None = None, phase: str | None = None, target: str | None = None) -> float:
        """Return `count`, with each miss as half a hit: what never comes must not be drawn for ever."""
        return self.count(kind, phase, target) + _sum(self.missed, kind, phase, target) / 2


@dataclass(frozen=True)
class Setting:
    """What is the same for all disturbances of a start."""

    machines: int
    hang_seconds: float
    first_step: int
    """Where the run continues."""
    last_step: int
    is_trained: bool = False
    """Whether only the merge is left."""


def draw_start(dice: random.Random, tally: Tally, setting: Setting) -> list[Disturbance]:
    """Draw the disturbances of one start: a main one, and harmless ones in other phases, which come before it
    if it is harmful."""
    possible = OF_COMMAND if setting.is_trained else PHASES
    main = draw(dice, tally, setting, phases=possible)
    phases = [each for each in possible if each != main.phase]
    if main.kind not in HARMLESS:
        phases = [each for each in phases if PHASES.index(each) < PHASES.index(main.phase)]
    found = [main]
    for _ in range(dice.randint(1, MOST_BEFORE)):
        if phases:
            one = draw(dice, tally, setting, phases=phases, kinds=HARMLESS)
            found.append(
                replace(one, seconds=min(one.seconds, LONGEST_BEFORE_SECONDS)) if one.kind != CLOCK else one
            )
            phases = [each for each in phases if each != found[-1].phase]
    return found


def draw(
    dice: random.Random,
    tally: Tally,
    setting: Setting,
    *,
    phases: Sequence[str] = PHASES,
    kinds: Sequence[str] = (*KINDS, *CUTS),
) -> Disturbance:
    """Draw one disturbance: of the rarest phases one, then of the kinds that are rarest in it the rarest,
    then the rarest target."""
    machines, hang_seconds, first_step, last_step = (
        setting.machines,
        setting.hang_seconds,
        setting.first_step,
        setting.last_step,
    )
    phase = _rarest(dice, phases, lambda each: (tally.drawn(phase=each),))
    possible = [each for each in kinds if each in kinds_on(machines)]
    kind = _rarest(dice, possible, lambda each: (tally.drawn(each, phase), tally.drawn(each)))
    step = (
        dice.randrange(first_step + 1, last_step) if phase in _AT_STEPS and first_step + 1 < last_step else 0
    )
    delay = dice.uniform(0.0, LONGEST_DELAY) if phase in _LONG else 0.0
    machine = 0 if phase == "merging" else dice.randrange(machines)
    if kind in DISKS:
        seconds = (
            dice.uniform(0.5, 1.5) * hang_seconds
            if kind == SLOW_DISK
            else dice.uniform(1.0, hang_seconds / 2)
        )
        return Disturbance(kind, phase, "", machine, step, seconds, delay)
    if kind in CUTS:
        seconds = dice.uniform(1.0, hang_seconds / 2) if kind == SHORT_CUT else 1.5 * hang_seconds
        return Disturbance(kind, phase, "", 0, step, seconds, delay)
    if kind == CLOCK:
        return Disturbance(
            kind, phase, "", machine, step, dice.choice((-1, 1)) * dice.choice((90, 3600, 86400)), delay
        )
    target = _rarest(
        dice,
        _targets(phase, machine),
        lambda each: (tally.drawn(kind, phase, each), tally.drawn(target=each)),
    )
    seconds = {SHORT_STOP: dice.uniform(0.5, hang_seconds / 2), LONG_STOP: _long(target, hang_seconds)}.get(
        kind, 0.0
    )
    return Disturbance(kind, phase, target, machine, step, seconds, delay)


def _long(target: str, hang_seconds: float) -> float:
    """A rank's stop ends with the run, which must report it first. Other processes continue after theirs."""
    return 4 * hang_seconds if target in (RANK, LOADER) else 1.5 * hang_seconds


def _targets(phase: str, machine: int) -> tuple[str, ...]:
    if phase in OF_COMMAND:
        return (COMMAND, CHILD) if machine == 0 else (COMMAND,)  # only the first machine inspects and merges
    return (COMMAND, AGENT, RANK) if phase in _EARLY else (COMMAND, AGENT, RANK, LOADER)


def _rarest(dice: random.Random, names: Sequence[str], count: Callable[[str], tuple[float, ...]]) -> str:
    counts = {name: count(name) for name in names}
    least = min(counts.values())
    return dice.choice([name for name in names if counts[name] == least])


def _sum(counter: Counter[tuple[str, str, str]], *wanted: str | None) -> int:
    return sum(
        number
        for key, number in counter.items()
        if all(want in (None, have) for want, have in zip(wanted, key, strict=True))
    )
