"""A run below a URL: which of its folders are complete, and how one becomes complete or disappears.

An object store has no rename, so a folder exists for readers from the moment its manifest.json is there,
which is written last and removed first. Before its first file and after its manifest, pending.json lists the
same files: what this tool wrote and nothing else is ever removed, also after a crash. A checkpoint needs two
folders: `checkpoint-N.run` with the files of the run that a resume reads, and `checkpoint-N`, which is
completed after it.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar

from fsdp_tune.cluster.mirror.writer import WRITERS
from fsdp_tune.core.atomic import STAGE_MARK
from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.files import is_inside
from fsdp_tune.run.directory import CHECKPOINT_KIND, CHECKPOINT_NAME, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, FileEntry, Manifest
from fsdp_tune.run.records import Document
from fsdp_tune.run.remote_files import PACKAGES, RemoteDirectory, RemoteEntry
from fsdp_tune.run.remote_requests import UrlError

PENDING_NAME = "pending.json"
"""Next to the files of a folder that is not complete: a manifest of what this tool wrote there or is about to
write."""
MISSING_NAME = "missing.json"
"""In a folder that is not complete: the names of the files that the first machine does not have, for the
other machines to send."""
IDENTITY_NAME = "mirror.json"
RUN_FILES_KIND = "fsdp-tune run files"
MODEL_KIND = "fsdp-tune model"
RUN_FILES = (
    "recipe.yaml",
    "recipe.json",
    "data.json",
    "environment.json",
    "plan.json",
    "readback.json",
    "trackers.json",
    "metrics.jsonl",
)
"""What a resume and a merge read, next to the files in `model/`. Not launch.json, which has the variables of
this machine, and no logs."""
NAME_BYTES = 255
"""Limit of file systems for one component of a path."""
PROBE = ".probe-"
PROBE_WAITS = (1.0, 2.0)
"""Seconds before the first requests of a command are repeated: the user waits for them."""


def run_folder(checkpoint: str) -> str:
    """Return the folder of the run's files that belong to a checkpoint."""
    return f"{checkpoint}.run"


@dataclass(frozen=True, slots=True)
class MirrorIdentity(Document):
    """mirror.json: under which id the mirror has this run, so that no other run is mixed with it."""

    IS_WRITTEN_AGAIN: ClassVar[bool] = False
    run: str


def read_identity(run: RunDir) -> str | None:
    """Return the id of a run in its mirror, or None if it has none yet. Raises: usage error for a damaged
    file."""
    found = MirrorIdentity.read(run.mirror_json)
    return found.run if found is not None else None


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    step: int
    manifest: Manifest
    run_files: Manifest

    @property
    def name(self) -> str:
        return f"checkpoint-{self.step}"

    @property
    def size_bytes(self) -> int:
        return self.manifest.size_bytes + self.run_files.size_bytes


Listing = Mapping[str, RemoteEntry]


