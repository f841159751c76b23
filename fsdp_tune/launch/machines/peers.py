"""Exchange the state of a run with its other machines: failures, stops and progress, and which machine is
lost.

Each machine publishes one document (`launch.machines.channel`). The first one reads those of all; the others
read only its document, in which it repeats what they need of each other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from fsdp_tune.core.atomic import json_safe
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.errors import ExitReason, Problem
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.machines.channel import Channel
from fsdp_tune.launch.machines.directories import READ_SECONDS
from fsdp_tune.launch.machines.identity import Identity
from fsdp_tune.launch.machines.machine import NOT_STARTED, MachineReport, relay
from fsdp_tune.launch.machines.verdicts import started_again
from fsdp_tune.run.rank_files import RankState

POLL_SECONDS = 1.0
"""In place of `READ_SECONDS` while ranks run."""
WORK_SECONDS = 1.0
"""Least time between two counts of work."""
SHARE_SECONDS = 60.0
"""Limit for the other machines to publish where their ranks are."""
LOST_SECONDS = 300.0
"""A machine from which nothing has come for this long is lost; if `launch.hang_timeout` is shorter, after
that and `LOST_MARGIN_SECONDS`, since ranks that wait for it are then reported first."""
LOST_MARGIN_SECONDS = 30.0
REFUSED_SECONDS = 45.0
"""A first machine that answers, but serves no store for this long, has no command any more. A child that died
is replaced sooner."""
ATTESTED_SECONDS = 60.0
"""A command whose ranks make progress changes its document three times in this time, else its machine counts
as silent."""
UNHEARD_SECONDS = 30.0
"""At the end of a launch, machines that have been silent for longer are not waited for."""


class Peers:
    """The other machines of a run, by what they have published."""

    def __init__(
        self,
        machine: int,
        count: int,
        *,
        hang_seconds: float,
        replacement_seconds: float,
        channel: Channel | None,
        identity: Identity | None,
    ) -> None:
        """`channel` and `identity`: None on a single machine."""
        self.machine, self.count = machine, count
        self.hang_seconds, self.replacement_seconds = hang_seconds, replacement_seconds
        self.members = tuple(range(count))
        """The machines of the launch. Ranks are numbered in this order."""
        self.open_channel = channel
        self.report = MachineReport(
            token=secrets.token_hex(8), life=secrets.token_hex(8) if machine == 0 else None, identity=identity
        )
        self._work = 0
        self._work_at = self._polled_at = float("-inf")
        self.reports: dict[int, MachineReport] = {}
        self.tokens: dict[int, str] = {}
        """On the first machine: the token of each other machine that has confirmed the launch."""

    @property
    def channel(self) -> Channel:
        assert self.open_channel is not None, "a single machine has no channel"
        return self.open_channel

    @property
    def others(self) -> list[int]:
        """The other machines of the launch."""
        return [machine for machine in self.members if machine != self.machine]

    def advance(self, n: int = 1) -> None:
        """Count work before a launch (rows, bytes), so that the others see that the first machine makes
        progress."""
        self._work += n
        if self.open_channel is not None and LIVED.now() - self._work_at >= WORK_SECONDS:
            self._work_at = LIVED.now()
            self.channel.refuse_fatal()
            self.publish(work=self._work)

    def is_there(self, machine: int) -> bool:
        silent_seconds = self.channel.silent_seconds(machine)
        return silent_seconds is not None and silent_seconds < UNHEARD_SECONDS

    def is_replaced(self, machine: int) -> bool:
        """Return whether another command has taken the number of a machine that had confirmed the launch."""
        report = self.read(machine)
        return report is not None and machine in self.tokens and report.token != self.tokens[machine]

    def is_poll_due(self) -> bool:
        """Return whether to read the other machines: at most once a second, never on a single machine."""
        if not self.others or LIVED.now() - self._polled_at < POLL_SECONDS:
            return False
        self._polled_at = LIVED.now()
        return True

    def failure_elsewhere(self) -> Problem | None:
        """Return the failure or loss of another machine, which ends the ranks here too."""
        for machine, report in self.read_others().items():
            if (problem := report.problem) is not None:
                return Problem("machine-failed", f"machine {machine}: {problem.message}", hint=problem.hint)
            if (
                machine == 0
                and report.relayed.failure is not None
                and report.relayed.failed_machine != self.machine
            ):
                with suppress(ValueError, KeyError, TypeError):
                    return Problem.from_dict(report.relayed.failure)
        if self.machine > 0:
            return self.left_out() or self.lost_first()
        return next((self.lost_problem(machine) for machine in self.tokens if self._is_lost(machine)), None)

    def left_out(self) -> Problem | None:
        """Return, on another machine, that the first one has begun the next launch: it had heard nothing from
        here for too long."""
        first = self.read(0)
        if first is None or first.life != self.report.life or first.launch <= self.report.launch:
            return None
        return Problem(
            "machine-lost",
            "machine 0 has ended this launch and started another",
            hint="the network between the machines failed for a time",
        )

    def stopped_elsewhere(self) -> ExitReason | None:
        """Return why the ranks of another machine were stopped, or None. Ranks here would wait for them."""
        for report in self.read_others().values():
            if (verdict := report.verdict) is not None and verdict.is_stop:
                return verdict.reason
            if report.relayed.stop_reason is not None:
                return report.relayed.stop_reason
        return None

    def share_quiet(self, *, is_quiet: bool) -> bool:
        """Publish whether the ranks of this machine make no progress. Returns whether those of no other
        machine make any, as last read."""
        if self.others and is_quiet != self.report.is_quiet:
            self.publish(is_quiet=is_quiet)
        if self.others and not is_quiet and LIVED.now() - self._work_at >= ATTESTED_SECONDS / 3:
            self.advance()
        return self._are_quiet() and (
            self.machine == 0 or not self._attests(0) or self.reports[0].relayed.are_quiet
        )

    def _attests(self, machine: int) -> bool:
        """Return whether the command of a machine says that its ranks make progress, or whether they do. One
        that hangs itself does not."""
        return self.is_there(machine) and self.channel.unchanged_seconds(machine) < ATTESTED_SECONDS

    def _are_quiet(self) -> bool:
        """Return whether no machine that this one reads reports progress."""
        reports = (
            (machine, self.reports.get(machine)) for machine in ([0] if self.machine > 0 else self.others)
        )
        return all(
            not self._attests(machine) or (report is not None and report.makes_no_progress)
            for machine, report in reports
        )

    def silent_seconds_elsewhere(self) -> float | None:
        """Return the seconds without progress if another machine has detected a hang and waits for the
        rank_states of this one."""
        reports = self.read_others().values()
        direct = [report.silent_seconds for report in reports if report.rank_states]
        return max(
            [*direct, *(each for report in reports if (each := report.relayed.silent_seconds) is not None)],
            default=None,
        )

    def share(self, rank_states: Sequence[RankState], silent_seconds: float) -> list[RankState]:
        """Publish the rank_states of this machine and wait for those of the others. Returns all known
        rank_states by rank."""
        self.publish(rank_states=tuple(rank_states), silent_seconds=silent_seconds)
        deadline = LIVED.now() + SHARE_SECONDS
        while not self._has_all_states() and LIVED.now() < deadline:
            time.sleep(READ_SECONDS)
        reports = self.read_others().values()
        every = {
            each.rank: each
            for report in reports
            for each in (*report.relayed.rank_states, *report.rank_states)
        }
        every |= {each.rank: each for each in rank_states}
        return [every[rank] for rank in sorted(every)]

    def _has_all_states(self) -> bool:
        reports = self.read_others()
        if self.machine == 0:
            return len(reports) == len(self.others) and all(report.rank_states for report in reports.values())
        return 0 in reports and bool(reports[0].rank_states) and reports[0].relayed.is_complete

    def _is_lost(self, machine: int) -> bool:
        """Return whether a machine that takes part in the launch is gone. One that has published its end may
        leave."""
        if machine in self.reports and self.reports[machine].verdict is not None:
            return False
        limit_seconds = min(LOST_SECONDS, self.hang_seconds + LOST_MARGIN_SECONDS)
        if self.machine > 0:  # its ranks end before the first machine can continue without them
            limit_seconds = min(limit_seconds, self.replacement_seconds + UNHEARD_SECONDS * 2 / 3)
        silent_seconds = self.channel.silent_seconds(machine)
        return self.is_replaced(machine) or (silent_seconds is not None and silent_seconds > limit_seconds)

    def lost_problem(self, machine: int) -> Problem:
        report, silent_seconds = self.reports.get(machine), self.channel.silent_seconds(machine)
        host = f" ({report.identity.host})" if report is not None and report.identity is not None else ""
        how = f"nothing has come from it for {format_seconds(silent_seconds or 0.0)}"
        if self.is_replaced(machine):
            how = "its command was started again"
        hint = "its command was killed, or the network between the machines failed"
        return Problem("machine-lost", f"machine {machine}{host} is lost: {how}", hint=hint)

    def lost_first(self) -> Problem | None:
        """Return, on another machine, why it cannot follow the first any more, or None."""
        first = self.read(0)
        if (
            first is None
            or self.report.life is None
            or (first.state == "final" and first.life == self.report.life)
        ):
            return None
        if first.life != self.report.life or self._is_lost(0):
            return self.lost_problem(0) if first.life == self.report.life else started_again(first)
        if self.channel.refused_seconds > REFUSED_SECONDS:
            message = f"machine 0 is lost: its command has ended ({self.channel.last.fault})"
            return Problem("machine-lost", message, hint="see the output of its command")
        return None

    def begin(self, launch: int, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self.report = replace(self.report, launch=launch)
        self.reports, self.tokens = {}, {}

    def publish(self, **changes: object) -> None:
        self.report = replace(self.report, **changes)
        if self.open_channel is not None:
            self.open_channel.publish(json_safe(self.report.as_dict()))

    def read_others(self) -> dict[int, MachineReport]:
        """Return the last report of each machine in this launch. A machine in the next launch has ended this
        one."""
        for machine in self.others if self.machine == 0 else [0] if self.others else []:
            report = self.read(machine)
            if report is None or report.launch not in (self.report.launch, NOT_STARTED):
                continue
            if report.life == self.report.life or self._failed_before_joining(machine, report):
                self.reports[machine] = report
        if self.machine == 0 and self.others:
            relayed = relay(self.reports, len(self.others), are_quiet=self._are_quiet())
            if relayed != self.report.relayed:
                self.publish(relayed=relayed)
        return self.reports

    def _failed_before_joining(self, machine: int, report: MachineReport) -> bool:
        """Return, on the first machine, whether one that has not joined the first launch has failed: it has
        not read which life this is."""
        is_first = self.machine == 0 and self.report.launch <= 0 and machine not in self.tokens
        return is_first and report.life is None and report.problem is not None

    def read(self, machine: int) -> MachineReport | None:
        """Return the present report of a machine, or None."""
        raw = self.channel.document(machine)
        with suppress(ValueError, KeyError, TypeError):
            return MachineReport.from_dict(raw) if raw else None
        return None
