"""The document of a machine, as it publishes it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp_tune.core.errors import ExitReason, Problem
from fsdp_tune.launch.machines.identity import Identity
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import RankState, Verdict
from fsdp_tune.run.records import Document

NOT_STARTED = -1
"""The launch number of a machine that has confirmed none."""

State = Literal["waiting", "gathering", "ready", "running", "ended", "final"]


@dataclass(frozen=True, slots=True)
class Relayed(Document):
    """What the first machine repeats for the others."""

    failed_machine: int | None = None
    failure: dict[str, Any] | None = None
    """The problem of the first other machine that failed."""
    stop_reason: ExitReason | None = None
    """Why the ranks of another machine were stopped."""
    silent_seconds: float | None = None
    """Of another machine that has detected a hang."""
    rank_states: tuple[RankState, ...] = ()
    """Where the ranks of other machines are, in a hang."""
    is_complete: bool = False
    """Whether these are all of them."""


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
    state: State = "waiting"
    """waiting: to join. ready: for this launch. running. ended: this launch, on this machine. On the first machine only: gathering (waits
    for the others), and final (there is no other launch)."""
    ended: dict[str, Any] | None = None
    """The verdict on its launch."""
    rank_states: tuple[RankState, ...] = ()
    """Where its ranks are, in a hang."""
    silent_seconds: float = 0.0
    files: dict[str, str] | None = None
    """On the first machine: digests of the files that ranks read."""
    relayed: Relayed = field(default_factory=Relayed)

    @property
    def verdict(self) -> Verdict | None:
        """How the launch ended there; None if it has not, or if the document is not of this program."""
        with suppress(ValueError, KeyError, TypeError):
            return Verdict.from_dict(self.ended) if self.ended is not None else None
        return None

    @property
    def problem(self) -> Problem | None:
        return self.verdict.problem if self.verdict is not None else None


def digests_of_files(run: RunDir) -> dict[str, str]:
    """Return digests of the files of a run that its ranks read at the start, of those that are there."""
    found: dict[str, str] = {}
    for path in (run.recipe_json, run.data_json, run.launch_json, run.resume_json):
        with suppress(OSError):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found
