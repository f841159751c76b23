"""List the entries of the cache directory, with kind, size and last use, and remove those that no run
needs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import DISK, STAGE_MARK
from fsdp_tune.core.ownership import live_owner
from fsdp_tune.core.user_cache import COMPILED, INSPECTIONS, default_cache_directory
from fsdp_tune.data.cache import STORES, USE_MARK, alone, complete, remove_leftovers
from fsdp_tune.data.report import DataReport
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.manifest import Manifest

STARTING_SECONDS = 600.0
"""A run that has just prepared its data does not hold the lock of its directory yet, so it counts as live for
this long."""


TRACES = "traces"


_KEY = re.compile(r"[0-9a-f]{32}")
"""Names of stores, traces and inspections. A folder of the cache may hold other files, which are never
entries."""


@dataclass(frozen=True, slots=True)
class Use:
    """The last use of an entry by one run, or by `prepare`."""

    time: float
    """Wall clock, seconds."""
    recipe: str
    run: str | None

    @property
    def is_live(self) -> bool:
        """Whether the run is running, or has just started."""
        if self.run is None:
            return False
        return (
            live_owner(RunDir(Path(self.run)).lock) is not None or time.time() - self.time < STARTING_SECONDS
        )

    def __str__(self) -> str:
        return f"run {self.run}" if self.run else f"prepare of {self.recipe or 'a recipe'}"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    path: Path
    what: str
    """Description of its content."""
    size_bytes: int
    uses: tuple[Use, ...]
    """Newest first; empty if no use was recorded."""
    changed: float
    """Time of the last write; wall clock, seconds."""
    live: tuple[Use, ...]
    """Uses by runs that are running."""

    @property
    def last_used(self) -> float:
        """Time of the last use, or of the last write if no use was recorded; wall clock, seconds."""
        return self.uses[0].time if self.uses else self.changed


def list_entries(cache_dir: Path) -> list[CacheEntry]:
    """Return the entries of a cache directory, the most recently used first."""
    stores = [_store(path) for path in _store_paths(cache_dir)]
    live = tuple(use for entry in stores for use in entry.live)
    flat = [_flat(cache_dir / name, live) for name in _FLAT]
    shared = [entry for entry in (*flat, _compiled(cache_dir / COMPILED, live)) if entry is not None]
    return sorted([*stores, *shared], key=lambda entry: -entry.last_used)


_FLAT = {TRACES: "traces of `plan`", INSPECTIONS: "inspections of models"}
"""Directories of files that are one entry, and its description."""


def _flat(path: Path, live: tuple[Use, ...]) -> CacheEntry | None:
    """Return all files of a directory as one entry, which is kept while any run is `live`; None if there is
    none."""
    files = _files_of(path)
    if not files:
        return None
    return CacheEntry(path, _FLAT[path.name], sum(map(_size, files)), (), path.stat().st_mtime, live)


def _files_of(path: Path) -> list[Path]:
    return [file for file in path.glob("*.npz" if path.name == TRACES else "*") if _KEY.fullmatch(file.stem)]


def _compiled(path: Path, live: tuple[Use, ...]) -> CacheEntry | None:
    """Return Inductor's kernels as one entry; None for any directory but the default cache directory, the
    only one with kernels."""
    if path.parent.resolve() != default_cache_directory().resolve() or not path.is_dir():
        return None
    uses = _sorted_uses(path)
    return CacheEntry(
        path,
        "compiled kernels",
        _size(path),
        uses,
        path.stat().st_mtime,
        (*(use for use in uses if use.is_live), *live),
    )


def clean(
    cache_dir: Path, *, unused_seconds: float, dry_run: bool
) -> tuple[list[CacheEntry], list[tuple[CacheEntry, str]]]:
    """Remove entries unused for `unused_seconds` that no live run uses. Return the removed entries, and the
    kept ones with the reason."""
    removed: list[CacheEntry] = []
    kept: list[tuple[CacheEntry, str]] = []
    for entry in list_entries(cache_dir):
        if entry.live:
            kept.append((entry, f"in use by {entry.live[0]}"))
        elif time.time() - entry.last_used < unused_seconds:
            kept.append((entry, "used recently"))
        elif dry_run or _remove(entry):
            removed.append(entry)
        else:
            kept.append((entry, "being built"))
    return removed, kept


def _remove(entry: CacheEntry) -> bool:
    """Remove an entry and return True; return False if another process is building it."""
    path = entry.path
    if path.name in _FLAT:
        for file in _files_of(path):
            DISK.unlink(file)
        return True
    if path.name == COMPILED:
        DISK.rmtree(path)
        for use in _use_files(path):
            DISK.unlink(use)
        return True
    try:
        with alone(path, wait=False):
            remove_leftovers(path)
            if path.is_dir():
                # Rename first, so that a run that starts now finds complete data under the name, or none.
                DISK.rename(path, path.with_name(f".{path.name}.removed{STAGE_MARK}0"))
            remove_leftovers(path)
            for use in _use_files(path):
                DISK.unlink(use)
    except BlockingIOError:
        return False
    return True


def _store_paths(cache_dir: Path) -> list[Path]:
    """Return the paths of all stores, including those that have only unfinished stages."""
    folder = cache_dir / STORES
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    names |= {path.name[1:].split(".")[0] for path in folder.glob(f".*{STAGE_MARK}*")}
    return [folder / name for name in sorted(names) if _KEY.fullmatch(name)]


def _store(path: Path) -> CacheEntry:
    uses = _sorted_uses(path)
    stages = list(path.parent.glob(f".{path.name}*{STAGE_MARK}*"))
    present = [one for one in (path, *stages) if one.exists()]
    manifest = complete(path)
    what = _described(manifest) if manifest is not None else "unfinished or damaged data"
    changed = max((one.stat().st_mtime for one in present), default=0.0)
    return CacheEntry(
        path, what, sum(map(_size, present)), uses, changed, tuple(use for use in uses if use.is_live)
    )


def _described(manifest: Manifest) -> str:
    sets = DataReport.model_validate(manifest.facts["report"]).sets
    files = [Path(name).name for name in manifest.facts["files"]]
    others = f" and {len(files) - 1} more" if len(files) > 1 else ""
    rows = ", ".join(
        f"{name} {account.rows:,}"
        for name, account in sorted(sets.items(), key=lambda item: item[0] != "train")
    )
    return f"rows of {files[0]}{others}: {rows}"


def _sorted_uses(path: Path) -> tuple[Use, ...]:
    """Return the recorded uses of an entry, the newest first."""
    return tuple(sorted(_uses(path), key=lambda use: -use.time))


def _uses(path: Path) -> Iterator[Use]:
    for file in _use_files(path):
        try:
            raw: Any = json.loads(file.read_bytes())
            yield Use(float(raw["time"]), str(raw["recipe"]), raw["run"] and str(raw["run"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _use_files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f".{path.name}{USE_MARK}*.json"))


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        try:
            total += file.lstat().st_size if file.is_file() else 0
        except FileNotFoundError:  # removed meanwhile
            continue
    return total
