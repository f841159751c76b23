"""Compare the files of a checkpoint with the digests of its manifest while they are copied: a shard of
another step, or flipped bits, are found before anything is published.

A tensor has parts in the files of all ranks, so the copy advances through all files at one pace. The digests
stay near it, so that a cold disk is read once: whichever comes second finds the bytes in the page cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fsdp_tune.core.errors import FailedError, Problem, Where
from fsdp_tune.merge.read.reader import advise, unreadable
from fsdp_tune.merge.weight_formats import Weights
from fsdp_tune.run.manifest import Digester, FileEntry, mark_damaged

_READ_BYTES = 256 << 10


_TURN_BYTES = 4 << 20


LEAD_BYTES = 256 << 20
"""How far the digests may be ahead of the copy."""


@dataclass(slots=True)
class _Running:
    """One file's digest, up to `position`."""

    path: Path
    digester: Digester = field(default_factory=Digester)
    position: int = 0


class ManifestCheck:
    """Compute the digests of every file that is merged, in background threads. `finish` waits and raises for
    all that differ.

    `advance` is called with the bytes of the output as they are copied, of `output_bytes` in all.
    """

    def __init__(self, weights: Sequence[Weights], threads: int, output_bytes: int) -> None:
        self._weights, self._threads, self._output_bytes = weights, threads, output_bytes
        self._expected = {path: entry for item in weights for path, entry in _expected_files(item).items()}
        self._size_bytes = sum(entry.size_bytes for entry in self._expected.values())
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")
        self._found: list[Future[dict[Path, FileEntry]]] = []
        self._changed = threading.Condition()
        self._copied_bytes = self._digested_bytes = 0
        self._is_stopped = self._is_copied = False

    def __enter__(self) -> Self:
        paths = list(self._expected)
        self._found = [
            self._pool.submit(self._digest, paths[first :: self._threads])
            for first in range(min(self._threads, len(paths)))
        ]
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def advance(self, count: int) -> None:
        with self._changed:
            self._copied_bytes += count
            self._changed.notify_all()

    def _may_continue(self) -> bool:
        near_bytes = self._copied_bytes * self._size_bytes / max(self._output_bytes, 1) + LEAD_BYTES
        return self._is_stopped or self._is_copied or self._digested_bytes <= near_bytes

    def _digest(self, paths: Sequence[Path]) -> dict[Path, FileEntry]:
        buffer = memoryview(bytearray(_READ_BYTES))
        running, found = [_Running(path) for path in paths], dict[Path, FileEntry]()
        while running:
            ended = [one for one in running if not self._turn(one, buffer)]
            found |= {one.path: one.digester.entry() for one in ended}
            running = [one for one in running if one.path not in found]
        return found

    def _turn(self, one: _Running, buffer: memoryview) -> bool:
        """Read one file further. Returns False at its end. No file stays open: a checkpoint of a thousand
        ranks has too many."""
        start = one.position
        try:
            with open(one.path, "rb", buffering=0) as file:
                file.seek(start)
                while one.position - start < _TURN_BYTES and (count := file.readinto(buffer)):
                    one.digester.update(buffer[:count])
                    one.position += count
                advise(file.fileno(), one.position, _TURN_BYTES, "WILLNEED")
        except OSError as error:
            raise unreadable(one.path, error.strerror or str(error)) from error
        with self._changed:
            self._digested_bytes += one.position - start
            self._changed.wait_for(self._may_continue)
            if self._is_stopped:
                raise CancelledError  # the merge ended before the digests
        return one.position - start >= _TURN_BYTES

    def finish(self) -> None:
        """Wait for all digests. Raises: FailedError with one problem for each file that is not what was
        saved."""
        with self._changed:
            self._is_copied = True
            self._changed.notify_all()
        found = {path: entry for future in self._found for path, entry in future.result().items()}
        differing = [path for path, entry in self._expected.items() if found[path] != entry]
        if differing:
            for checkpoint in {item.checkpoint.resolve() for item in self._weights}:
                names = [
                    path.relative_to(checkpoint).as_posix()
                    for path in differing
                    if path.is_relative_to(checkpoint)
                ]
                if names:
                    mark_damaged(checkpoint, names)
            raise FailedError(*(_digest_differs(path) for path in differing))


def _expected_files(weights: Weights) -> dict[Path, FileEntry]:
    """Return the manifest's entries under the directory of the weights."""
    if weights.manifest is None:
        return {}
    checkpoint = weights.checkpoint.resolve()
    known = {checkpoint / name: entry for name, entry in weights.manifest.files.items()}
    return {
        path: entry for path, entry in known.items() if path.is_relative_to(weights.root) and _is_weight(path)
    }


def _is_weight(path: Path) -> bool:
    return path.name == ".metadata" or path.name.endswith(
        (".distcp", ".safetensors", ".safetensors.index.json", ".bin")
    )


def _digest_differs(path: Path) -> Problem:
    return Problem(
        "merge-digest-differs",
        "its contents are not those that were saved (the digest of the manifest differs): bits have "
        "flipped, or it is of another step",
        Where(str(path)),
        "copy the file again from where it was written, or merge another checkpoint with `--step N`",
    )
