"""The report that each machine of a run publishes, and what the first machine relays of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from fsdp_tune.core.errors import ExitReason, Problem
from fsdp_tune.launch.machines.identity import Identity
from fsdp_tune.run.directory import Held
from fsdp_tune.run.rank_files import RankState, Verdict
from fsdp_tune.run.records import Document

NOT_STARTED = -1
"""The launch number of a machine that has confirmed none."""


State = Literal["waiting", "gathering", "ready", "running", "ended", "final"]


@dataclass(frozen=True, slots=True)
class Relayed(Document):
    """What the first machine repeats for the others."""

    failed_machine: int | None = None
    failure: dict[str, object] | None = None
    """The problem of the first other machine that failed."""
    stop_reason: ExitReason | None = None
    """Why the ranks of another machine were stopped."""
    silent_seconds: float | None = None
    """Of another machine that has detected a hang."""
    rank_states: tuple[RankState, ...] = ()
    """Where the ranks of other machines are, in a hang."""
    is_complete: bool = False
    """Whether these are all of them."""
    are_quiet: bool = False
    """Whether all other machines are quiet."""


@dataclass(frozen=True, slots=True)
class MachineReport(Document):
    """The document of a machine."""

    token: str = ""
    """Of its command."""
    life: str | None = None
    """Of the first machine's command that it follows, or of itself."""
    identity: Identity | None = None
    work: int = 0
    """Only a change of it matters."""
    launch: int = NOT_STARTED
    """0 for the first launch of the command, then one more for each restart."""
    members: tuple[int, ...] = ()
    """On the first machine: those that take part in its launch. Ranks are numbered in this order."""
    state: State = "waiting"
    """waiting: to join. ready: for this launch. running. ended: this launch, on this machine. On the first
    machine only: gathering (waits for the others), and final (there is no other launch)."""
    ended: dict[str, object] | None = None
    """The verdict on its launch."""
    rank_states: tuple[RankState, ...] = ()
    """Where its ranks are, in a hang."""
    silent_seconds: float = 0.0
    is_quiet: bool = False
    """Whether its ranks have made no progress for a while."""
    files: dict[str, str] | None = None
    """On the first machine: digests of the files that ranks read, or the archive with them
    (`OwnDirectory.offer`)."""
    held: tuple[Held, ...] | None = None
    """What this machine has of each checkpoint, if each has its own run directory; None until it is known,
    and while ranks run."""
    relayed: Relayed = field(default_factory=Relayed)

    @property
    def makes_no_progress(self) -> bool:
        return self.is_quiet or self.ended is not None

    @property
    def verdict(self) -> Verdict | None:
        """How the launch ended there; None if it has not, or if the document is not of this program."""
        with suppress(ValueError, KeyError, TypeError):
            return Verdict.from_dict(self.ended) if self.ended is not None else None
        return None

    @property
    def problem(self) -> Problem | None:
        return self.verdict.problem if self.verdict is not None else None


@dataclass(frozen=True, slots=True)
class Fewer:
    """A launch that did not start, since not all of its machines confirmed it in time."""

    present: tuple[int, ...]
    """Those that did, the first included."""


@dataclass(frozen=True, slots=True)
class Standby:
    """This machine takes part in no launch yet. It joins the next one."""

    members: tuple[int, ...]
    """The machines of the present launch."""


def relay(reports: Mapping[int, MachineReport], machines: int, *, are_quiet: bool) -> Relayed:
    """Return what the first machine repeats of its `machines` others, by those that have reported."""
    failed = next(
        (
            (machine, problem)
            for machine, report in sorted(reports.items())
            if (problem := report.problem) is not None
        ),
        None,
    )
    named = (
        None
        if failed is None
        else replace(failed[1], code="machine-failed", message=f"machine {failed[0]}: {failed[1].message}")
    )
    verdicts = [verdict for report in reports.values() if (verdict := report.verdict) is not None]
    return Relayed(
        failed_machine=None if failed is None else failed[0],
        failure=None if named is None else named.as_dict(),
        stop_reason=next((verdict.reason for verdict in verdicts if verdict.is_stop), None),
        silent_seconds=max(
            (report.silent_seconds for report in reports.values() if report.rank_states), default=None
        ),
        rank_states=tuple(each for report in reports.values() for each in report.rank_states),
        is_complete=len(reports) == machines and all(report.rank_states for report in reports.values()),
        are_quiet=are_quiet,
    )
