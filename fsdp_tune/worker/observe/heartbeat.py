"""The heartbeat file of each rank: its step, its phase, and how long ago it last made progress. Read by `status` and the supervisor.

The training thread only records where it is. A thread of its own writes the file once a second, so that a rank that waits in a
collective still shows that it is alive.

Progress is what the training thread does (`beat`, `mark`, `tick`), and outside the phases of a step also the bytes that the process
reads and writes. What the heartbeat thread itself reads and writes is never progress.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.units import KIB
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import LAUNCH_VARIABLE, Collective, Heartbeat, read_heartbeat

INTERVAL_SECONDS = 1.0


MOST_WRITES = 256.0
"""Files a second, of all ranks on one file system, unless a phase ends. More ranks write less often."""


SLOWEST_SECONDS = 15.0
"""`status` counts a heartbeat of another machine as alive for a minute (`launch.run_status.RECENT_SECONDS`)."""


PERIOD_SECONDS = 0.1


COMPARED_SECONDS = 7.5
"""Time between two looks for a rank of a later launch that writes to the same file."""


STEP_PHASES = frozenset({"reading back", "training", "forward", "backward", "optimizer step", "evaluating"})
"""Phases in which only micro-batches and steps are progress: the bytes of a background save must not hide a hanging step.
In every other phase (importing, loading, saving …) bytes are progress too: a checkpoint on a slow disk is not a hang."""


LEAST_MOVED_BYTES = 64 * KIB
"""Fewer bytes are not progress: a thread of a library may write a log line while the training thread hangs."""


def interval_seconds(rank: int, world_size: int) -> float:
    """Return the time between two writes of a rank. The first rank, which the screen shows, keeps the shortest."""
    return INTERVAL_SECONDS if rank == 0 else min(SLOWEST_SECONDS, max(INTERVAL_SECONDS, world_size / MOST_WRITES))


class HeartbeatWriter:
    """`beat`, `mark`, `tick` and `during` are for the training thread. `on_silence` runs after `silence_seconds` without progress."""

    def __init__(
        self,
        run: RunDir,
        rank: int,
        *,
        world_size: int = 1,
        silence_seconds: float | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        self._run = run
        self._launch = os.environ.get(LAUNCH_VARIABLE, "")
        self._stage_suffix = f".{secrets.token_hex(4)}.tmp"
        self._rank, self._world_size = rank, world_size
        self._written_at = self._step_written_at = 0.0
        self._phase = self._written_phase = ""
        self._written_step = -1
        self._phase_began = self._progressed_at = time.monotonic()
        self.began_at = time.time()
        """Wall-clock time at which the first counted phase began."""
        self.phase_seconds: dict[str, float] = {}
        """How long the training thread was in each phase, without the current one."""
        self._moved_bytes = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._silence_seconds, self._on_silence = silence_seconds, on_silence
        self._is_gone = self._is_superseded = False
        self._compared_at = time.monotonic()
        self.step = 0
        self.collective: Collective | None = None
        """The last collective in the flight recorder, once this rank has made no progress for `silence_seconds`."""
        self._counted = (0, 0)
        """Finished and planned batches of the phase."""

    def count_before(self, phase_seconds: Mapping[str, float]) -> None:
        """Count phases before this object existed."""
        self.phase_seconds.update(phase_seconds)
        self.began_at -= sum(phase_seconds.values())

    @property
    def phase(self) -> str:
        return self._phase

    def beat(self, phase: str, step: int | None = None) -> None:
        """Record the phase and the step. A new phase is written at once, a new step by the heartbeat thread within `PERIOD_SECONDS`.

        Raises: FailedError when the run directory is gone.
        """
        self._record(phase, step)
        if self._is_gone:
            raise failed_error(
                "run-directory-gone",
                f"{self._run.given} is gone: the run directory was removed",
                hint="restore it, and start again with `--resume auto`",
            )

    def _record(self, phase: str, step: int | None) -> None:
        self.step = self.step if step is None else step
        changed, self._written_phase = phase != self._written_phase, phase
        self.mark(phase)
        if changed:
            self._write()

    def mark(self, phase: str) -> None:
        """Record the phase in memory only: cheap enough for every part of every step."""
        if phase != self._phase:
            now = time.monotonic()
            if self._phase:
                self.phase_seconds[self._phase] = self.phase_seconds.get(self._phase, 0.0) + now - self._phase_began
            self._phase, self._phase_began, self._counted = phase, now, (0, 0)
        self.tick()

    def tick(self) -> None:
        """Record progress inside a phase."""
        self._progressed_at = time.monotonic()

    def count(self, done: int, planned: int) -> None:
        """Record how many batches of the phase are finished, for the screen."""
        self._counted = (done, planned)
        self.tick()

    @contextlib.contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Enter `phase` for the block, and return to the phase before it."""
        before = self._phase
        self._record(phase, step)
        try:
            yield
        finally:
            self.mark(before)

    def start(self) -> None:
        """Start the heartbeat thread."""
        self._thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self._thread.start()

    def is_superseded(self) -> bool:
        """Return whether a rank of a later launch has written to the file: this machine was counted as lost, and is back.

        From then on this rank writes nothing to it.
        """
        beat = None
        if not self._is_superseded:
            with contextlib.suppress(OSError):  # a file server that does not answer for a while
                beat = read_heartbeat(self._run, self._rank)
        if beat is not None and beat.launch != self._launch and beat.began_at > self.began_at:
            self._is_superseded = True
        return self._is_superseded

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(INTERVAL_SECONDS)  # it may itself hang in the flight recorder of a wedged device

    def _keep_beating(self) -> None:
        reported_at = 0.0
        while not self._ended.wait(PERIOD_SECONDS):
            now = time.monotonic()
            # A new step is not held back by a write without one, so that a message can name the step that is being trained.
            written_at = self._step_written_at if self.step != self._written_step else self._written_at
            if now - written_at < interval_seconds(self._rank, self._world_size):
                continue
            self._count_moved_bytes(now)
            if now - self._compared_at >= COMPARED_SECONDS:  # both write in turn, so that one of a few reads shows it
                self._compared_at = now
                self.is_superseded()
            self._write()
            since = LIVED.at(max(self._progressed_at, reported_at))
            if self._silence_seconds is not None and self._on_silence is not None and LIVED.now() - since > self._silence_seconds:
                reported_at = now
                try:
                    self._on_silence()
                except Exception:  # noqa: BLE001  a report that fails must not end the heartbeat
                    traceback.print_exc()
                self._write()

    def _count_moved_bytes(self, now: float) -> None:
        """Called on the heartbeat thread, whose own bytes are left out."""
        moved_bytes = bytes_moved_by_other_threads()
        if moved_bytes - self._moved_bytes >= LEAST_MOVED_BYTES:
            self._moved_bytes = moved_bytes
            if self._phase not in STEP_PHASES:
                self._progressed_at = now

    def _write(self) -> None:
        if self._is_superseded:
            return
        now = self._written_at = time.monotonic()
        if self.step != self._written_step:
            self._written_step, self._step_written_at = self.step, now
        silent_seconds = round(LIVED.now() - LIVED.at(self._progressed_at), 3)
        beat = Heartbeat(
            self._rank,
            os.getpid(),
            self.step,
            self._phase,
            time.time(),
            self._progressed_at,
            silent_seconds,
            self.collective,
            *self._counted,
            self._launch,
            self.began_at,
        )
        # Not through `atomic`: the file is overwritten each second, and an fsync would stall the step.
        # Its name is of this process: on a machine that was lost, and that is back, a rank of an earlier launch may still write.
        path = self._run.rank_heartbeat(self._rank)
        stage = path.with_suffix(self._stage_suffix)
        with self._lock:
            try:
                stage.write_text(json.dumps(beat.content()), encoding="utf-8")
                stage.replace(path)
                self._is_gone = False
            except (FileNotFoundError, NotADirectoryError):  # or a later launch has cleared the file of this one
                with contextlib.suppress(OSError):
                    self._is_gone = not self._run.logs.is_dir()
            except OSError:  # a full disk: the write that matters, a checkpoint's or a metric's, reports it
                return


def bytes_moved_by_other_threads() -> int:
    """Return the bytes that this process has read and written, without those of the calling thread.

    Includes bytes that only reached the page cache, bytes that a page fault in a memory-mapped file fetched, and those of threads
    that have ended. Zero where the system does not count them.
    """
    process_bytes, thread_bytes = (_io_bytes(Path("/proc", scope, "io")) for scope in ("self", "thread-self"))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    return process_bytes - thread_bytes + faults * resource.getpagesize()


def _io_bytes(path: Path) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:  # no such file on this system
        return 0
    counted = ("rchar", "wchar", "read_bytes", "write_bytes")
    return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in counted)