class RemoteRun:
    """The copy of one run: the directory `name` below the URL of the recipe. One machine writes manifests;
    all may send files."""

    def __init__(self, url: str, name: str) -> None:
        """Connects to nothing. Raises: UrlError if a package is missing."""
        self.directory = RemoteDirectory(f"{url.rstrip('/')}/{name}")
        self.check: Callable[[], object] = lambda: None
        """Called before a folder becomes complete or incomplete, and before anything is removed; raises
        UrlError if the mirror is another command's (`Writer.check`)."""

    @property
    def url(self) -> str:
        return self.directory.url

    def probe(self) -> None:
        """Write, read and remove a small file. Raises: UrlError."""
        if not self.directory.has_place():
            raise UrlError(
                f"there is no directory {self.directory.url.rpartition('/')[0]}: is it mounted?", "absent"
            )
        name, data = f"{PROBE}{secrets.token_hex(6)}", secrets.token_bytes(64)
        self.directory.write(name, data, PROBE_WAITS)
        if self.directory.read(name) != data:
            raise UrlError("a file that was just written does not read back", "other")
        self.directory.remove(name)

    def identity(self) -> str | None:
        """Return the id of the run that is here, or None. Raises: UrlError."""
        raw = self.directory.read(IDENTITY_NAME)
        if raw is None:
            return None
        try:
            return str(json.loads(raw)["run"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UrlError(f"{IDENTITY_NAME} is damaged", "other") from None

    def claim(self, identity: str) -> None:
        self.directory.write(IDENTITY_NAME, (json.dumps({"run": identity}) + "\n").encode())

    def complete_steps(self, listing: Listing) -> list[int]:
        """Return the steps whose checkpoints have their manifests, newest first; no file is read."""
        found = (
            CHECKPOINT_NAME.fullmatch(name.partition("/")[0])
            for name in listing
            if name.endswith(f"/{MANIFEST_NAME}")
        )
        steps = {int(match[1]) for match in found if match is not None}
        return sorted(
            (step for step in steps if f"{run_folder(f'checkpoint-{step}')}/{MANIFEST_NAME}" in listing),
            reverse=True,
        )

    def usable_steps(self, listing: Listing) -> list[int]:
        """Return those of `complete_steps` whose manifests can be read, newest first. Raises: UrlError."""
        return [
            step
            for step in self.complete_steps(listing)
            if isinstance(self.checkpoint(step), RemoteCheckpoint)
        ]

    def pending_steps(self, listing: Listing) -> list[int]:
        """Return the steps of checkpoints that this tool has started or taken back, newest first. Their run's
        files come first."""
        folders = (
            name.partition("/")[0].removesuffix(run_folder(""))
            for name in listing
            if name.endswith(f"/{PENDING_NAME}")
        )
        found = (CHECKPOINT_NAME.fullmatch(folder) for folder in folders)
        steps = {int(match[1]) for match in found if match is not None}
        return sorted(steps - set(self.complete_steps(listing)), reverse=True)

    def checkpoint(self, step: int) -> RemoteCheckpoint | str:
        """Return a complete checkpoint, or why it is none. Raises: UrlError."""
        name = f"checkpoint-{step}"
        manifest = self.manifest(name, CHECKPOINT_KIND)
        run_files = self.manifest(run_folder(name), RUN_FILES_KIND)
        for found in (manifest, run_files):
            if isinstance(found, str):
                return found
        assert isinstance(manifest, Manifest)
        assert isinstance(run_files, Manifest)
        if manifest.facts.get("step") != step or run_files.facts.get("step") != step:
            return f"its manifest is of step {_shown(str(manifest.facts.get('step')))}"
        if strange := next(
            (name for name in run_files.files if name not in RUN_FILES and not name.startswith("model/")),
            None,
        ):
            return f"its run has a file that no run has, `{strange[:80]}`"
        return RemoteCheckpoint(step, manifest, run_files)

    def manifest(self, folder: str, kind: str, file: str = MANIFEST_NAME) -> Manifest | str:
        """Return the manifest of a folder, or why it has none that may be used. Raises: UrlError."""
        raw = self.directory.read(f"{folder}/{file}")
        if raw is None:
            return f"{folder} has no {file}"
        try:
            manifest = Manifest.from_json(raw)
        except ValueError as error:
            return str(error)
        return _fault(manifest, kind) or manifest

    def is_complete(self, folder: str, manifest: Manifest) -> bool:
        """Return whether a folder is complete with exactly these files."""
        return self.manifest(folder, manifest.kind) == manifest

    def begin(self, folder: str, manifest: Manifest, listing: Listing) -> None:
        """Make a folder incomplete and list what is going to be there. Files that an earlier manifest lists
        otherwise are removed."""
        self.check()
        for name, entries in sorted(self._take_back(folder, manifest.kind, listing).items()):
            # also of the same size: another machine goes by the size
            if entries != {manifest.files.get(name)}:
                self.directory.remove(f"{folder}/{name}")
        self.directory.write(f"{folder}/{PENDING_NAME}", manifest.to_json().encode())

    def finish(self, folder: str, manifest: Manifest) -> None:
        """Complete a folder whose files are there. Raises: UrlError if a file is missing or has another
        size."""
        listing = self.directory.list(folder)
        for name, entry in manifest.files.items():
            found = listing.get(f"{folder}/{name}")
            if found is None or found.size_bytes != entry.size_bytes:
                size = (
                    "missing" if found is None else f"{found.size_bytes} bytes instead of {entry.size_bytes}"
                )
                raise UrlError(f"{folder}/{name} was sent and is {size}")
        self.check()
        self.directory.write(f"{folder}/{MANIFEST_NAME}", manifest.to_json().encode())
        if not self.is_complete(folder, manifest):
            raise UrlError(f"{folder}/{MANIFEST_NAME} was written and does not read back")
        self.directory.remove(f"{folder}/{PENDING_NAME}")
        self.directory.remove(f"{folder}/{MISSING_NAME}")

    def take_back(self, step: int, listing: Listing) -> None:
        """Make a checkpoint incomplete; its files stay until a newer one is complete."""
        self.check()
        self._take_back(f"checkpoint-{step}", CHECKPOINT_KIND, listing)

    def _take_back(self, folder: str, kind: str, listing: Listing) -> dict[str, set[FileEntry | None]]:
        """Make a folder incomplete. Returns the files in it that this tool wrote, with what they may be."""
        written: dict[str, set[FileEntry | None]] = {}
        pending = self.manifest(folder, kind, PENDING_NAME) if f"{folder}/{PENDING_NAME}" in listing else ""
        if isinstance(pending, Manifest):
            written = {name: {entry} for name, entry in pending.files.items()}
        if f"{folder}/{MANIFEST_NAME}" in listing:
            manifest = self.manifest(folder, kind)
            if isinstance(manifest, str) and isinstance(pending, Manifest):
                manifest = pending
            elif isinstance(manifest, str):  # it cannot be read, and would count as the newest for ever
                manifest = Manifest(kind, {})
            for name, entry in manifest.files.items():
                written.setdefault(name, set()).add(entry)
            self.directory.write(f"{folder}/{PENDING_NAME}", manifest.to_json().encode())
            self.directory.remove(f"{folder}/{MANIFEST_NAME}")
        return written

    def remove(self, step: int, listing: Listing) -> None:
        """Remove a checkpoint: first its manifest, then the files that this tool wrote, then what lists
        them."""
        self.check()
        name = f"checkpoint-{step}"
        for folder, kind in ((name, CHECKPOINT_KIND), (run_folder(name), RUN_FILES_KIND)):
            for file in sorted(self._take_back(folder, kind, listing)):
                self.directory.remove(f"{folder}/{file}")
            self.directory.remove(f"{folder}/{MISSING_NAME}")
            self.directory.remove(f"{folder}/{PENDING_NAME}")
            self.directory.remove_empty_folders(folder)

    def remove_stages(self, listing: Listing) -> None:
        """Remove the halves of files that killed owners of the mirror leave on a disk, but not what other
        commands may be writing."""
        for name in listing:
            folder, _, file = name.rpartition("/")
            if file.startswith(".") and STAGE_MARK in file and folder != WRITERS and PROBE not in file:
                self.directory.remove(name)
                if folder:
                    self.directory.remove_empty_folders(folder)

    def remove_incomplete(self, listing: Listing, *, but: int | None) -> None:
        """Remove the checkpoints that are not complete, except that of step `but`."""
        for step in self.pending_steps(listing):
            if step != but:
                self.remove(step, listing)

    def rotate(self, keep: int | None, *, kept: Collection[int], listing: Listing) -> list[int]:
        """Remove the oldest complete checkpoints beyond `keep`, and incomplete ones that a newer complete one
        replaces.

        `kept`: steps that stay, those of the local disk. The newest complete one always stays. Returns the
        steps removed.
        """
        complete = self.usable_steps(listing)
        old = [] if keep is None else complete[max(keep, 1) :]
        left = [step for step in self.pending_steps(listing) if complete and step < complete[0]]
        gone = [step for step in (*old, *left) if step not in kept]
        for step in gone:
            self.remove(step, listing)
        for step in set(complete) - set(gone):  # of a process that was killed after it wrote the manifest
            for name in (f"checkpoint-{step}", run_folder(f"checkpoint-{step}")):
                if f"{name}/{PENDING_NAME}" in listing:
                    self.directory.remove(f"{name}/{PENDING_NAME}")
        return gone


def _fault(manifest: Manifest, kind: str) -> str | None:
    """Return why a manifest may not be used, if so."""
    if manifest.kind != kind:
        return f"its manifest is of {_shown(manifest.kind)}"
    if outside := next((name for name in manifest.files if not is_inside(name)), None):
        return f"its manifest names {_shown(outside)}, outside of the checkpoint"
    folders = {str(folder) for name in manifest.files for folder in PurePosixPath(name).parents}
    if strange := next((name for name in manifest.files if name in folders or not _is_file_name(name)), None):
        return f"its manifest names {_shown(strange)}, which is not the name of a file"
    if negative := next((name for name, entry in manifest.files.items() if entry.size_bytes < 0), None):
        return f"its manifest has a negative size of {_shown(negative)}"
    return None


def _is_file_name(name: str) -> bool:
    """Return whether a relative path has a plain name in each of its components."""
    try:
        return all(part not in ("", ".") and len(part.encode()) <= NAME_BYTES for part in name.split("/"))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _shown(name: str) -> str:
    return f"`{name[:80].encode('unicode_escape' if not name.isprintable() else 'utf-8', errors='backslashreplace').decode()}`"  # noqa: E501


def is_there(listing: Listing, name: str, entry: FileEntry) -> bool:
    found = listing.get(name)
    return found is not None and found.size_bytes == entry.size_bytes


def mirror_error(url: str, error: UrlError, where: Where | None = None) -> FsdpTuneError:
    """Return the usage error (exit 2) for a store that cannot be used at the start of a command. `where`:
    None for `checkpoint.mirror`."""
    message, named = (
        (f"it cannot be read: {error}", "the URL")
        if where
        else (f"the mirror {url} cannot be used: {error}", "`checkpoint.mirror`")
    )
    where = where or Where(key="checkpoint.mirror")
    match error.refusal:
        case "package":
            protocol = url.partition("://")[0]
            extra = {"gcs": "gs", "abfs": "az", "abfss": "az"}.get(protocol, protocol)
            hint = f"`pip install 'fsdp-tune[{extra}]'`, which brings {PACKAGES.get(protocol, 'it')}"
            return usage_error("mirror-package", message, where=where, hint=hint)
        case "absent":
            parent = url.removeprefix("file://").rpartition("/")[0]
            hint = (
                f"`mkdir -p {shlex.quote(parent)}`, mount it"
                if url.startswith("file://")
                else "create the bucket or container"
            )
            hint += f", or correct {named}"
            return usage_error("mirror-missing", message, where=where, hint=hint)
        case "clock":
            hint = (
                "set the clock of this machine (`timedatectl set-ntp true`): signed requests are valid "
                "for 15 minutes"
            )
            return usage_error("mirror-clock", message, where=where, hint=hint)
        case "full":
            return usage_error(
                "mirror-full", message, where=where, hint=f"free space there, or correct {named}"
            )
        case "credentials" | "other":
            hint = (
                "let this user list, read, write and delete there"
                if url.startswith("file://")
                else "log in as the store's own tools do (`aws configure`, AWS_PROFILE, `gcloud auth "
                "application-default login`, `az login`), with the rights to list, read, write and delete"
            )
            hint += f"; or correct {named}"
            return usage_error("mirror-refused", message, where=where, hint=hint)
        case None:
            hint = "check the network, a proxy and the endpoint (AWS_ENDPOINT_URL), then start again"
            return usage_error("mirror-unreachable", message, where=where, hint=hint)


STREAMS = 4
"""Files that are sent or downloaded at the same time."""


def for_each_file(act: Callable[[str], object], names: Iterable[str]) -> None:
    """Call `act` with each name, in their order, several at a time. After the first error none is started any
    more, and it is raised."""
    with ThreadPoolExecutor(STREAMS) as pool:
        pending = [pool.submit(act, name) for name in sorted(names)]
        try:
            for each in pending:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
