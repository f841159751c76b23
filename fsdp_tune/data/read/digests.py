"""Digests of source files, stored so that an unchanged file is not read again at each start.

A digest is reused while the file has the size, modification time, status change time and inode that it had when it was
hashed. Programs that write a file and then restore its modification time (rsync, tar) cannot restore the status change time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.run.manifest import digest_file

DIGESTS = "digests"
"""Folder below `data.cache_dir`: one JSON file for each directory that holds source files."""
SETTLED_SECONDS = 2.0
"""Resolution of file times. A file that changed less than this before it was hashed could change again without a new time."""

Stamp = tuple[int, int, int, int]


def stamp(path: Path) -> Stamp:
    """Size in bytes, modification time and status change time in nanoseconds, inode: changes whenever the file is written to."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


class FileDigests:
    """Digests of files, from stored records where a file is unchanged. `verify` hashes every file."""

    def __init__(self, cache_dir: Path, *, verify: bool = False) -> None:
        self._folder = cache_dir / DIGESTS
        self._verify = verify

    def __call__(self, paths: Sequence[Path]) -> list[str]:
        by_directory: dict[Path, list[Path]] = {}
        for path in paths:
            by_directory.setdefault(path.absolute().parent, []).append(path)
        found: dict[Path, str] = {}
        for directory, files in by_directory.items():
            found |= self._of_directory(directory, files)
        return [found[path] for path in paths]

    def _of_directory(self, directory: Path, paths: list[Path]) -> dict[Path, str]:
        record = self._folder / f"{hashlib.blake2b(str(directory).encode(), digest_size=16).hexdigest()}.json"
        remembered = _read(record)
        found: dict[Path, str] = {}
        changed = False
        for path in paths:
            known = remembered.get(path.name)
            before, started = stamp(path), time.time()
            if not self._verify and known is not None and known[:4] == list(before):
                found[path] = str(known[4])
                continue
            found[path] = digest_file(path).digest
            settled = max(before[1], before[2]) < (started - SETTLED_SECONDS) * 1e9
            entry = [*before, found[path]]
            if settled and stamp(path) == before and known != entry:
                remembered[path.name] = entry
                changed = True
        if changed:
            _remember(record, {"directory": str(directory), "files": remembered})
        return found


def _read(record: Path) -> dict[str, list[Any]]:
    """Return entries by file name: the four numbers of a stamp, and the digest. Unreadable records are ignored."""
    try:
        files = json.loads(record.read_bytes())["files"]
        return {str(name): entry for name, entry in files.items() if len(entry) == 5 and isinstance(entry[4], str)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _remember(record: Path, content: dict[str, Any]) -> None:
    """Store a record. Best effort: if the cache cannot be written (full, read-only), the next start hashes the files again."""
    try:
        DISK.mkdir(record.parent)
        write_json(record, content)
    except OSError:
        pass
