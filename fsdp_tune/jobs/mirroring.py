"""`checkpoint.mirror` on the side of the command: the check at the start, the download, and the process that
sends."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_tune.cluster.mirror.download import fetch_checkpoint, remove_stage
from fsdp_tune.cluster.mirror.remote_run import (
    Listing,
    MirrorIdentity,
    RemoteCheckpoint,
    RemoteRun,
    mirror_error,
    read_identity,
    run_folder,
)
from fsdp_tune.cluster.mirror.writer import SILENCE_SECONDS, MirrorInUseError, Writer, WriterRecord
from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, usage_error
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.core.units import format_bytes
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.launch.command.recipe_changes import check, compare
from fsdp_tune.launch.command.resume import AUTO, Start, parse_resolved
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir, best_so_far
from fsdp_tune.run.manifest import digest_data
from fsdp_tune.run.mirror_state import MirrorState, state_path
from fsdp_tune.run.remote_requests import ContentError, UrlError

STALL_SECONDS = 180.0
"""The command waits for the mirror at its end while bytes are sent or hashed, and this long without any."""
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
    _writer: Writer | None = None
    """The claim of this command, from `prepare` to `close`."""
    _child: subprocess.Popen[str] | None = None
    _started: int = 0
    _reported: str | None = None
    """The error of the process that sends which was a notice last."""
    _start_step: int | None = None
    _was_read: bool = False
    """Whether the start was decided with the mirror's checkpoints in view: only then may newer ones of it be
    taken back."""
    _adopted: str | None = field(default=None)
    """Id of the run in the mirror that this command continues."""

    @classmethod
    def of(cls, run: RunDir, recipe: Recipe, observer: Observer, machine: int = 0) -> Mirroring | None:
        """Return the mirror that a recipe names, or None. Raises: usage error if the package of its protocol
        is missing."""
        url = recipe.checkpoint.mirror
        if url is None:
            return None
        try:
            return cls(run, recipe, RemoteRun(url, run.name), observer, machine)
        except UrlError as error:
            raise mirror_error(url, error) from error

    def prepare(self, start: Start, resume: str | None, *, overwrite: bool = False) -> bool:
        """Claim and check the mirror before anything is trained; under `--resume auto`, download a newer
        checkpoint than that of `start`.

        Returns whether one was downloaded, after which the start is to be decided again. Raises: usage error
        for a mirror that cannot be used; one that cannot be reached is a notice if this disk has a
        checkpoint.
        """
        self.observer.phase("checking the mirror")
        try:
            self.remote.probe()
            self._identify(start, resume, overwrite=overwrite)
            self._claim()
            try:  # again: while this command waited for the claim, another one may have sent its run
                self._identify(start, resume, overwrite=overwrite)
            except BaseException:
                self.close()
                raise
            listing = self.remote.directory.list() if resume is not None else {}
            if resume not in (None, AUTO):
                self._refuse_later(start, listing)
            downloaded = resume == AUTO and self._download(start, listing)
            self._was_read = True
            return downloaded
        except UrlError as error:
            if error.refusal in (None, "full") and start.checkpoint is not None:
                message = (
                    f"the mirror {self.remote.url} cannot be used: {error}; the run continues from this disk"
                )
                self.observer.notices(
                    [
                        Notice(
                            "mirror-unreachable", message, Where(key="checkpoint.mirror"), "it is tried again"
                        )
                    ]
                )
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
        message = (
            f"the run would continue from checkpoint-{newest} of {self.remote.url}, which is newer than "
            "what is on this disk"
        )
        return [Notice("mirror-newer", message)]

    def _claim(self) -> None:
        """Own the mirror until `close`. Raises: usage error if another command does; UrlError."""
        self._writer = Writer(self.remote.directory, self.run.path)

        def wait(other: WriterRecord | None) -> None:
            seconds = f"up to {SILENCE_SECONDS:.0f} s"
            self.observer.message(
                f"waiting {seconds} to see whether {other or 'another command'} still writes to "
                f"{self.remote.url}"
            )
            self.observer.phase("waiting for the other command's sign of life")

        try:
            taken = self._writer.claim_patiently(wait)
        except MirrorInUseError as error:
            raise usage_error(
                "mirror-in-use",
                f"{self.remote.url} is in use by {error.record or 'another command'}",
                where=Where(key="checkpoint.mirror"),
                ways_out=(
                    "stop that command, or wait for its end",
                    "--set checkpoint.mirror=… or --set output_dir=… names another place",
                ),
            ) from error
        if taken is not None:
            message = (
                f"{self.remote.url} was claimed by {taken}, which has ended or does not respond: it is "
                "taken over"
            )
            self.observer.notices([Notice("mirror-taken-over", message)])

    def close(self) -> None:
        """Give the mirror back."""
        if self._writer is not None:
            self._writer.release()
            self._writer = None

    def _identify(self, start: Start, resume: str | None, *, overwrite: bool) -> None:
        there, own = self.remote.identity(), None if overwrite else read_identity(self.run)
        self._adopted = None
        if there is None or there == own:
            return
        if resume == AUTO and start.is_new:
            self._adopted = there
            return
        continues = (
            ()
            if resume is not None or overwrite
            else ("--resume auto continues from it, if its directory is gone",)
        )
        raise usage_error(
            "mirror-used",
            f"{self.remote.url} has the checkpoints of another run",
            where=Where(key="checkpoint.mirror"),
            ways_out=(
                *continues,
                "--set checkpoint.mirror=… or --set output_dir=… names another place",
                "remove what is there",
            ),
        )

    def _refuse_later(self, start: Start, listing: Listing) -> None:
        steps = self.remote.complete_steps(listing)
        if later := [f"checkpoint-{step}" for step in reversed(steps) if step > start.step]:
            raise usage_error(
                "later-checkpoints",
                f"{self.remote.url} has checkpoints after step {start.step} ({', '.join(later)}), "
                "which the run would replace",
                ways_out=(
                    "--resume auto continues from the newest",
                    "--set output_dir=… continues in a new directory",
                    "remove them",
                ),
            )

    def _download(self, start: Start, listing: Listing) -> bool:
        """Download the newest checkpoint that is complete and newer than this disk's, and the best one.
        Returns whether there was one."""
        steps = self.remote.complete_steps(listing)
        if (
            self._fetch_newest([step for step in steps if start.checkpoint is None or step > start.step])
            is not None
        ):
            return True
        if start.checkpoint is None and steps:  # from step 0, the run would replace them
            raise usage_error(
                "mirror-rejected",
                f"{self.remote.url} has checkpoints, and none that can be used",
                where=Where(key="checkpoint.mirror"),
                hint="--set checkpoint.mirror=… starts another copy, and the run at step 0",
            )
        if start.checkpoint is None:
            self.observer.notices(
                [
                    Notice(
                        "mirror-empty",
                        f"{self.remote.url} has no complete checkpoint: training starts at step 0",
                    )
                ]
            )
        return False

    def newer_copy(self, step: int, advance: Callable[[int], object]) -> Path | None:
        """Download the newest checkpoint after `step`, for a restart. Returns its directory; None, after a
        message, if there is none.

        `advance` is called with the number of bytes as they arrive.
        """
        try:
            if self.remote.identity() != read_identity(self.run):
                return None
            steps = [each for each in self.remote.complete_steps(self.remote.directory.list()) if each > step]
            return self._fetch_newest(steps, advance)
        except OSError as error:
            self.observer.message(f"a newer checkpoint of {self.remote.url} cannot be used: {error}")
            return None

    def _fetch_newest(
        self, steps: Sequence[int], advance: Callable[[int], object] | None = None
    ) -> Path | None:
        """Download the first of `steps` whose files are those of its manifest, and the best one. Returns its
        directory."""
        for step in steps:
            found = self.remote.checkpoint(step)
            if isinstance(found, RemoteCheckpoint):
                found = self._check_recipe(found) or self._fetch(found, advance) or found
            if isinstance(found, RemoteCheckpoint):
                self._fetch_best(found, advance)
                return self.run.checkpoint(step)
            self.observer.notices(
                [Notice("checkpoint-rejected", f"checkpoint-{step} of the mirror is not used: {found}")]
            )
        return None

    def _check_recipe(self, found: RemoteCheckpoint) -> str | None:
        """Refuse a recipe that must not continue the run, before the download. Returns why the file is not
        usable, or None.

        Raises: usage error, UrlError.
        """
        name = self.run.recipe_json.name
        if self.run.is_used or name not in found.run_files.files:
            return None
        path = f"{run_folder(found.name)}/{name}"
        raw = self.remote.directory.read(path)
        if raw is None:
            return f"{self.remote.url}/{path} is missing"
        if digest_data(raw) != found.run_files.files[name]:
            return f"{self.remote.url}/{path} is not what its manifest lists (its digest or size differs)"
        check(compare(parse_resolved(raw, f"{self.remote.url}/{path}"), self.recipe))
        return None

    def _fetch(self, found: RemoteCheckpoint, advance: Callable[[int], object] | None = None) -> str | None:
        """Download a checkpoint, with a progress bar unless `advance` counts. Returns why its files are not
        usable, or None."""
        self.observer.message(
            f"downloading {found.name} ({format_bytes(found.size_bytes)}) from {self.remote.url}"
        )
        try:
            if advance is not None:
                fetch_checkpoint(self.remote, found, self.run, advance, identity=self._adopted)
                return None
            with self.observer.progress("downloading", found.size_bytes, "bytes") as bar:
                fetch_checkpoint(self.remote, found, self.run, bar.advance, identity=self._adopted)
        except ContentError as error:
            remove_stage(self.run, found.step)
            return str(error)
        return None

    def _fetch_best(self, newest: RemoteCheckpoint, advance: Callable[[int], object] | None = None) -> None:
        """Download the best checkpoint so far, from which a merge may be made, if the newest is another."""
        best = best_so_far(self.run.checkpoint(newest.step))
        if best is None or self.run.checkpoint(best.step).exists():
            return
        try:
            found = self.remote.checkpoint(best.step)
            reason = self._fetch(found, advance) if isinstance(found, RemoteCheckpoint) else found
        except OSError as error:
            reason = str(error)
        if reason is not None:
            self.observer.notices(
                [
                    Notice(
                        "checkpoint-rejected",
                        f"checkpoint-{best.step}, the best, is not on this disk: {reason}",
                    )
                ]
            )

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
            except FsdpTuneError:
                self._finish()
                raise
            self._finish()
        finally:
            if self._child is not None:
                children.end(self._child)

    def _start(self) -> None:
        keep, start = self.recipe.training.save_total_limit, self._start_step
        words = [
            str(self.run.path),
            str(self.recipe.checkpoint.mirror),
            str(self.machine),
            str(self.recipe.launch.num_machines),
        ]
        words += ["all" if keep is None else str(keep), "unknown" if start is None else str(start)]
        words += [self._writer.key if self._writer is not None else "none"]
        words += ["own" if self.recipe.has_own_directories else "shared"]
        command = [sys.executable, "-m", "fsdp_tune.cluster.mirror.send", *words]
        with DISK.open_private(self.run.logs / f"mirror-{self.machine:02d}.log", "ab") as log:
            self._child = children.start(
                command, dict(os.environ), stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        self._started += 1

    def tend(self) -> None:
        """Start the process that sends again if it has died, and report at once an error that does not pass
        by itself."""
        if self._child is None:
            return
        state = self._state()
        if (
            self.machine == 0
            and state.is_refused
            and state.pid == self._child.pid
            and state.error != self._reported
        ):
            self._reported = state.error
            message = f"no checkpoint reaches the mirror {self.remote.url}: {state.error}"
            self.observer.notices(
                [Notice("mirror-stopped", message, Where(key="checkpoint.mirror"), "training continues")]
            )
        exit_code = self._child.poll()
        # On another machine it ends by itself, with 0, if the first machine shares the disk.
        has_died = exit_code is not None if self.machine == 0 else exit_code not in (None, 0)
        if has_died and self._started <= RESTARTS:
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
        exit_code = child.poll()
        if self.machine == 0 and exit_code != 0:
            self.observer.notices([self._behind()])
        elif self.machine != 0 and exit_code not in (None, 0):
            message = (
                f"files of this machine may be missing in the mirror {self.remote.url}: what sends them "
                f"ended with {exit_code}"
            )
            hint = (
                f"{self.run.logs / f'mirror-{self.machine:02d}.log'} has its last words; the next start "
                "of the run sends the rest"
            )
            self.observer.notices([Notice("mirror-behind", message, hint=hint)])

    def _wait(self, child: subprocess.Popen[str]) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
            return
        state = self._state()
        ending = moved = LIVED.now()
        with self.observer.progress("sending to the mirror", state.left_bytes or None, "bytes") as bar:
            while (
                child.poll() is None
                and LIVED.now() - moved < STALL_SECONDS
                and LIVED.now() - ending < WAIT_SECONDS
            ):
                time.sleep(POLL_SECONDS)
                before, state = state, self._state()
                if state.sent_bytes != before.sent_bytes:  # fewer after an attempt that failed
                    bar.advance(state.sent_bytes - before.sent_bytes)
                if _progress_of(state) != _progress_of(before):
                    moved = LIVED.now()

    def _state(self) -> MirrorState:
        return MirrorState.read(state_path(self.run, self.machine)) or MirrorState(self.remote.url)

    def _behind(self) -> Notice:
        state = self._state()
        newest = (
            "no checkpoint" if state.newest_step is None else f"checkpoint-{state.newest_step} at the newest"
        )
        left = (
            f"; {', '.join(state.waiting)} ({format_bytes(state.left_bytes)}) on this disk alone"
            if state.waiting
            else ""
        )
        reasons = [
            *state.refused.values(),
            *([state.error] if state.error and state.error not in state.refused.values() else []),
        ]
        why = f": {'; '.join(reasons)}" if reasons else ""
        hint = f"`fsdp-tune status {self.run.path}` shows it; the next start of the run sends the rest"
        return Notice("mirror-behind", f"the mirror {self.remote.url} has {newest}{left}{why}", hint=hint)


@contextmanager
def given_back(mirror: Mirroring | None) -> Iterator[None]:
    """Give a mirror, which `Mirroring.prepare` claims, back at the end."""
    try:
        yield
    finally:
        if mirror is not None:
            mirror.close()


def _progress_of(state: MirrorState) -> tuple[object, ...]:
    return state.sent_bytes, state.hashed_bytes, state.waiting
