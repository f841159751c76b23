"""The cache of prepared data: one directory per content key, published atomically, built by one process at a
time."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_tune.core.atomic import DISK, STAGE_MARK, staged_directory, write_file, write_json
from fsdp_tune.core.ownership import LOCKLESS
from fsdp_tune.data.store import STORE_KIND
from fsdp_tune.run.manifest import (
    MANIFEST_NAME,
    Manifest,
    damage,
    digest,
    digest_file,
    list_files,
    read_manifest,
)

STORES = "data"
"""Folder of the stores below `data.cache_dir`."""


USE_MARK = ".use-"


Digests = Callable[[Sequence[Path]], list[str]]
"""Returns the digests of files: a start reads those alone that changed since they were last hashed."""


def content_key(parts: object) -> str:
    """Return a digest of `parts` (JSON)."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return digest(text, size=16)


def complete(path: Path, digests: Digests | None = None) -> Manifest | None:
    """Return the manifest of a complete store, or None. Compares the sizes of its files, and what `digests`
    returns for them."""
    try:
        manifest = read_manifest(path)
        if manifest is None or manifest.kind != STORE_KIND or damage(path, manifest, digests=False):
            return None
        found = digests([path / name for name in manifest.files]) if digests is not None else None
    except (ValueError, OSError):
        return None
    return manifest if found in (None, [entry.digest for entry in manifest.files.values()]) else None


def built(
    path: Path, build: Callable[[Path], dict[str, object]], digests: Digests | None = None
) -> tuple[Manifest, bool]:
    """Return the manifest of the store at `path`, and whether it existed. `build` fills a stage and returns
    the facts of the manifest.

    If two processes need the same store, the second waits and reuses the store of the first. `path` is absent
    or complete even if a process is killed at any moment.
    """
    if (manifest := complete(path, digests)) is not None:
        return manifest, True
    DISK.mkdir(path.parent)
    with alone(path) as locked:
        if (manifest := complete(path, digests)) is not None:
            return manifest, True
        if locked:
            remove_leftovers(path)
        try:
            with staged_directory(path, replace=path.exists()) as stage:
                facts = build(stage)
                files = {name: digest_file(stage / name) for name in list_files(stage)}
                manifest = Manifest(STORE_KIND, files, facts)
                write_file(stage / MANIFEST_NAME, manifest.to_json())
        except OSError:
            # On a disk without locks another process may have published the same store in the meantime.
            if (manifest := complete(path, digests)) is None:
                raise
    return manifest, False


@contextmanager
def alone(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of one store, which the process releases when it ends; yield whether the file system
    supports locks.

    Raises: BlockingIOError without `wait`, if another process holds it.
    """
    with open(path.with_name(f".{path.name}.lock"), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in LOCKLESS:
                raise
            locked = False
        else:
            locked = True
        yield locked


def remove_leftovers(path: Path) -> None:
    """Remove the stages of killed builds. The caller holds the lock, so no other process is building."""
    for leftover in path.parent.glob(f".{path.name}*{STAGE_MARK}*"):
        DISK.rmtree(leftover)


def record_use(path: Path, *, recipe: str, run: Path | None) -> None:
    """Record the use of an entry by a recipe and a run: one file for each run, and one for `prepare`. Best
    effort."""
    user = digest(str(run or ""))
    content = {"time": time.time(), "recipe": recipe, "run": str(run) if run else None}
    with suppress(OSError):  # a cache that cannot be written to can still be read
        DISK.mkdir(path.parent)
        write_json(path.with_name(f".{path.name}{USE_MARK}{user}.json"), content)
