"""`checkpoint.mirror` on the side of the command: the check at the start, the download, and the process that sends."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, usage_error
from fsdp_tune.core.processes import StoppedBySignal
from fsdp_tune.core.units import format_bytes
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.launch.command.resume import AUTO, Start
from fsdp_tune.launch.mirror.fetch import fetch_checkpoint, remove_stage
from fsdp_tune.launch.mirror.remote_run import MirrorIdentity, RemoteCheckpoint, RemoteRun, mirror_error, read_identity
from fsdp_tune.launch.mirror.send import MirrorState, state_path
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir, best_so_far
from fsdp_tune.run.remote_files import ContentError, UrlError

STALL_SECONDS = 900
"""The command waits for the mirror at its end while bytes are sent, and this long without any."""
WAIT_SECONDS = 3600.0
"""The longest that it waits."""
POLL_SECONDS = 0.5
RESTARTS = 3


@dataclass
class Mirroring:
    """The mirror of a run during one command."""

    run: RunDir
    recipe: Recipe
    remote: RemoteRun
    observer: Observer
    machine: int = 0
    _child: subprocess.Popen[str] | None = None
    _started: int = 0
    _start_step: int | None = None
    _was_read: bool = False
    """Whether the start was decided with the mirror's checkpoints in view: only then may newer ones of it be taken back."""
    _adopted: str | None = field(default=None)
    """Id of the run in the mirror that this command continues."""

    @classmethod
    def of(cls, run: RunDir, recipe: Recipe, observer: Observer, machine: int = 0) -> Mirroring | None:
        """Return the mirror that a recipe names, or None. Raises: usage error if the package of its protocol is missing."""
        url = recipe.checkpoint.mirror
        if url is None:
            return None
        try:
            return cls(run, recipe, RemoteRun(url, run.name), observer, machine)
        except UrlError as error:
            raise mirror_error(url, error) from error

    def prepare(self, start: Start, resume: str | None, *, overwrite: bool = False) -> bool:
        """Check the mirror before anything is trained, and download a newer checkpoint than that of `start`, under `--resume auto`.

        Returns whether one was downloaded, after which the start is to be decided again. Raises: usage error for a mirror that
        cannot be used; one that cannot be reached is a notice if this disk has a checkpoint.
        """
        self.observer.phase("checking the mirror")
        try:
            self.remote.probe()
            self._identify(start, resume, overwrite=overwrite)
            if resume not in (None, AUTO):
                self._refuse_later(start)
            downloaded = resume == AUTO and self._download(start)
            self._was_read = True
            return downloaded
        except UrlError as error:
            if error.refusal is None and start.checkpoint is not None:
                message = f"the mirror {self.remote.url} cannot be reached: {error}; the run continues from this disk"
                self.observer.notices([Notice("mirror-unreachable", message, Where(key="checkpoint.mirror"), "it is tried again")])
                return False
            raise mirror_error(self.remote.url, error) from error

    def preview(self, start: Start, resume: str | None) -> list[Notice]:
        """Return what `prepare` would download, from a listing alone."""
        if resume != AUTO or start.is_finished:
            return []
        try:
            newest = next(iter(self.remote.complete_steps(self.remote.directory.list())), None)
        except UrlError as error:
            return [Notice("mirror-unreachable", f"the mirror {self.remote.url} cannot be read: {error}")]
        if newest is None or (start.checkpoint is not None and newest <= start.step):
            return []
        message = f"the run would continue from checkpoint-{newest} of {self.remote.url}, which is newer than what is on this disk"
        return [Notice("mirror-newer", message)]

    def _identify(self, start: Start, resume: str | None, *, overwrite: bool) -> None:
        there, own = self.remote.identity(), None if overwrite else read_identity(self.run)
        if there is None or there == own:
            return
        if resume == AUTO and start.is_new:
            self._adopted = there
            return
        continues = () if resume is not None or overwrite else ("--resume auto continues from it, if its directory is gone",)
        raise usage_error(
            "mirror-used",
            f"{self.remote.url} has the checkpoints of another run",
            where=Where(key="checkpoint.mirror"),
            ways_out=(*continues, "--set checkpoint.mirror=… or --set output_dir=… names another place", "remove what is there"),
        )

    def _refuse_later(self, start: Start) -> None:
        steps = self.remote.complete_steps(self.remote.directory.list())
        if later := [f"checkpoint-{step}" for step in reversed(steps) if step > start.step]:
            raise usage_error(
                "later-checkpoints",
                f"{self.remote.url} has checkpoints after step {start.step} ({', '.join(later)}), which the run would replace",
                ways_out=("--resume auto continues from the newest", "--set output_dir=… continues in a new directory", "remove them"),
            )

    def _download(self, start: Start) -> bool:
        """Download the newest checkpoint that is complete and newer than this disk's, and the best one. Returns whether there was one."""
        steps = self.remote.complete_steps(self.remote.directory.list())
        for step in [step for step in steps if start.checkpoint is None or step > start.step]:
            found = self.remote.checkpoint(step)
            reason = self._fetch(found) if isinstance(found, RemoteCheckpoint) else found
            if isinstance(found, RemoteCheckpoint) and reason is None:
                self._fetch_best(found)
                return True
            self.observer.notices([Notice("checkpoint-rejected", f"checkpoint-{step} of the mirror is not used: {reason}")])
        if start.checkpoint is None and steps:  # from step 0, the run would replace them
            raise usage_error(
                "mirror-rejected",
                f"{self.remote.url} has checkpoints, and none that can be used",
                where=Where(key="checkpoint.mirror"),
                hint="--set checkpoint.mirror=… starts another copy, and the run at step 0",
            )
        if start.checkpoint is None:
            self.observer.notices([Notice("mirror-empty", f"{self.remote.url} has no complete checkpoint: training starts at step 0")])
        return False

    def _fetch(self, found: RemoteCheckpoint) -> str | None:
        """Download a checkpoint. Returns why its files are not usable, or None."""
        self.observer.message(f"downloading {found.name} ({format_bytes(found.size_bytes)}) from {self.remote.url}")
        try:
            with self.observer.progress("downloading", found.size_bytes, "bytes") as bar:
                fetch_checkpoint(self.remote, found, self.run, bar.advance, identity=self._adopted)
        except ContentError as error:
            remove_stage(self.run, found.step)
            return str(error)
        return None

    def _fetch_best(self, newest: RemoteCheckpoint) -> None:
        """Download the best checkpoint so far, from which a merge may be made, if the newest is another."""
        best = best_so_far(self.run.checkpoint(newest.step))
        if best is None or self.run.checkpoint(best.step).exists():
            return
        try:
            found = self.remote.checkpoint(best.step)
            reason = self._fetch(found) if isinstance(found, RemoteCheckpoint) else found
        except OSError as error:
            reason = str(error)
        if reason is not None:
            self.observer.notices([Notice("checkpoint-rejected", f"checkpoint-{best}, the best, is not on this disk: {reason}")])

    @contextmanager
    def sending(self, start_step: int | None) -> Iterator[None]:
        """Run the process that sends, and wait for it at the end.

        Call it in the main thread, while owning the run directory.
        """
        if self.machine == 0 and read_identity(self.run) is None:
            MirrorIdentity(self._adopted or secrets.token_hex(8)).write(self.run.mirror_json)
        self._start_step = start_step if self._was_read else None
        self._start()
        try:
            try:
                yield
            except (StoppedBySignal, KeyboardInterrupt):
                raise
            except FsdpTuneError:
                self._finish()
                raise
            self._finish()
        finally:
            if self._child is not None:
                children.end(self._child)

    def _start(self) -> None:
        keep, start = self.recipe.training.save_total_limit, self._start_step
        words = [str(self.run.path), str(self.recipe.checkpoint.mirror), str(self.machine), str(self.recipe.launch.num_machines)]
        words += ["all" if keep is None else str(keep), "unknown" if start is None else str(start)]
        command = [sys.executable, "-m", "fsdp_tune.launch.mirror.send", *words]
        with DISK.open_private(self.run.logs / f"mirror-{self.machine:02d}.log", "ab") as log:
            self._child = children.start(command, dict(os.environ), stdin=subprocess.PIPE, stdout=log, stderr=log)
        self._started += 1

    def tend(self) -> None:
        """Start the process that sends again if it has died."""
        if self._child is not None and self._child.poll() is not None and self.machine == 0 and self._started <= RESTARTS:
            self._start_step = None  # what is on this disk is the run by now
            self._start()

    def _finish(self) -> None:
        """Wait until the mirror has everything, and report if it does not."""
        self.tend()
        child = self._child
        assert child is not None
        assert child.stdin is not None
        with suppress(OSError):
            child.stdin.close()
        with suppress(StoppedBySignal, KeyboardInterrupt):  # they end the wait: the run itself has ended
            self._wait(child)
        if self.machine == 0 and child.poll() != 0:
            self.observer.notices([self._behind()])

    def _wait(self, child: subprocess.Popen[str]) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
            return
        state = self._state()
        ending = moved = time.monotonic()
        with self.observer.progress("sending to the mirror", state.left_bytes or None, "bytes") as bar:
            while child.poll() is None and time.monotonic() - moved < STALL_SECONDS and time.monotonic() - ending < WAIT_SECONDS:
                time.sleep(POLL_SECONDS)
                before, state = state, self._state()
                if state.sent_bytes > before.sent_bytes:
                    bar.advance(state.sent_bytes - before.sent_bytes)
                if (state.sent_bytes, state.waiting) != (before.sent_bytes, before.waiting):
                    moved = time.monotonic()

    def _state(self) -> MirrorState:
        return MirrorState.read(state_path(self.run, self.machine)) or MirrorState(self.remote.url)

    def _behind(self) -> Notice:
        state = self._state()
        newest = "no checkpoint" if state.newest_step is None else f"checkpoint-{state.newest_step} at the newest"
        left = f"; {', '.join(state.waiting)} ({format_bytes(state.left_bytes)}) on this disk alone" if state.waiting else ""
        why = f": {state.error}" if state.error else ""
        hint = f"`fsdp-tune status {self.run.path}` shows it; the next start of the run sends the rest"
        return Notice("mirror-behind", f"the mirror {self.remote.url} has {newest}{left}{why}", hint=hint)
