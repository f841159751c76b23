"""Run a launch to its end: start it, forward signals, watch its ranks, and leave no process behind.

Yields the lines of metrics.jsonl for the surface to show; the launcher's own output goes to
logs/launcher.log. When a rank fails, torchrun's agent sends SIGTERM to the others, on which ranks save and
stop: they would wait for the dead one. So the supervisor detects failures itself and kills the other ranks
after a short grace period.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.errors import ExitCode, ExitReason, Problem
from fsdp_tune.core.files import read_end_of_log
from fsdp_tune.core.library_errors import refusal_words
from fsdp_tune.core.parent_death import ends_with_parent
from fsdp_tune.core.refused_variables import find_refusal
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.launch.supervise.early_launch import EarlyLaunch
from fsdp_tune.launch.supervise.end_of_launch import (
    LaunchObservation,
    directory_problem,
    judge,
)
from fsdp_tune.launch.supervise.hang_diagnosis import hang_problem, report_text, with_launcher_state
from fsdp_tune.launch.supervise.inferred_outcomes import with_inferred_outcomes
from fsdp_tune.launch.supervise.launch_events import Event, Logged, Message, Position
from fsdp_tune.launch.supervise.rank_watch import RankWatch, kill_for_good
from fsdp_tune.launch.supervise.retried_io import REFUSALS, Looks
from fsdp_tune.launch.supervise.signal_relay import SignalRelay
from fsdp_tune.launch.supervise.stop_message import STARTING_PHASES
from fsdp_tune.launch.supervise.stop_signals import StopSignals
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.events import Continued, TrainStarted, number, read_event
from fsdp_tune.run.held_directory import HeldDirectory
from fsdp_tune.run.launch_files import disk_refusal
from fsdp_tune.run.manifest import MANIFEST_NAME
from fsdp_tune.run.metrics_file import Follower, append_event
from fsdp_tune.run.rank_files import clear, record

POLL_SECONDS = 0.2


METRICS_SECONDS = 0.5
"""metrics.jsonl may be on a network file system."""


GRACE_SECONDS = 5.0
"""From the first failure until the other ranks are killed: time to write their own outcomes."""


LINGER_SECONDS = 30.0
"""From the outcome of a rank, or the end of the last rank, until remaining processes are killed: NCCL may
hang in its clean-up."""


STOP_SECONDS = 30.0
"""From a stop signal in the start-up, which ends ranks at once, until those that it has not ended are killed:
a launcher or a rank that connects to a machine that is gone does so in C++, where no handler runs."""


OTHER_MACHINES_SECONDS = 330.0
"""Agents of torchrun wait 300 s for each other at the end, and do not know that one was stopped or killed and
never comes."""


HANG_MARGIN_SECONDS = 3.0
"""A rank without progress for `launch.hang_timeout` dumps its flight recorder; the report is made this much
later. With `hang_diagnosis.ANSWER_SECONDS` that is below 10 s. Collectives of the ranks time out later."""


READING_METRICS, RECORDING_A_SUSPENSION = "reading metrics.jsonl", "recording a suspension"


MOVED_SECONDS = 5.0
"""A run directory that is renamed and back within this time was not gone."""


LAST_READ_SECONDS = 5.0
"""For the outcomes of ranks that have all ended, if they cannot be looked at."""


class Supervisor:
    def __init__(
        self,
        plan: LaunchPlan,
        *,
        hang_timeout_seconds: float,
        machines: Machines | None = None,
        early: EarlyLaunch | None = None,
    ) -> None:
        """`early`: the launcher, if it has already been started."""
        self._plan = plan
        self._early = early
        self._machines = machines or Machines(plan.run)
        # as the ranks do: a link on the way may lead elsewhere later
        self._run = RunDir(plan.run.path.resolve())
        self._looks = Looks()
        self._left_at: float | None = None
        self._is_directory_gone = False
        self._hang_seconds = hang_timeout_seconds + HANG_MARGIN_SECONDS
        self._signals = StopSignals()
        self._gaps = len(LIVED.gaps)
        self._unrecorded: list[Continued] = []
        self._is_disk_refused = False
        self._stuck: Problem | None = None
        self._elsewhere: Problem | None = None
        self._last_logged_step = 0
        self._step_seconds: float | None = None
        self._total_steps: int | None = None
        self._metrics_read_at = 0.0
        self._position: Position | None = None
        self.has_trained = False
        """Whether the ranks reached their first step."""

    def events(self) -> Generator[Event]:
        """Yield the events of one launch. The last is `Verdict`; no process is left by then.

        Must run in the main thread: Python runs signal handlers there, and the kernel kills the launcher with
        the thread that started it.
        """
        self._run.logs.mkdir(parents=True, exist_ok=True)
        with HeldDirectory(self._run.path) as place:
            self._run = RunDir(self._run.path, place)
            yield from self._events(place)

    def _events(self, place: HeldDirectory) -> Generator[Event]:
        run = self._run
        is_first_machine = self._plan.machine_rank == 0
        clear(run, self._plan.ranks, with_verdict=is_first_machine)
        watch = RankWatch(run, self._plan.ranks, self._machines.launch_id)
        metrics = Follower(run.metrics_jsonl)
        logs = [self._launcher_log, *map(run.rank_log, self._plan.ranks)]
        log_starts = {log.name: log.stat().st_size if log.exists() else 0 for log in logs}
        with self._signals.listening():
            launcher = self._start()
            self._signals.relay = SignalRelay(launcher)
            try:
                while launcher.poll() is None:
                    time.sleep(POLL_SECONDS)
                    yield from self._polled(launcher, watch, metrics, place)
            finally:
                left = _kill_remaining(launcher, watch)
        _read_outcomes(watch)
        yield from self._looked("copying the launcher's log", lambda: self._copy_early_log(watch))
        yield from self._looked(RECORDING_A_SUSPENSION, self._noticed_gaps)
        if self._left_at is None:
            yield from self._looked(READING_METRICS, lambda: self._logged(metrics))
        if left:
            yield Message(
                "these processes survive SIGKILL (they wait for a disk or a driver): "
                f"{', '.join(map(str, left))}"
            )
        seen, inferred = with_inferred_outcomes(self._observe(watch, launcher.returncode, log_starts))
        yield from map(Message, inferred)
        ended = replace(judge(seen), signal=next(iter(self.signals), None))
        is_left = is_lost = False
        with contextlib.suppress(*REFUSALS):
            is_left = place.is_left()
            is_lost = not run.logs.is_dir()
        if is_left or is_lost or self._is_directory_gone:
            problem = directory_problem(place.given, place.moved_to(), ended)
            ended = replace(ended, exit_code=ExitCode.FAILED, reason=ExitReason.FAILED, problem=problem)
        if is_first_machine and not is_lost and (refusal := record(run, ended)) is not None:
            yield Message(refusal)
        yield ended

    def _polled(
        self, launcher: subprocess.Popen[str], watch: RankWatch, metrics: Follower, place: HeldDirectory
    ) -> Iterator[Event]:
        """Look at everything once. Every look of the loop at a file or a process is one of these: none that
        is refused hinders another."""
        yield from self._looked("passing on signals", lambda: self._passed_on(watch))
        yield from self._looked("copying the launcher's log", lambda: self._copy_early_log(watch))
        yield from self._looked(RECORDING_A_SUSPENSION, self._noticed_gaps)
        if time.monotonic() - self._metrics_read_at >= METRICS_SECONDS:
            yield from self._looked("looking for the run directory", lambda: self._noticed_move(place))
            if self._left_at is None:  # otherwise another file may be at the path
                yield from self._looked(READING_METRICS, lambda: self._logged(metrics))
        yield from self._looked("watching the ranks", lambda: watch.poll(launcher.pid))
        self._looks.note(
            "reading heartbeats and outcomes of ranks",
            watch.refusal,
            meanwhile=", no hang is detected until then",
        )
        yield from self._looked("following the first rank", lambda: self._moved(watch))
        yield from self._noticed_refusal(watch)
        yield from self._looked("judging the ranks", lambda: self._end_if_needed(launcher, watch))

    def _looked(self, name: str, look: Callable[[], Iterable[Event] | None]) -> Iterator[Event]:
        """Yield the events of a look, or once that it is refused."""
        with self._looks.at(name):
            yield from look() or ()
        yield from map(Message, self._looks.news())

    @property
    def _launcher_log(self) -> Path:
        return self._run.logs / self._plan.launcher_log.name

    @property
    def signals(self) -> list[int]:
        """Signals received so far, in order."""
        return self._signals.numbers

    def _moved(self, watch: RankWatch) -> Iterator[Event]:
        if not self._run.metrics_jsonl.exists():  # another machine's own directory has the line of the start
            self.has_trained = self.has_trained or watch.last_step > 0
        beat = watch.first_beat
        position = Position(beat.step, beat.phase, beat.done, beat.planned) if beat is not None else None
        if position is not None and position != self._position:
            self._position = position
            yield position

    def _logged(self, metrics: Follower) -> Iterator[Event]:
        self._metrics_read_at = time.monotonic()
        for line in metrics.read():
            if isinstance(event := read_event(line), TrainStarted):
                self.has_trained, self._total_steps = True, event.total_steps
            self._step_seconds = number(line.get("step_seconds", self._step_seconds))
            self._last_logged_step = max(self._last_logged_step, _step_of(line))
            yield Logged(line)

    def _start(self) -> subprocess.Popen[str]:
        if self._early is not None and self._early.is_waiting:
            return self._early.open()
        with DISK.open_private(self._launcher_log, "ab") as log:
            return subprocess.Popen(
                ends_with_parent(list(self._plan.argv)),
                env=self._plan.env | self._machines.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches the ranks once, through this process
                text=True,
            )

    def _copy_early_log(self, watch: RankWatch) -> None:
        if self._early is None:
            return
        if len(watch.beats) == len(self._plan.ranks):
            self._early.remove_files()
        if self._run.logs.is_dir():
            self._early.copy_log(self._launcher_log)

    def _passed_on(self, watch: RankWatch) -> Iterator[Event]:
        return self._signals.pass_on(watch, self._total_steps, self._step_seconds)

    def _noticed_gaps(self) -> Iterator[Event]:
        """Report for how long the whole job did not run, and record it in the metrics once they can be
        written."""
        while self._gaps < len(LIVED.gaps):
            seconds = LIVED.gaps[self._gaps].seconds
            self._gaps += 1
            message = (
                f"this command was stopped or suspended for {format_seconds(seconds)}, which no "
                "limit counts, and continues"
            )
            if self._plan.machine_rank == 0:
                self._unrecorded.append(Continued(self._last_logged_step, seconds, message))
            yield Message(message)
        while self._unrecorded:
            append_event(self._run, self._unrecorded[0])
            del self._unrecorded[0]

    def _noticed_move(self, place: HeldDirectory) -> Iterator[Event]:
        """Stop the ranks once the path of the run has led elsewhere, or nowhere, for `MOVED_SECONDS`."""
        self._left_at = (self._left_at or LIVED.now()) if place.is_left() else None
        if (
            self._left_at is not None
            and LIVED.now() - self._left_at >= MOVED_SECONDS
            and not self._is_directory_gone
        ):
            self._is_directory_gone = True
            moved = place.moved_to()
            saves = " after they have saved there" if moved is not None else ""
            yield Message(f"{directory_problem(place.given, moved).message}; the ranks are stopped{saves}")
            self._signals.add(signal.SIGTERM)

    def _noticed_refusal(self, watch: RankWatch) -> Iterator[Event]:
        was_refused, self._is_disk_refused = self._is_disk_refused, watch.disk_refusal is not None
        if self._is_disk_refused and not was_refused:
            yield Message(
                f"{watch.disk_refusal}: no heartbeats, and no hang is detected until it can be "
                "written; the ranks continue"
            )
        elif was_refused and not self._is_disk_refused:
            yield Message(f"{self._run.logs} can be written again")

    def _end_if_needed(self, launcher: subprocess.Popen[str], watch: RankWatch) -> Iterator[Event]:
        now = LIVED.now()
        others_are_quiet = self._machines.share_quiet(is_quiet=watch.is_quiet(self._hang_seconds))
        silent_seconds = (
            watch.hang_seconds(self._hang_seconds, others_are_quiet=others_are_quiet)
            if self._stuck is None
            else None
        )
        if self._machines.is_poll_due():
            silent_seconds = silent_seconds or self._machines.silent_seconds_elsewhere()
            self._elsewhere = self._machines.failure_elsewhere()
            if self._elsewhere is not None and watch.failed_at is None:
                watch.failed_at = now
            # In training, the ranks agree on the step where they stop.
            stopped = (
                self._machines.stopped_elsewhere() if not self.has_trained and not self.signals else None
            )
            if stopped is not None:
                self._signals.add(signal.SIGINT if stopped is ExitReason.INTERRUPTED else signal.SIGTERM)
        if silent_seconds is not None:
            yield Message("no progress: collecting the stacks of every rank")
            yield from self._report_hang(launcher, watch, silent_seconds)
        if self._signals.gave_up_saving or self._stuck is not None or self._is_stop_ignored(watch):
            _kill_remaining(launcher, watch)
            return
        if watch.failed_at is not None and now - watch.failed_at > GRACE_SECONDS and (alive := watch.alive):
            yield Message(
                f"ending the other {len(alive)} ranks of this machine"
                if len(alive) > 1
                else "ending the other rank of this machine"
            )
            watch.expects_deaths = True
            kill_for_good(alive)  # the agent, which waits for them, then ends too
        if self._elsewhere is not None and now - (watch.failed_at or now) > GRACE_SECONDS:
            # its ranks may not have started: it waits for the other machines
            _kill_remaining(launcher, watch)
            return
        kill_for_good(watch.lingering(LINGER_SECONDS))
        ended_seconds = now - watch.all_ended_at if watch.all_ended_at is not None else 0.0
        waits_for_none = ended_seconds > LINGER_SECONDS and (
            self._plan.has_all_ranks or self._machines.has_one_left()
        )
        if waits_for_none or ended_seconds > OTHER_MACHINES_SECONDS:
            launcher.kill()

    def _is_stop_ignored(self, watch: RankWatch) -> bool:
        """Whether a signal in the start-up, before which nothing was trained, has not ended this launch."""
        if not self._signals.received:
            return False
        _, first_at = self._signals.received[0]
        starts = all(beat.phase in STARTING_PHASES for beat in watch.beats.values())
        return starts and LIVED.now() - LIVED.at(first_at) > STOP_SECONDS

    def _report_hang(
        self, launcher: subprocess.Popen[str], watch: RankWatch, silent_seconds: float
    ) -> Iterator[Event]:
        """Write RUN/logs/hang.txt: the stacks of all ranks of this machine and the locations of all others.
        Sets the problem."""
        mine, texts = watch.stacks()
        with contextlib.suppress(*REFUSALS):
            mine = with_launcher_state(mine, self._plan.ranks, psutil.Process(launcher.pid))
        rank_states = self._machines.share(mine, silent_seconds)
        path = (
            self._run.hang_report
            if self._plan.machine_rank == 0
            else self._run.logs / f"hang-{self._plan.machine_rank:02d}.txt"
        )
        self._stuck = problem = hang_problem(rank_states, silent_seconds, path)
        text = report_text(rank_states, texts, problem)
        try:
            write_file(path, text, private=True)
        except REFUSALS as error:
            self._stuck = replace(
                problem,
                hint="the stacks of every rank are above; raise `launch.hang_timeout` to allow more time",
            )
            yield Message(f"{path} cannot be written ({refusal_words(error)}). It would have:\n{text}")

    def _observe(
        self, watch: RankWatch, launcher_code: int, log_starts: Mapping[str, int]
    ) -> LaunchObservation:
        launcher = self._signals.relay.launcher if self._signals.relay is not None else None

        def written(log: Path) -> str:
            is_of_early = (
                log == self._launcher_log and self._early is not None and self._early.process is launcher
            )
            with contextlib.suppress(*REFUSALS):  # where the run directory is gone, that is reported instead
                return (
                    self._early.end_of_log()
                    if self._early is not None and is_of_early
                    else read_end_of_log(log, log_starts[log.name])
                )
            return ""

        launcher_text = written(self._launcher_log)
        lacks_some = len(watch.outcomes) < len(self._plan.ranks)
        return LaunchObservation(
            run=self._run,
            ranks=self._plan.ranks,
            launcher_code=launcher_code,
            launcher_log=self._launcher_log,
            launcher_text=launcher_text,
            outcomes=watch.known_ends(),
            deaths=watch.known_deaths,
            rank_texts={
                rank: written(self._run.rank_log(rank))
                for rank in self._plan.ranks
                if rank not in watch.outcomes
            },
            signals=self.signals,
            gave_up_saving=self._signals.gave_up_saving,
            stuck=self._stuck,
            elsewhere=self._elsewhere,
            killed_ranks=watch.expects_deaths,
            last_step=max(watch.last_step, self._last_logged_step),
            refused_variable=None
            if watch.outcomes or watch.first_beat
            else find_refusal(launcher_text, self._plan.env),
            disk_refusal=disk_refusal(self._run) if lacks_some else None,
            saved_step=self._saved_step(watch, launcher_code) if lacks_some else None,
        )

    def _saved_step(self, watch: RankWatch, launcher_code: int) -> int | None:
        """Return the step of the newest complete checkpoint if it has all that was trained. After a signal it
        must be newer than that: on a full disk the last known step is an old one."""
        with contextlib.suppress(*REFUSALS):
            newest, _ = latest_checkpoint(self._run, elsewhere=None)
            if newest is not None and self._signals.received and launcher_code != 0:
                signalled = time.time() - (time.monotonic() - self._signals.received[0][1])
                return newest.step if (newest.path / MANIFEST_NAME).stat().st_mtime >= signalled else None
            return (
                newest.step
                if newest is not None and newest.step >= max(watch.last_step, self._last_logged_step)
                else None
            )
        return None


def _step_of(line: dict[str, object]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0


def _kill_remaining(launcher: subprocess.Popen[str], watch: RankWatch) -> list[int]:
    """Kill the remaining processes of this launch, also if the caller stopped iterating. Returns the pids
    that do not die."""
    watch.expects_deaths = True
    processes = watch.alive
    if launcher.poll() is None:
        with contextlib.suppress(*REFUSALS):
            processes.append(psutil.Process(launcher.pid))
    left = kill_for_good(processes)
    launcher.kill()  # a child, for which nothing is looked up; its ranks end with it
    if launcher.pid not in left:
        launcher.wait()
    return [pid for pid in left if pid != launcher.pid or launcher.poll() is None]


def _read_outcomes(watch: RankWatch) -> None:
    """Read the files of all ranks, which have ended, within `LAST_READ_SECONDS`."""
    deadline = time.monotonic() + LAST_READ_SECONDS
    watch.read_all()
    while watch.lacks_outcomes and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        watch.read_all()
