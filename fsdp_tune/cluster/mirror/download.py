"""How a checkpoint in a mirror, and the files of its run, are downloaded.

A download goes into a hidden stage that an interrupted download leaves for the next one; it is verified, then
renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_tune.cluster.mirror.remote_run import (
    MirrorIdentity,
    RemoteCheckpoint,
    RemoteRun,
    for_each_file,
    run_folder,
)
from fsdp_tune.core.atomic import (
    DISK,
    STAGE_MARK,
    fsync_tree,
    needs_filling,
    publish,
    staged_directory,
    write_file,
)
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, damage, digest_file
from fsdp_tune.run.remote_requests import ContentError

RUN_FILES_PRIVATE = frozenset({"recipe.yaml", "recipe.json", "environment.json"})
Advance = Callable[[int], object]


def fetch_checkpoint(
    remote: RemoteRun, found: RemoteCheckpoint, run: RunDir, advance: Advance, *, identity: str | None = None
) -> Path:
    """Download a checkpoint into a run directory, which is created with the files of the run if there is
    none. Returns its path.

    A damaged checkpoint of the same step is replaced. `identity`: of the run, for a directory
    that is created. Raises: ContentError if the mirror's files are damaged; UrlError; OSError.
    """
    final = run.checkpoint(found.step)
    if run.is_used:
        stage = run.path / f".{final.name}{STAGE_MARK}mirror"
        _link_files(final, found.manifest, stage)
        _fill(remote, found.name, found.manifest, stage, advance)
        publish(stage, final, replace=final.exists())
        return final
    stage = _stage_of_run(run)
    built = stage / "run"
    if (built / final.name).is_dir() and not (
        stage / final.name
    ).exists():  # of a process that was killed before the last rename
        DISK.rename(built / final.name, stage / final.name)
    _fill(remote, found.name, found.manifest, stage / final.name, advance)
    DISK.mkdir(stage / run_folder(found.name))
    (stage / run_folder(found.name)).chmod(0o700)  # the recipe and the environment are private
    _fill(remote, run_folder(found.name), found.run_files, stage / run_folder(found.name), advance)
    fills = needs_filling(run.path)
    with (
        staged_directory(run.path, last=run.recipe_json.name) if fills else _built(built, run.path) as inside
    ):
        DISK.mkdir(RunDir(inside).logs)
        if identity is not None:
            MirrorIdentity(identity).write(RunDir(inside).mirror_json)
        _unpack(stage / run_folder(found.name), found.run_files, inside)
        DISK.rename(stage / final.name, inside / final.name)
    shutil.rmtree(stage, ignore_errors=True)
    return final


def _link_files(folder: Path, manifest: Manifest, stage: Path) -> None:
    """Use what this machine has of a checkpoint, whose digests are compared like those of files that an
    interrupted download left."""
    for name in manifest.files:
        if (folder / name).is_file() and not (folder / name).is_symlink() and not (stage / name).exists():
            DISK.mkdir((stage / name).parent)
            with suppress(OSError):  # a file system without links
                DISK.link(folder / name, stage / name)


@contextmanager
def _built(stage: Path, final: Path) -> Iterator[Path]:
    """Yield an empty directory and publish it, as `staged_directory`; that of a killed process is used
    again."""
    shutil.rmtree(stage, ignore_errors=True)
    DISK.mkdir(stage)
    yield stage
    fsync_tree(stage)
    publish(stage, final)


def _stage_of_run(run: RunDir) -> Path:
    """Return where a run is downloaded: next to its directory, or in it if it is a mount point."""
    folder = run.path if needs_filling(run.path) else run.path.parent
    return folder / f".{run.name}{STAGE_MARK}mirror"


def _unpack(folder: Path, manifest: Manifest, target: Path) -> None:
    for name in manifest.files:
        DISK.mkdir((target / name).parent)
        write_file(target / name, (folder / name).read_bytes(), private=name in RUN_FILES_PRIVATE)


def _fill(remote: RemoteRun, folder: str, manifest: Manifest, stage: Path, advance: Advance) -> None:
    """Download the files of a folder that the stage does not have yet, then the manifest."""
    DISK.mkdir(stage)
    if stage.is_symlink() or stage.stat().st_uid != os.geteuid():
        raise PermissionError(f"{stage} is not a directory of this user")

    def fetch(name: str) -> None:
        entry, target = manifest.files[name], stage / name
        if (
            target.is_file()
            and not target.is_symlink()
            and target.stat().st_size == entry.size_bytes
            and digest_file(target) == entry
        ):
            advance(entry.size_bytes)
            return
        DISK.mkdir(target.parent)
        if target.is_symlink():
            DISK.unlink(target)
        for is_last in (False, True):
            try:
                remote.directory.fetch(f"{folder}/{name}", target, entry, advance)
                return
            except ContentError:  # once more: the connection may have damaged it
                if is_last:
                    raise

    for_each_file(fetch, manifest.files)
    for path in [
        path
        for path in stage.rglob("*")
        if path.is_file() and path.relative_to(stage).as_posix() not in manifest.files
    ]:
        DISK.unlink(path)
    if bad := damage(stage, manifest, digests=False):
        raise ContentError(f"{stage}: {bad[0]}")
    write_file(stage / MANIFEST_NAME, manifest.to_json())
    fsync_tree(stage)


def remove_stage(run: RunDir, step: int) -> None:
    """Remove what a download of a damaged checkpoint has left."""
    for stage in (run.path / f".checkpoint-{step}{STAGE_MARK}mirror", _stage_of_run(run)):
        shutil.rmtree(stage, ignore_errors=True)
