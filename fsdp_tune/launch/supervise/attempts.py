"""Launch a run, and launch it again from the newest checkpoint after a transient failure.

The supervisor starts the whole `accelerate launch` again. torchrun's own `--max_restarts` is left at 0,
because its agent (torch/distributed/elastic/agent/server/api.py, `_invoke_run`) restarts after any exit code,
those of "saved and stopped", "out of memory" and "non-finite" included; it counts restarts but not progress;
it ends the other ranks by SIGTERM, which our ranks handle as "save, then stop"; and a static rendezvous never
informs the agents of other machines. A new launch has a new agent and a new store. torchrun keeps the old
keys of the store, which makes such restarts fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.core.units import counted, parse_seconds
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.machines.machine import Fewer, Standby
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.launch.supervise.early_launch import EarlyLaunch
from fsdp_tune.launch.supervise.launch_events import Event, Message
from fsdp_tune.launch.supervise.restarts import Failure, Restart, decide_restart, is_transient
from fsdp_tune.launch.supervise.retried_io import reason_of
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.recipe.references import missing_start_inputs
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import (
    Checkpoint,
    Held,
    Rejected,
    are_verified,
    checkpoint_step,
    inspect_checkpoint,
    latest_checkpoint,
    missing_files,
)
from fsdp_tune.run.events import CheckpointRejected, MachinesChanged, Restarted
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.run.rank_files import ECHO_CODES, Verdict, record

RowsOfStep = Callable[[int], str | None]
"""Return the names of the rows of a step (counted from 1), or None if they are unknown."""
NewerCopy = Callable[[int, Callable[[int], object]], Path | None]
"""Download a later checkpoint than a step from elsewhere, counting its bytes, and return its directory, or
None if there is none."""


@dataclass(frozen=True, slots=True)
class Resized:
    """A run whose files are now those of another number of machines."""

    plan: LaunchPlan
    step: int
    """Where its next launch starts."""
    ranks: int
    accumulation: int
    """Micro-batches of a step."""


class MachineSizes(Protocol):
    """A run on some of its machines (`launch.min_machines`)."""

    def allows(self, machines: int) -> bool:
        """Return whether the run can continue on this number of machines."""
        ...

    def plan(self, members: Sequence[int]) -> LaunchPlan:
        """Return the launch of this machine, which is one of them."""
        ...

    def resize(self, members: Sequence[int]) -> Resized:
        """Write the files of the run for these machines. Raises: FsdpTuneError."""
        ...


class Attempts:
    """The launches of one command on one machine. With several machines the first decides and the others
    follow."""

    def __init__(
        self,
        plan: LaunchPlan,
        recipe: Recipe,
        rows_of_step: RowsOfStep,
        early: EarlyLaunch | None = None,
        machines: Machines | None = None,
        *,
        newer_copy: NewerCopy | None = None,
        sizes: MachineSizes | None = None,
    ) -> None:
        """`early`: the launcher of the first launch, if it has already been started. `machines`: None on a
        single machine.
        `newer_copy`: where restarts look for a checkpoint that is damaged on this disk. `sizes`: None if the
        run needs all of its machines.
        """
        self._newer_copy = newer_copy
        self._early = early
        self._plan, self._recipe, self._rows_of_step = plan, recipe, rows_of_step
        self._failures: list[Failure] = []
        self._hang_seconds = parse_seconds(recipe.launch.hang_timeout)
        self._machines = machines or Machines(plan.run)
        self._sizes = sizes
        self._numbers = itertools.count()
        self._held: Sequence[Held] = ()
        """What other machines had of each checkpoint at the last decision, if each has its own run
        directory."""
        self._members = self._machines.members
        """The machines for which the files of the run are written, and `_plan` is made."""

    def events(self) -> Generator[Event]:
        """Yield the events of all launches. The last is `Verdict`; no process is left by then."""
        return self._lead() if self._plan.machine_rank == 0 else self._follow()

    def _lead(self) -> Generator[Event]:
        step = 0
        while True:
            if (ended := (yield from self._gather())) is not None:
                yield from self._conclude(replace(ended, step=step), is_written=False)
                return
            supervisor, judged = yield from self._launch()
            step = judged.step
            self._machines.end(judged)
            ended = self._without_stopped(self._machines.verdict(judged), supervisor)
            problem = ended.problem
            if is_transient(ended, supervisor.signals):
                problem = yield from self._restart_or_end(ended, has_trained=supervisor.has_trained)
            if problem is not None or ended.problem is None:
                ended = replace(ended, problem=problem)
                yield from self._conclude(ended, is_written=ended == judged)
                return

    def _conclude(self, ended: Verdict, *, is_written: bool) -> Generator[Event]:
        """End the run for all machines."""
        if not is_written and (refusal := record(self._plan.run, ended)) is not None:
            yield Message(refusal)
        self._machines.conclude(ended)
        yield ended

    def _restart_or_end(self, ended: Verdict, *, has_trained: bool) -> Generator[Event, None, Problem | None]:
        """Prepare the next launch. Returns the problem that ends the run if there is none."""
        assert ended.problem is not None, "only failures come here"
        try:
            decision, checkpoint = yield from self._decide(ended, has_trained=has_trained)
            if isinstance(decision, Problem):
                return decision
            yield Message(self._prepare_restart(decision, checkpoint))
        except OSError as error:
            message = (
                f"{ended.problem.message}; it is not restarted, since files of the run cannot be used: "
                f"{reason_of(error)}"
            )
            return replace(ended.problem, message=message)
        return None

    def _without_stopped(self, ended: Verdict, supervisor: Supervisor) -> Verdict:
        """Return the verdict, in which the stop of another machine is its loss if the run can do without it.

        The ranks have saved and stopped. A scheduler that ends the job sends its signal to this machine, too.
        """
        is_of_other = (
            ended.is_stop
            and ended.reason is ExitReason.PREEMPTED
            and not supervisor.signals
            and bool(self._machines.others)
        )
        if self._sizes is None or not is_of_other:
            return ended
        problem = Problem(
            "machine-lost",
            "another machine was stopped by a signal",
            hint="its command has the signal in its output",
        )
        return replace(ended, exit_code=ExitCode.LOST_RANK, reason=ExitReason.LOST_RANK, problem=problem)

    def _gather(self) -> Generator[Event, None, Verdict | None]:
        """Start the launch on all machines that are there. Returns how the run ended if it cannot be
        started."""
        machines: Sequence[int] = self._machines.expected()
        is_enough = self._is_enough if self._sizes is not None else None
        while True:
            try:
                yield from self._resize(machines)
            except FsdpTuneError as error:
                return Verdict(error.exit_code, ExitReason.FAILED, 0, error.problems[0])
            except OSError as error:
                message = f"the files of the run cannot be written: {error}"
                return Verdict(
                    ExitCode.FAILED,
                    ExitReason.FAILED,
                    0,
                    Problem("run-not-written", message, hint="see the disk of `output_dir`"),
                )
            found = self._machines.gather(next(self._numbers), self._members, is_enough)
            if (notice := self._machines.notice()) is not None:
                yield Message(notice)
            if not isinstance(found, Fewer):
                return found
            machines = found.present

    def _is_enough(self, present: int) -> bool:
        """Return whether the run can continue on some of as many machines."""
        return self._sizes is not None and any(self._sizes.allows(size) for size in range(1, present + 1))

    def _resize(self, machines: Sequence[int]) -> Generator[Event]:
        """Make the run one of as many of these machines as it can use, the lowest numbers first."""
        if self._sizes is None:
            return
        size = next(size for size in range(len(machines), 0, -1) if self._sizes.allows(size))
        before, self._members = self._members, tuple(machines[:size])
        if before == self._members:
            return
        resized = self._sizes.resize(self._members)
        self._plan = resized.plan
        lost = [machine for machine in before if machine not in self._members]
        message = f"continuing on {_named(self._members)}" + (f", without {_named(lost)}" if lost else "")
        message += (
            f": {counted(resized.ranks, 'rank')} × {counted(resized.accumulation, 'micro-batch', 'es')} "
            "a step; "
        )
        message += "the global batch is the same"
        changed = MachinesChanged(
            resized.step, list(self._members), resized.ranks, resized.accumulation, message
        )
        append_event(self._plan.run, changed)
        yield Message(message)

    def _follow(self) -> Generator[Event]:
        ended: Verdict | None = None
        while True:
            launch = self._machines.next_launch()
            if isinstance(launch, Standby):
                yield Message(
                    f"the run continues on {_named(launch.members)}; this machine joins when it is "
                    "next restarted"
                )
                continue
            if not isinstance(launch, int):
                # the run has gone on without this machine, and its end counts
                if self._machines.left_out() is not None:
                    ended = None
                yield _final(ended, launch, self._machines.lost_first())
                return
            if self._sizes is not None and self._members != self._machines.members:
                self._members = self._machines.members
                self._plan = self._sizes.plan(self._members)
                yield Message(
                    f"this machine runs {_named(self._plan.ranks, 'rank')} of {self._plan.world_size}"
                )
            supervisor, ended = yield from self._launch()
            self._machines.end(ended)
            # of this machine; the run may continue without it
            if self._sizes is not None and ended.is_stop and supervisor.signals:
                yield ended
                return

    def _launch(self) -> Generator[Event, None, tuple[Supervisor, Verdict]]:
        early, self._early = self._early, None
        supervisor = Supervisor(
            self._plan, hang_timeout_seconds=self._hang_seconds, machines=self._machines, early=early
        )
        for event in supervisor.events():
            if isinstance(event, Verdict):
                return supervisor, event
            yield event
        raise AssertionError("a supervisor ends with a verdict")

    def _decide(
        self, ended: Verdict, *, has_trained: bool
    ) -> Generator[Event, None, tuple[Restart | Problem, Checkpoint | None]]:
        assert ended.problem is not None
        if self._recipe.launch.max_restarts == 0:  # before other machines are asked, one of which may be lost
            return ended.problem, None
        digests = self._recipe.checkpoint.verify == "digest"
        progress = self._machines.advance
        wait_seconds = (
            parse_seconds(self._recipe.launch.replacement_timeout)
            if self._sizes is not None
            else self._hang_seconds
        )
        held = self._held = self._machines.held_elsewhere(wait_seconds)
        checkpoint, rejected = latest_checkpoint(
            self._plan.run, digests=digests, progress=progress, elsewhere=held
        )
        start = self._start_elsewhere() if checkpoint is None else None
        found = None if start is None else inspect_checkpoint(start, digests=digests, progress=progress)
        usable = checkpoint or (found if isinstance(found, Checkpoint) else None)
        usable = self._newer(usable) or usable
        if isinstance(found, Rejected) and usable is None:
            message = (
                f"{ended.problem.message}; it is not restarted, since `{start}`, which it continues, "
                f"cannot be read: {found.reason}"
            )
            return replace(ended.problem, message=message), None
        if usable is None and (lacking := [each for each in rejected if each.is_elsewhere]):
            missing = missing_files(max(lacking, key=lambda each: checkpoint_step(each.path) or 0))
            message = f"{ended.problem.message}; it is not restarted, since {missing.message}"
            return replace(ended.problem, message=message, hint=missing.hint), None
        saved_step = usable.step if usable else 0
        self._failures.append(Failure(ended.problem, ended.step, saved_step, has_trained, self._members))
        decision = decide_restart(self._failures, self._recipe.launch.max_restarts, self._rows_of_step)
        if isinstance(decision, Restart):
            yield from map(Message, self._passed_over(rejected, usable))
        return decision, usable

    def _newer(self, usable: Checkpoint | None) -> Checkpoint | None:
        """Return a newer checkpoint that has been downloaded for a restart, or None."""
        if self._newer_copy is None or len(self._failures) >= self._recipe.launch.max_restarts:
            return None
        path = self._newer_copy(usable.step if usable else 0, self._machines.advance)
        found = inspect_checkpoint(path, digests=False) if path is not None else None
        return found if isinstance(found, Checkpoint) else None

    def _passed_over(self, rejected: Sequence[Rejected], usable: Checkpoint | None) -> list[str]:
        """Write an event for each newer checkpoint that a restart does not use. Returns the messages to
        print."""
        step = usable.step if usable else 0
        messages: list[str] = []
        for each in rejected:
            rejected_step = checkpoint_step(each.path) or 0
            if rejected_step < step:
                continue
            replaced = usable is not None and usable.path == each.path
            message = (
                f"{each.path.name} is {'replaced by the copy of the mirror' if replaced else 'not used'}: "
                f"{each.reason}"
            )
            append_event(self._plan.run, CheckpointRejected(step, each.path.name, message))
            messages.append(message)
        return messages

    def _start_elsewhere(self) -> Path | None:
        """Return the checkpoint of another directory that the run continues; None if it started at step 0 or
        from one of its own."""
        request = ResumeRequest.read(self._plan.run.resume_json)
        if request is None or request.resume_from is None:
            return None
        path = Path(request.resume_from)
        return path if path.resolve().parent != self._plan.run.path.resolve() else None

    def _prepare_restart(self, restart: Restart, checkpoint: Checkpoint | None) -> str:
        """Write where the next launch starts, and the event. Returns the message to print."""
        run, failure = self._plan.run, self._failures[-1]
        before = ResumeRequest.read(run.resume_json) or ResumeRequest()
        request = ResumeRequest(saves=before.saves)
        if checkpoint is not None:
            ends_at = checkpoint.step if before.ends_at == checkpoint.step else None
            digests_checked = self._recipe.checkpoint.verify == "digest" and are_verified(
                checkpoint, self._held
            )
            request = ResumeRequest(
                str(checkpoint.path),
                digests_checked,
                list(missing_start_inputs(self._recipe)),
                ends_at,
                before.saves,
            )
        request.write(run.resume_json)
        total = self._recipe.launch.max_restarts
        start_step = checkpoint.step if checkpoint else 0
        append_event(
            run,
            Restarted(
                start_step,
                restart=restart.number,
                max_restarts=total,
                failed_after_step=failure.step,
                code=failure.problem.code,
                message=failure.problem.message,
            ),
        )
        source = "step 0 (there is no complete checkpoint yet)"
        if checkpoint is not None:
            source = checkpoint.path.name if checkpoint.path.parent == run.path else str(checkpoint.path)
        again = max(0, failure.step - start_step)
        lost = f"; {again} {'steps' if again > 1 else 'step'} will be repeated" if again else ""
        return (
            f"{failure.problem.message}: restarting from {source} (restart {restart.number} of {total}){lost}"
        )


def _named(numbers: Sequence[int], what: str = "machine") -> str:
    """Describe `machine 0`, `machines 0, 2`, or `ranks 0 to 7`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    is_range = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{what}s {numbers[0]} to {numbers[-1]}" if is_range else f"{what}s {', '.join(map(str, numbers))}"


def _final(mine: Verdict | None, leader: Verdict | None, lost: Problem | None) -> Verdict:
    """Return the end of a machine other than the first: the problem of the run if its own is only a
    consequence of that.

    `lost`: why the first machine decides nothing any more.
    """
    if mine is None and leader is not None:
        return leader
    if mine is None:
        problem = lost or Problem(
            "first-machine-missing",
            "the first machine did not start its ranks",
            hint="see the output of its command",
        )
        return Verdict(
            ExitCode.LOST_RANK if lost else ExitCode.FAILED,
            ExitReason.LOST_RANK if lost else ExitReason.FAILED,
            0,
            problem,
        )
    is_echo = mine.problem is None or mine.problem.code in ECHO_CODES
    if leader is None and lost is not None and mine.problem is not None and is_echo:
        return replace(mine, problem=lost)
    if leader is None or not is_echo or (leader.problem is None and not leader.is_stop):
        return mine
    return replace(mine, exit_code=leader.exit_code, reason=leader.reason, problem=leader.problem)
