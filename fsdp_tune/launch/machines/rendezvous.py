"""Agree on each launch of a run over several machines, and on how it ended.

Each machine publishes one document (`launch.machines.channel`): its current launch, and how that ended there.
The first machine judges for all and alone decides on another launch. The others read only its document, in
which it repeats what they need of each other.

A life of the run is one command of the first machine, whose store ends with it. No rank starts before all
machines that take part have confirmed the launch: they are alike (`launch.machines.identity`), and see the
files that the ranks will read.
A machine that takes part in no launch, since it came after the start of one, waits for the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.machines.channel import Channel
from fsdp_tune.launch.machines.directories import READ_SECONDS, OwnDirectory, SharedDirectory
from fsdp_tune.launch.machines.identity import Identity, difference
from fsdp_tune.launch.machines.machine import Fewer, MachineReport, Relayed, Standby
from fsdp_tune.launch.machines.peers import Peers
from fsdp_tune.launch.machines.verdicts import before_launch, combined, verdict_of
from fsdp_tune.run.directory import Held, RunDir
from fsdp_tune.run.launch_files import train_command
from fsdp_tune.run.rank_files import ECHO_CODES, Verdict

JOIN_SECONDS = 3600.0
"""Limit for the first machine to come, and to check its inputs; also before the next launch. Work that it
counts extends it."""
DECISION_SECONDS = 600.0
"""Limit for the decision of the first machine after a launch."""
GATHER_SECONDS = 90.0
"""Limit for the other machines to end their ranks after the first."""


class Machines(Peers):
    """This machine in a run over several. A single machine publishes nothing and never waits.

    The first machine alone calls `expected`, `gather`, `notice`, `held_elsewhere` and `conclude`, and the
    others alone call `join` and `next_launch`.
    """

    def __init__(
        self,
        run: RunDir,
        machine: int = 0,
        count: int = 1,
        *,
        hang_seconds: float = 0.0,
        replacement_seconds: float = 0.0,
        channel: Channel | None = None,
        identity: Identity | None = None,
        directory: OwnDirectory | None = None,
    ) -> None:
        """`channel` and `identity`: None on a single machine. `directory`: None if all machines see the
        same."""
        super().__init__(
            machine,
            count,
            hang_seconds=hang_seconds,
            replacement_seconds=replacement_seconds,
            channel=channel,
            identity=identity,
        )
        self._run, self._identity = run, identity
        self._directory = directory or SharedDirectory(run)
        self._standby: Standby | None = None

    def __enter__(self) -> Self:
        self.publish()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish why this command ends before it has ended a launch, and close the channel."""
        if self.open_channel is None:
            return
        if error is not None and self.report.state not in ("ended", "final"):
            ended = verdict_of(error)
            self.publish(state="final" if self.machine == 0 else "ended", ended=ended.as_dict())
        self.close()

    def close(self) -> None:
        """Let the others read the last document of this machine, then leave."""
        if self.open_channel is not None:
            self.open_channel.close()

    def expected(self) -> list[int]:
        """Return, on the first machine, those to wait for: the machines of the last launch, and others that
        wait for the next one."""
        return [machine for machine in range(self.count) if machine in self.members or self._waits(machine)]

    def _waits(self, machine: int) -> bool:
        report = self.read(machine)
        return (
            self.is_there(machine)
            and report is not None
            and report.life == self.report.life
            and report.ended is None
        )

    def gather(
        self,
        launch: int,
        members: Sequence[int] | None = None,
        is_enough: Callable[[int], bool] | None = None,
    ) -> Verdict | Fewer | None:
        """Announce a launch of these machines (None: all) on the first one and wait until every other has
        confirmed it.

        Returns None once it has started. `is_enough`: whether the run can do with a number of machines. Then
        those that have not confirmed within `launch.replacement_timeout` are left out, and also, after the
        first launch, those that failed or were stopped. Without it, they end the run, and how is returned.
        """
        self.begin(launch, range(self.count) if members is None else members)
        if self.open_channel is None:
            return None
        started = LIVED.now()
        facts: dict[str, object] = {
            "members": self.members,
            "files": self._directory.offer(),
            "relayed": Relayed(),
        }
        self.publish(launch=launch, state="gathering", ended=None, rank_states=(), is_quiet=False, **facts)
        while True:
            self.advance()  # the others wait for it
            reports = self.read_others()
            ready = [
                machine
                for machine, report in reports.items()
                if report.state == "ready" and report.launch == launch
            ]
            present = [machine for machine in ready if self.is_there(machine)]
            if len(present) == len(self.others):
                break
            waited = LIVED.now() - started
            idle = min(waited, self.channel.idle_seconds(set(self.others) - set(present)))
            is_final = launch == 0 or is_enough is None
            if is_final and (ended := self._ended_before()) is not None:
                return ended
            if (
                is_enough is not None
                and (waited if launch else idle) > self.replacement_seconds
                and is_enough(1 + len(present))
            ):
                return Fewer((0, *sorted(present)))
            if idle > (
                self.hang_seconds if is_enough is None else max(self.hang_seconds, self.replacement_seconds)
            ):
                return self._ended_before() or Verdict(
                    ExitCode.FAILED, ExitReason.FAILED, 0, self._missing(present, waited)
                )
            time.sleep(READ_SECONDS)
        self._start(reports)
        return None

    def _start(self, reports: Mapping[int, MachineReport]) -> None:
        """Let the ranks of a launch start, whose other machines have all confirmed it."""
        self.tokens = {machine: reports[machine].token for machine in self.others}
        hosts = [self.report.identity, *(reports[machine].identity for machine in self.others)]
        write_json(
            self._run.machines_json,
            {str(at): identity.host for at, identity in enumerate(hosts) if identity is not None},
        )
        self.publish(state="running")

    def notice(self) -> str | None:
        """Return, on the first machine, the message for the user about its store, once; then None."""
        if self.open_channel is None:
            return None
        found, self.open_channel.notice = self.open_channel.notice, None
        return found

    def held_elsewhere(self, limit_seconds: float | None = None) -> list[Held]:
        """Return, on the first machine, what the others have of each checkpoint; [] if all see the same
        directory.

        Waits until all have reported it, or one has counted no work up to a limit; None: as for a launch,
        after which that is an error.
        """
        if self.open_channel is None or isinstance(self._directory, SharedDirectory):
            return []
        started, others = LIVED.now(), set(self.expected()) - {self.machine}
        while True:
            self.advance()
            self.channel.refuse_fatal()
            found = {machine: held for machine in others if (held := self._held_by(machine)) is not None}
            waited = LIVED.now() - started
            idle = min(waited, self.channel.idle_seconds(others - found.keys()))
            if len(found) == len(others) or (limit_seconds is not None and idle > limit_seconds):
                return [each for held in found.values() for each in held]
            if limit_seconds is None:
                ended = self._ended_before()
                if ended is None and idle > self.hang_seconds:
                    ended = Verdict(ExitCode.FAILED, ExitReason.FAILED, 0, self._missing(list(found), waited))
                if ended is not None:
                    problem = ended.problem or Problem(
                        "machine-failed", "another machine was stopped by a signal"
                    )
                    raise FsdpTuneError(problem, exit_code=ended.exit_code)
            time.sleep(READ_SECONDS)

    def _held_by(self, machine: int) -> tuple[Held, ...] | None:
        report = self.read(machine)
        return (
            report.held
            if report is not None and report.life == self.report.life and self.is_there(machine)
            else None
        )

    def _ended_before(self) -> Verdict | None:
        """Return how the run ends before a launch if a machine has failed or was stopped."""
        if (failure := self.failure_elsewhere()) is not None:
            return Verdict(ExitCode.FAILED, ExitReason.FAILED, 0, failure)
        stopped = self.stopped_elsewhere()
        return None if stopped is None else Verdict(EXIT_CODE_OF_REASON[stopped], stopped, 0)

    def conclude(self, ended: Verdict) -> None:
        """Publish, on the first machine, that there is no other launch."""
        self.publish(state="final", ended=ended.as_dict())

    def verdict(self, ended: Verdict) -> Verdict:
        """Return the verdict of the first machine for all: its own, or the first failure elsewhere that is
        not a consequence of another."""
        if ended.problem is None or not self.others:
            return ended
        deadline = LIVED.now() + GATHER_SECONDS
        while (open_ones := self._unreported()) and LIVED.now() < deadline:
            if not any(self._is_heard(machine) for machine in open_ones):
                break
            time.sleep(READ_SECONDS)
        judged = combined(
            ended, [verdict for report in self.reports.values() if (verdict := report.verdict) is not None]
        )
        if open_ones and judged.problem is not None and judged.problem.code in ECHO_CODES:
            return replace(judged, problem=self.lost_problem(open_ones[0]))
        return judged

    def has_one_left(self) -> bool:
        """Return whether a machine that this one reads has published how this launch ended there, or is not
        heard of any more."""
        open_ones, read = self._unreported(), self.others if self.machine == 0 else self.others[:1]
        return any(machine not in open_ones or not self._is_heard(machine) for machine in read)

    def _unreported(self) -> list[int]:
        """Return the machines that have not published how this launch ended there."""
        reports = self.read_others()
        return [
            machine for machine in self.others if machine not in reports or reports[machine].verdict is None
        ]

    def _is_heard(self, machine: int) -> bool:
        """Return whether the command that took part in the launch may still report."""
        return not self.is_replaced(machine) and self.is_there(machine)

    def _missing(self, present: Sequence[int], seconds: float) -> Problem:
        absent = [machine for machine in self.others if machine not in present]
        names, count = ", ".join(f"machine {machine}" for machine in absent), len(self.members)
        message = (
            f"{count - len(absent)} of {count} machines joined within {format_seconds(seconds)}; "
            f"missing: {names}"
        )
        command = train_command(self._run, "--machine-rank", "N")
        also = (
            "all must see the run directory"
            if isinstance(self._directory, SharedDirectory)
            else "if it has ended, see its output there"
        )
        hint = f"start `{command}` on each of them, with the same recipe and as many devices; {also}"
        return Problem("machines-missing", message, hint=hint)

    def join(self) -> Verdict | None:
        """Wait until the first machine is ready to launch, and this machine sees its files.

        Returns how the run ended before that, or None.
        """
        while self.channel.unchanged_seconds(0) < JOIN_SECONDS:
            first = self.read(0)
            # also that of a command started after the one it had found
            if first is not None and self.report.life != first.life:
                self.publish(life=first.life, held=self._directory.held(self.advance))
            if first is not None and first.state == "final":
                return before_launch(first.verdict)
            if first is not None and (problem := self._problem_with(first)) is not None:
                return self._failed(problem)
            if first is not None and first.files is not None:
                return self._failed(problem) if (problem := self._take_files()) is not None else None
            time.sleep(READ_SECONDS)
        why = f": {fault}" if (fault := self.channel.last.fault) else ", nor counted work for it"
        message = f"the first machine has not started this run within {format_seconds(JOIN_SECONDS)}{why}"
        return self._failed(
            Problem(
                "first-machine-missing",
                message,
                hint="see the output of its command, and `launch.main_process_ip`",
            )
        )

    def _failed(self, problem: Problem) -> Verdict:
        """Publish that this machine does not take part."""
        ended = Verdict(ExitCode.FAILED, ExitReason.FAILED, 0, problem)
        self.publish(state="ended", ended=ended.as_dict())
        return ended

    def _problem_with(self, first: MachineReport) -> Problem | None:
        if self.channel.last.twin is not None:
            message = f"another command takes part in this run as machine {self.machine}"
            return Problem(
                "machine-twice", message, hint="give each machine a number of its own (`--machine-rank`)"
            )
        if first.identity is None or self._identity is None:
            return None
        return difference(self.machine, self._identity, first.identity, self.channel.clock_seconds(0))

    def _take_files(self) -> Problem | None:
        """Wait until this machine has the files that ranks read."""
        return self._directory.take(
            self.machine, lambda: first.files if (first := self.read(0)) is not None else None
        )

    def next_launch(self) -> int | Verdict | Standby | None:
        """Wait for the next launch of the first machine and confirm it.

        Returns its number once all its machines have confirmed it, or how the run ended; None if the first
        machine is gone. The first time that a launch leaves this machine out, returns which machines it has;
        the next call waits on.
        """
        confirmed: int | None = None
        while True:
            first = self.read(0)
            if first is None or self.lost_first() is not None:
                return None
            if first.state == "final":
                return first.verdict
            if self.machine not in first.members:  # it waits as long as the first machine is there
                if first.state == "running" and self._standby != (standby := Standby(first.members)):
                    self._standby = standby
                    return standby
                time.sleep(READ_SECONDS)
                continue
            if self.channel.unchanged_seconds(0) > DECISION_SECONDS:
                return None
            if first.state == "gathering" and first.launch > self.report.launch:
                if (problem := self._take_files()) is not None:
                    self.publish(launch=first.launch)
                    return self._failed(problem)
                confirmed = first.launch
                self.publish(
                    launch=first.launch, state="ready", ended=None, held=None, rank_states=(), is_quiet=False
                )
            if first.state == "running" and first.launch == confirmed:
                self.begin(first.launch, first.members)
                self._standby = None
                self.publish(state="running")
                return first.launch
            time.sleep(READ_SECONDS)

    @property
    def launch_id(self) -> str | None:
        """What distinguishes the ranks of this launch from those of earlier ones, which may still run; None
        on a single machine."""
        return f"{self.report.life}-{self.report.launch}" if self.others else None

    def environment(self) -> dict[str, str]:
        """Return variables for the launcher, so that agents of different lives or launches never form one
        group."""
        return {"PET_RDZV_ID": self.launch_id} if self.launch_id is not None else {}

    def end(self, ended: Verdict) -> None:
        """Publish how this launch ended here."""
        self.publish(state="ended", ended=ended.as_dict())
        if self.machine > 0:  # after that: it may take long, and the first machine waits
            self.publish(held=self._directory.held(self.advance, compares=ended.problem is not None))
