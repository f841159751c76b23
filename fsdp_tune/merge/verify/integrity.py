"""Compares the files of a checkpoint with the digests of its manifest, in threads beside the copy: a shard of another
step, or flipped bits, are found before anything is published.

A tensor lies in the files of all ranks, so the copy goes through all of them at the same pace. So do the digests, near
the copy: a cold disk is read once, and whoever comes second finds the bytes in the page cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from fsdp_tune.core.errors import FailedError, Problem, Where
from fsdp_tune.merge.formats.page_cache import PageCache
from fsdp_tune.merge.formats.reader import unreadable, will_need
from fsdp_tune.merge.weights import Weights
from fsdp_tune.run.manifest import Digester, FileEntry, mark_damaged

_READ_BYTES = 256 << 10
_TURN_BYTES = 4 << 20


class _Stopped(Exception):
    """Nobody wants the answer any more."""


@dataclass(slots=True)
class _Running:
    """One file's digest, up to `position`."""

    path: Path
    digester: Digester = field(default_factory=Digester)
    position: int = 0


class ManifestCheck:
    """Digests, in the background, every file that is merged. `finish` waits and raises with all that differ."""

    def __init__(self, weights: Sequence[Weights], threads: int, pages: PageCache) -> None:
        self._weights = weights
        self._pages = pages
        self._stop = threading.Event()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")
        self._expected: dict[Path, FileEntry] = {}
        for item in weights:
            self._expected.update(_expected_files(item))
        self._found: list[Future[dict[Path, FileEntry]]] = []

    def __enter__(self) -> Self:
        paths = list(self._expected)
        self._found = [self._pool.submit(self._digest, paths[first :: self._threads]) for first in range(min(self._threads, len(paths)))]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._pages.copy_ended()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _digest(self, paths: Sequence[Path]) -> dict[Path, FileEntry]:
        buffer = memoryview(bytearray(_READ_BYTES))
        running, found = [_Running(path) for path in paths], dict[Path, FileEntry]()
        while running:
            ended = [one for one in running if not self._turn(one, buffer)]
            found |= {one.path: one.digester.entry() for one in ended}
            running = [one for one in running if one.path not in found]
        return found

    def _turn(self, one: _Running, buffer: memoryview) -> bool:
        """Reads on for a while. False at the end of the file. No file stays open: a checkpoint of a thousand ranks has too many."""
        start = one.position
        try:
            with open(one.path, "rb", buffering=0) as file:
                self._pages.opened(one.path, file.fileno(), is_read_twice=True)
                file.seek(start)
                while count := file.readinto(buffer):
                    if self._stop.is_set():
                        raise _Stopped
                    one.digester.update(buffer[:count])
                    one.position += count
                    if one.position - start >= _TURN_BYTES:
                        will_need(file.fileno(), one.position, _TURN_BYTES)
                        break
                self._pages.digested(one.path, file.fileno(), one.position, one.position - start)
        except OSError as error:
            raise unreadable(one.path, error.strerror or str(error)) from error
        return one.position - start >= _TURN_BYTES

    def finish(self) -> None:
        """FailedError with one problem per file that is not what was saved."""
        self._pages.copy_ended()
        found = {path: entry for future in self._found for path, entry in future.result().items()}
        differing = [path for path, entry in self._expected.items() if found[path] != entry]
        if differing:
            for checkpoint in {item.checkpoint.resolve() for item in self._weights}:
                names = [path.relative_to(checkpoint).as_posix() for path in differing if path.is_relative_to(checkpoint)]
                if names:
                    mark_damaged(checkpoint, names)
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


def _differs(path: Path) -> Problem:
    return Problem(
        "merge-digest-differs",
        "its contents are not those that were saved (the digest of the manifest differs): bits have flipped, or it is of another step",
        Where(str(path)),
        "copy the file again from where it was written, or merge another checkpoint with `--step N`",
    )
