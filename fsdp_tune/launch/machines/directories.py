"""Where machines read each other's files: a shared directory, or their own with what the first one serves."""

from __future__ import annotations

import hashlib
import io
import shutil
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.errors import Problem
from fsdp_tune.core.files import is_inside
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.machines.store import ARCHIVE, ARCHIVE_BYTES, LARGEST_ARCHIVE_BYTES
from fsdp_tune.run.directory import Held, RunDir, held_checkpoints
from fsdp_tune.run.manifest import MANIFEST_NAME, digest, list_files

READ_SECONDS = 0.2
"""Time between two looks at the documents, which are in memory."""


VISIBLE_SECONDS = 90.0
"""Limit for files of the first machine to appear in a shared directory: NFS caches the absence of a name for
up to a minute."""


ARCHIVE_SECONDS = 600.0
"""Limit for the archive with them to arrive on a machine with a directory of its own."""


Offered = Callable[[], "dict[str, str] | None"]
"""Returns what the first machine offers at present."""


class SharedDirectory:
    """The run directory of machines that see the same one."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def offer(self) -> dict[str, str]:
        """Return digests of the files of a run that its ranks read at the start, of those that are there."""
        found: dict[str, str] = {}
        for path in (
            self._run.recipe_json,
            self._run.data_json,
            self._run.launch_json,
            self._run.resume_json,
        ):
            with suppress(OSError):
                found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return found

    def take(self, machine: int, offered: Offered) -> Problem | None:
        """Wait until the files that ranks read are those of the first machine."""
        deadline = time.monotonic() + VISIBLE_SECONDS
        while True:
            theirs, mine = offered(), self.offer()
            if theirs is None or theirs == mine:
                return None
            if time.monotonic() > deadline:
                break
            time.sleep(READ_SECONDS)
        name = next(name for name in (*theirs, *mine) if theirs.get(name) != mine.get(name))
        how = "is not there" if name not in mine else "is another one"
        message = (
            f"machine {machine} does not see the run directory of machine 0: {self._run.path / name} {how}"
        )
        hint = (
            "`output_dir` must be one directory that all machines see; `launch.shared_directory: false` "
            "gives each machine its own"
        )
        return Problem("run-directory-not-shared", message, hint=hint)

    def held(self, progress: Callable[[int], object], *, compares: bool = True) -> tuple[Held, ...] | None:  # noqa: ARG002
        """Return None: what is here is not of this machine alone. The arguments are those of
        `OwnDirectory`."""
        return None


class OwnDirectory:
    """The run directory of this machine, if each has its own (`launch.shared_directory: false`).

    The first machine sends the small files that decide the run through the channel, as an archive.
    """

    def __init__(
        self,
        run: RunDir,
        folder: Path,
        *,
        digests: bool,
        install: Callable[[RunDir], Problem | None] | None = None,
    ) -> None:
        """`folder`: where the channel finds or leaves archives. `digests`: compare those of checkpoints.
        `install`: write this machine's files from those of the first, on a machine other than that."""
        self._run, self._folder, self._digests, self._install = run, folder, digests, install
        self._installed: str | None = None
        """Name of the archive from which the files here are."""

    def offer(self) -> dict[str, str]:
        """Make an archive of the files of the run for the other machines. Returns how the channel names
        it."""
        names = [
            "recipe.yaml",
            "recipe.json",
            "data.json",
            "launch.json",
            "resume.json",
            "plan.json",
            "environment.json",
        ]
        names += [f"model/{name}" for name in [*list_files(self._run.model), MANIFEST_NAME]]
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                if (self._run.path / name).exists():
                    archive.writestr(
                        zipfile.ZipInfo(name), (self._run.path / name).read_bytes(), zipfile.ZIP_DEFLATED
                    )
        raw = buffer.getvalue()
        name = digest(raw, size=16)
        write_file(self._folder / name, raw, private=True)
        return {ARCHIVE: name, ARCHIVE_BYTES: str(len(raw))}

    def take(self, machine: int, offered: Offered) -> Problem | None:
        """Wait for the archive of the first machine, and write this machine's files from it."""
        deadline = time.monotonic() + ARCHIVE_SECONDS
        while time.monotonic() < deadline:
            theirs = offered()
            if theirs is None:
                return None
            name = str(theirs.get(ARCHIVE))
            if name == self._installed:
                return None
            if ARCHIVE in theirs and (self._folder / name).exists():
                problem = self._unpack(self._folder / name)
                self._installed = name if problem is None else None
                return problem
            time.sleep(READ_SECONDS)
        message = (
            f"machine {machine} has not received the files of the run within "
            f"{format_seconds(ARCHIVE_SECONDS)}"
        )
        return Problem("run-files-missing", message, hint="see the network between the machines")

    def _unpack(self, path: Path) -> Problem | None:
        assert self._install is not None, "only the first machine installs nothing"
        raw = path.read_bytes()
        received = RunDir(self._folder / "received")
        shutil.rmtree(received.path, ignore_errors=True)
        try:
            if digest(raw, size=16) != path.name:
                raise ValueError("its digest differs")
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                if sum(sizes := [info.file_size for info in archive.infolist()]) > LARGEST_ARCHIVE_BYTES:
                    raise ValueError(f"its {len(sizes):,} files have {sum(sizes):,} bytes")
                for name in archive.namelist():
                    if not is_inside(name) or not name.removeprefix("model/"):
                        raise ValueError(f"it has a file {name[:80]!r}")
                    target = received.path / name
                    DISK.mkdir(target.parent)
                    # `archive.read` unpacks a whole file before it compares sizes
                    with archive.open(name) as file:
                        write_file(target, file.read(LARGEST_ARCHIVE_BYTES), private=True)
        except (ValueError, zipfile.BadZipFile) as error:
            return Problem(
                "run-files-missing", f"the files of the run that machine 0 has sent are damaged: {error}"
            )
        return self._install(received)

    def held(self, progress: Callable[[int], object], *, compares: bool = True) -> tuple[Held, ...] | None:
        """Return what this machine has of each checkpoint. `compares`: digests, if the recipe wants that."""
        return tuple(held_checkpoints(self._run, digests=self._digests and compares, progress=progress))
