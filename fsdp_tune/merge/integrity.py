"""Compares the files of a checkpoint with the digests of its manifest, in threads beside the copy: a shard of another
step, or flipped bits, are found before anything is published. The copy finds the files in the page cache, or the
other way round, so a cold disk is read once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from fsdp_tune.errors import FailedError, Problem, Where
from fsdp_tune.manifest import Digester, FileEntry
from fsdp_tune.merge.reader import unreadable
from fsdp_tune.merge.weights import Weights

_CHUNK_BYTES = 256 << 10


class _Stopped(Exception):
    """Nobody wants the answer any more."""


class ManifestCheck:
    """Digests, in the background, every file that is merged. `finish` waits and raises with all that differ."""

    def __init__(self, weights: Sequence[Weights], threads: int) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")
        self._expected: dict[Path, FileEntry] = {}
        for item in weights:
            self._expected.update(_expected_files(item))
        self._found: dict[Path, Future[FileEntry]] = {}

    def __enter__(self) -> Self:
        self._found = {path: self._pool.submit(self._digest, path) for path in self._expected}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _digest(self, path: Path) -> FileEntry:
        digester, buffer = Digester(), bytearray(_CHUNK_BYTES)
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                if self._stop.is_set():
                    raise _Stopped
                digester.update(memoryview(buffer)[:count])
        return digester.entry()

    def finish(self) -> None:
        """FailedError with one problem per file that is not what was saved."""
        differing = [path for path, found in self._found.items() if _entry(path, found) != self._expected[path]]
        if differing:
            raise FailedError(*(_differs(path) for path in differing))


def _expected_files(weights: Weights) -> dict[Path, FileEntry]:
    """The manifest's entries under the directory of the weights."""
    if weights.manifest is None:
        return {}
    checkpoint = weights.checkpoint.resolve()
    known = {checkpoint / name: entry for name, entry in weights.manifest.files.items()}
    return {path: entry for path, entry in known.items() if path.is_relative_to(weights.root) and _is_weight(path)}


def _is_weight(path: Path) -> bool:
    return path.name == ".metadata" or path.name.endswith((".distcp", ".safetensors", ".safetensors.index.json", ".bin"))


def _entry(path: Path, found: Future[FileEntry]) -> FileEntry:
    try:
        return found.result()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def _differs(path: Path) -> Problem:
    return Problem(
        "merge-digest-differs",
        "its contents are not those that were saved (the digest of the manifest differs): bits have flipped, or it is of another step",
        Where(str(path)),
        "copy it anew from where it was written, or merge another checkpoint with `--step N`",
    )
