"""Sends the folders of one run from one machine, and writes how far it is."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from fsdp_tune.cluster.mirror.remote_run import (
    MISSING_NAME,
    MODEL_KIND,
    PENDING_NAME,
    RUN_FILES_KIND,
    RemoteRun,
    for_each_file,
    is_there,
    read_identity,
    run_folder,
)
from fsdp_tune.cluster.mirror.sent_contents import as_content_errors, read_run_files
from fsdp_tune.cluster.mirror.sent_files import SentFiles
from fsdp_tune.cluster.mirror.writer import MirrorInUseError, Writer
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.files import is_inside
from fsdp_tune.core.secrets import mask_text
from fsdp_tune.run.directory import CHECKPOINT_KIND, MERGE_RECORD, RunDir, best_so_far, checkpoint_step
from fsdp_tune.run.events import Mirrored, MirrorFailed
from fsdp_tune.run.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    digest_data,
    digest_file,
    list_files,
    read_manifest,
)
from fsdp_tune.run.metrics_event import MetricsEvent
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.run.mirror_state import MirrorState, state_path
from fsdp_tune.run.remote_files import Verified
from fsdp_tune.run.remote_requests import ContentError, UrlError
from fsdp_tune.run.written_files import require_unchanged_output

POLL_SECONDS = 1.0
OTHERS_SECONDS = 600.0
"""Limit for the other machines to send more of the files that the first one misses."""
NEWER_SECONDS = 60.0
"""The same if a newer checkpoint is complete: the machine that has them may be lost."""
PINS = ".mirror"
"""Folder of the run with hard links to the checkpoint that is being sent, so that a rotation does not remove
its files."""


class Sender:
    """Sends the folders of one run from one machine."""

    def __init__(
        self,
        run: RunDir,
        remote: RemoteRun,
        *,
        machine: int = 0,
        has_others: bool = False,
        keep: int | None = None,
        claim: str | None = None,
    ) -> None:
        """`claim`: that of the command, `Writer.key`; None if it has not tried. Machines other than the first
        have none."""
        self._has_others = has_others
        self._writer = Writer(remote.directory, run.path)
        if claim is not None:
            self._writer.adopt(claim)
        if machine == 0:
            remote.check = self._writer.check
        self._run, self._remote, self._machine, self._keep = run, remote, machine, keep
        self._ledger = SentFiles(run.logs / f"mirror-{machine:02d}.sent.jsonl")
        self._state = MirrorState(url=remote.url, pid=os.getpid())
        self._lock = threading.Lock()
        self._written_at = 0.0
        self._done: dict[str, tuple[int, int] | None] = {}
        """Identity of the file that completes a local folder, for those that the mirror has or that are
        damaged."""
        self._refused: dict[str, str] = {}
        self._verified: set[Verified] = set()
        """How the files of the folder that is being sent were compared."""
        self._there: set[str] = set()
        """Checkpoints that were complete in the mirror when it was opened: they are compared again, and are
        not reported as missing."""
        self._note()

    def open(self, start_step: int | None) -> None:
        """Take back checkpoints of steps that the run trains again, and remove what a killed process left.
        Raises: UrlError."""
        self._claim()
        shutil.rmtree(self._run.path / PINS, ignore_errors=True)
        own, there = read_identity(self._run), self._remote.identity()
        if there is None and own is not None:
            self._remote.claim(own)
        elif there != own:
            raise UrlError(f"{self._remote.url} has the checkpoints of another run", "other")
        listing = self._remote.directory.list()
        self._remote.remove_stages(listing)
        steps = self._remote.complete_steps(listing)
        later = (
            []
            if start_step is None
            else [step for step in steps if step > start_step and not self._run.checkpoint(step).is_dir()]
        )
        for step in later:
            self._remote.take_back(step, listing)
        self._there = {f"checkpoint-{step}" for step in steps if step not in later}
        self._note(
            newest_step=next((step for step in self._remote.usable_steps(listing) if step not in later), None)
        )

    def _claim(self) -> None:
        """Own the mirror from now on. Raises: UrlError while another command does."""
        if self._writer.is_owner:
            return
        try:
            self._writer.claim()
        except MirrorInUseError as error:
            raise UrlError(f"{self._remote.url} is in use: {error}", "other") from error

    def close(self) -> None:
        """Give the mirror back, unless the claim is the command's."""
        self._writer.release()

    def waiting(self) -> list[str]:
        """Return the names of the local folders that the mirror does not have: the newest checkpoint first,
        models last."""
        found: list[tuple[int, str]] = []
        for path in self._run.path.glob(f"checkpoint-*/{MANIFEST_NAME}"):
            if (step := checkpoint_step(path.parent)) is not None:
                found.append((-step, path.parent.name))
        folders = (self._run.merged, self._run.merged_quantised, self._run.adapter)
        models = [(1, folder.name) for folder in folders if (folder / MERGE_RECORD).is_file()]
        return [name for _, name in sorted([*found, *models]) if self._done.get(name) != self._identity(name)]

    def send(self, name: str) -> None:
        """Send one folder. Raises: UrlError, OSError; ContentError for a local folder that is damaged."""
        identity, started = self._identity(name), time.monotonic()
        self._verified.clear()
        step = checkpoint_step(Path(name))
        try:
            with self._pinned(self._run.path / name) as folder:
                size_bytes = (
                    self._send_model(name, folder) if step is None else self._send_checkpoint(step, folder)
                )
        except (ContentError, FileNotFoundError) as error:
            if self._identity(name) != identity:  # replaced or rotated meanwhile
                return
            self._done[name] = identity
            self._refused[name] = f"{name} is damaged on this disk and is not sent: {error}"
            raise ContentError(self._refused[name]) from error
        except UrlError as error:
            if error.refusal == "full":  # parts of older checkpoints would keep a newer one out
                self._remote.remove_incomplete(self._remote.directory.list(), but=step)
            raise
        self._done[name] = identity
        self._refused.pop(name, None)
        if size_bytes:
            self._event(
                Mirrored(
                    step or 0,
                    name,
                    time.monotonic() - started,
                    size_bytes,
                    " and ".join(sorted(self._verified)) or None,
                )
            )

    def _send_model(self, name: str, folder: Path) -> int:
        with as_content_errors(name):
            require_unchanged_output(folder)
        files = {file: digest_file(folder / file, self._hashed) for file in list_files(folder)}
        return self._send_folder(name, Manifest(MODEL_KIND, files), folder)

    def _send_checkpoint(self, step: int, folder: Path) -> int:
        """Send a checkpoint and the files of its run, and rotate. Returns the bytes sent now."""
        name, sent = folder.name, 0
        try:
            manifest = read_manifest(folder)
        except ValueError as error:
            raise ContentError(str(error)) from error
        if manifest is None or manifest.kind != CHECKPOINT_KIND or manifest.facts.get("step") != step:
            raise ContentError("it is not a complete checkpoint")
        there = self._remote.checkpoint(step)
        if isinstance(there, str) or there.manifest != manifest:
            sent = self._send_run_files(step) + self._send_folder(name, manifest, folder)
        listing = self._remote.directory.list()
        local = {
            each
            for path in self._run.path.glob("checkpoint-*")
            if (each := checkpoint_step(path)) is not None
        }
        best = best_so_far(folder)
        self._remote.rotate(
            self._keep, kept=local | {step} | ({best.step} if best is not None else set()), listing=listing
        )
        self._note(newest_step=next(iter(self._remote.usable_steps(listing)), None))
        return sent

    def _send_run_files(self, step: int) -> int:
        with as_content_errors("model"):
            contents, private = read_run_files(self._run)
        manifest = Manifest(
            RUN_FILES_KIND, {file: digest_data(data) for file, data in contents.items()}, {"step": step}
        )
        folder = run_folder(f"checkpoint-{step}")
        self._remote.begin(folder, manifest, self._remote.directory.list(folder))
        for name, data in contents.items():
            self._remote.directory.write_verified(f"{folder}/{name}", data, private=name in private)
            self._advance(len(data))
        self._remote.finish(folder, manifest)
        return manifest.size_bytes

    def _send_folder(self, name: str, manifest: Manifest, folder: Path) -> int:
        """Send the files of a folder and complete it. Returns the bytes sent now."""
        if self._remote.is_complete(name, manifest):
            return 0
        self._remote.begin(name, manifest, self._remote.directory.list(name))
        listing = self._remote.directory.list(name)
        left = {
            file: entry
            for file, entry in manifest.files.items()
            if not self._ledger.has(listing, f"{name}/{file}", entry)
        }
        here = {file: entry for file, entry in left.items() if is_inside(file) and (folder / file).is_file()}
        missing = sorted(left.keys() - here.keys())
        if missing and not self._has_others:
            raise ContentError(f"{missing[0]} is missing")
        self._send_files(name, folder, here, self._writer.check)
        if missing:
            self._wait_for_others(name, manifest, missing)
        self._remote.finish(name, manifest)
        return sum(entry.size_bytes for entry in here.values())

    def _send_files(
        self, name: str, folder: Path, files: dict[str, FileEntry], check: Callable[[], object]
    ) -> None:
        def send(file: str) -> None:
            remote = f"{name}/{file}"
            self._verified.add(
                self._remote.directory.send(folder / file, remote, files[file], self._advance, check)
            )
            if (found := self._remote.directory.entry(remote)) is not None:
                self._ledger.add(remote, files[file], found.stamp)

        for_each_file(send, files)

    def _wait_for_others(self, name: str, manifest: Manifest, missing: list[str]) -> None:
        self._remote.directory.write(f"{name}/{MISSING_NAME}", json.dumps(missing).encode())
        seen, seen_at = -1, time.monotonic()
        while True:
            listing = self._remote.directory.list(name)
            if all(is_there(listing, f"{name}/{file}", manifest.files[file]) for file in missing):
                return
            if (there := len(listing)) != seen:
                seen, seen_at = there, time.monotonic()
            if time.monotonic() - seen_at > (
                OTHERS_SECONDS if self.waiting()[:1] == [name] else NEWER_SECONDS
            ):
                raise UrlError(
                    f"{len(missing)} files of {name} are on no machine that sends to the mirror, "
                    f"such as {missing[0]}"
                )
            time.sleep(POLL_SECONDS)

    def send_missing(self) -> bool:
        """Send the files that the first machine misses and this one has. Returns whether there was one.
        Raises: UrlError, OSError."""
        listing, is_found = self._remote.directory.list(), False
        for marker in [name for name in listing if name.endswith(f"/{MISSING_NAME}")]:
            folder = marker.partition("/")[0]
            manifest = self._remote.manifest(folder, CHECKPOINT_KIND, PENDING_NAME)
            raw = self._remote.directory.read(marker)
            if raw is None or not isinstance(manifest, Manifest):
                continue
            wanted = _listed(marker, raw) & manifest.files.keys()
            here = {
                file: manifest.files[file] for file in wanted if (self._run.path / folder / file).is_file()
            }
            left = {
                file: entry
                for file, entry in here.items()
                if not is_there(listing, f"{folder}/{file}", entry)
            }
            self._send_files(
                folder,
                self._run.path / folder,
                left,
                lambda folder=folder, manifest=manifest: self._require(folder, manifest),
            )
            is_found = is_found or bool(left)
        return is_found

    def has_newest(self) -> bool:
        """Return whether the mirror has the newest checkpoint of which this machine has a part. Raises:
        UrlError."""
        for name in self.waiting():
            try:
                manifest = read_manifest(self._run.path / name)
            except (OSError, ValueError):  # rotated or damaged: the one before it counts
                continue
            return manifest is None or self._remote.is_complete(name, manifest)
        return True

    def _require(self, folder: str, pending: Manifest) -> None:
        """Raises: UrlError if the first machine does not wait for these files any more."""
        if self._remote.manifest(folder, CHECKPOINT_KIND, PENDING_NAME) != pending:
            raise UrlError(f"{folder} is not what the first machine sends any more", "other")

    def _identity(self, name: str) -> tuple[int, int] | None:
        marker = MERGE_RECORD if checkpoint_step(Path(name)) is None else MANIFEST_NAME
        try:
            status = (self._run.path / name / marker).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    @contextmanager
    def _pinned(self, folder: Path) -> Iterator[Path]:
        """Yield a copy of a folder made of hard links; the folder itself where the file system has none."""
        pin = self._run.path / PINS / folder.name
        try:
            for path in folder.rglob("*"):
                if path.is_file():
                    target = pin / path.relative_to(folder)
                    DISK.mkdir(target.parent)
                    DISK.link(path, target)
            used = pin
        except OSError:
            shutil.rmtree(pin, ignore_errors=True)
            used = folder
        try:
            yield used
        finally:
            shutil.rmtree(self._run.path / PINS, ignore_errors=True)

    def failed(self, error: Exception) -> None:
        """Note a failure. The first of a series is an event, as is each damaged folder."""
        text = mask_text(str(error))
        is_damage = isinstance(error, ContentError)
        if self._state.failed_since is None or is_damage:
            self._event(
                MirrorFailed(
                    self._state.newest_step or 0, text if is_damage else f"{self._remote.url}: {text}"
                )
            )
        if self._state.failed_since is None:
            self._note(failed_since=time.time())
        self._note(error=text, is_refused=isinstance(error, UrlError) and error.refusal is not None)

    def note_progress(self, waiting: list[str]) -> None:
        waiting = [name for name in waiting if name not in self._there]
        self._note(waiting=waiting, left_bytes=sum(_size_bytes(self._run.path / name) for name in waiting))

    def succeeded(self) -> None:
        self._note(error=None, is_refused=False, failed_since=None, refused=self.refused())

    def refused(self) -> dict[str, str]:
        """Return the local folders that are damaged and not in the mirror, with the reason."""
        return {
            name: reason
            for name, reason in self._refused.items()
            if self._done.get(name) == self._identity(name)
        }

    def _hashed(self, count: int) -> None:
        self._count(hashed_bytes=count)

    def _advance(self, count: int) -> None:
        self._count(sent_bytes=count)

    def _count(self, **bytes_more: int) -> None:
        with self._lock:
            self._state = replace(
                self._state,
                **{name: getattr(self._state, name) + count for name, count in bytes_more.items()},
            )
            is_due = time.monotonic() - self._written_at > POLL_SECONDS
        if is_due:
            self._note()

    def _note(self, **changes: object) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)
            self._written_at = time.monotonic()
            with suppress(OSError):
                self._state.write(state_path(self._run, self._machine))

    def _event(self, event: MetricsEvent) -> None:
        with suppress(OSError):
            append_event(self._run, event)


def _size_bytes(folder: Path) -> int:
    """Return the size of the files in a folder; 0 if a rotation removes it meanwhile."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except FileNotFoundError:
        return 0


def _listed(name: str, raw: bytes) -> set[str]:
    """Return the names in a missing.json. Raises: UrlError if it is damaged."""
    try:
        found: object = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise UrlError(f"{name} is damaged", "other")
    return {str(file) for file in cast("list[object]", found)}
