"""Checks of a merge: of its source, of the sums of what was written, and of the model that transformers loads.

Compare the files of a checkpoint with the digests of its manifest while they are copied: a shard of another step, or flipped
bits, are found before anything is published.

A tensor has parts in the files of all ranks, so the copy advances through all files at one pace. The digests stay near it, so that a
cold disk is read once: whichever comes second finds the bytes in the page cache.

Check the output as an external reader parses it: headers, index, names, shapes, and (`full`) the bytes on the disk.

Query transformers in a child process for the model's parameter list, and load the output.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import FailedError, FsdpTuneError, Notice, Problem, Where, failed_error
from fsdp_tune.core.tensors.dtypes import Shape
from fsdp_tune.merge.copy.gather import BUFFER_BYTES
from fsdp_tune.merge.copy.write import Layout
from fsdp_tune.merge.read.reader import SourceFiles, advise, unreadable
from fsdp_tune.merge.read.stored import read_header, read_index
from fsdp_tune.merge.source import INDEX_NAME, Weights
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
    """Compute the digests of every file that is merged, in background threads. `finish` waits and raises for all that differ.

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
        self._found = [self._pool.submit(self._digest, paths[first :: self._threads]) for first in range(min(self._threads, len(paths)))]
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
        """Read one file further. Returns False at its end. No file stays open: a checkpoint of a thousand ranks has too many."""
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
        """Wait for all digests. Raises: FailedError with one problem for each file that is not what was saved."""
        with self._changed:
            self._is_copied = True
            self._changed.notify_all()
        found = {path: entry for future in self._found for path, entry in future.result().items()}
        differing = [path for path, entry in self._expected.items() if found[path] != entry]
        if differing:
            for checkpoint in {item.checkpoint.resolve() for item in self._weights}:
                names = [path.relative_to(checkpoint).as_posix() for path in differing if path.is_relative_to(checkpoint)]
                if names:
                    mark_damaged(checkpoint, names)
            raise FailedError(*(_digest_differs(path) for path in differing))


def _expected_files(weights: Weights) -> dict[Path, FileEntry]:
    """Return the manifest's entries under the directory of the weights."""
    if weights.manifest is None:
        return {}
    checkpoint = weights.checkpoint.resolve()
    known = {checkpoint / name: entry for name, entry in weights.manifest.files.items()}
    return {path: entry for path, entry in known.items() if path.is_relative_to(weights.root) and _is_weight(path)}


def _is_weight(path: Path) -> bool:
    return path.name == ".metadata" or path.name.endswith((".distcp", ".safetensors", ".safetensors.index.json", ".bin"))


def _digest_differs(path: Path) -> Problem:
    return Problem(
        "merge-digest-differs",
        "its contents are not those that were saved (the digest of the manifest differs): bits have flipped, or it is of another step",
        Where(str(path)),
        "copy the file again from where it was written, or merge another checkpoint with `--step N`",
    )


def check_headers(stage: Path, layout: Layout) -> None:
    """Raises: FailedError unless files and index hold exactly the planned tensors, with their dtypes and shapes."""
    with SourceFiles(stage) as files:
        wanted = layout.tensors
        found: dict[str, str] = {}
        for file in layout.files:
            for entry in read_header(files, file.name):
                placed = wanted.get(entry.name)
                if placed is None or entry.name in found:
                    raise _output_differs(stage / file.name, f"it holds `{entry.name}`, which the model does not have there")
                if (entry.dtype, entry.shape, entry.first_byte) != (placed.dtype.safetensors, placed.shape, placed.first_byte):
                    raise _output_differs(
                        stage / file.name,
                        f"`{entry.name}` is {entry.dtype} {list(entry.shape)} instead of {placed.dtype.safetensors} {list(placed.shape)}",
                    )
                found[entry.name] = file.name
        if missing := sorted(wanted.keys() - found.keys()):
            raise _output_differs(stage, f"`{missing[0]}` is missing ({len(missing)} in all)")
        if layout.index is not None and read_index(files) != found:
            raise _output_differs(stage / INDEX_NAME, "it and the files disagree")


def check_bytes_on_disk(stage: Path, layout: Layout, digests: Mapping[str, str], advance: Callable[[int], None]) -> None:
    """Re-read every tensor, past the page cache where the system allows it, and compare its digest."""
    for file in layout.files:
        with open(stage / file.name, "rb", buffering=0) as handle:
            os.fsync(handle.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            buffer = memoryview(bytearray(BUFFER_BYTES))
            for placed in file.tensors:
                handle.seek(placed.first_byte)
                digest, left = xxhash.xxh3_128(), placed.size_bytes
                while left and (got := handle.readinto(buffer[: min(left, BUFFER_BYTES)])):
                    digest.update(buffer[:got])
                    left -= got
                    advance(got)
                if left or digest.hexdigest() != digests[placed.name]:
                    raise _output_differs(stage / file.name, f"`{placed.name}` reads back from the disk otherwise than it was written")


def _output_differs(path: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-verify",
        f"the output is not what was planned: {why}",
        where=Where(str(path)),
        hint="merge again, to another disk; nothing was published",
    )


_SHOWN = 5
# The child needs no accelerator and no network.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class Child:
    """One run of `fsdp_tune.merge.loaded`, started at once; `answer` waits for it."""

    def __init__(self, mode: str, folder: Path) -> None:
        # -P: a `torch.py` in the current directory, which may be the checkpoint's, is not ours to run.
        command = [sys.executable, "-P", "-m", "fsdp_tune.merge.loaded", mode, str(folder.absolute())]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = children.start(command, {**os.environ, **_ENVIRONMENT}, errors="replace", **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        children.end(self._process)
        self._process.communicate()

    def answer(self) -> dict[str, Any] | str:
        """Return what the child found, or how it failed."""
        output, errors = self._process.communicate()
        lines = output.splitlines()
        if self._process.returncode == 0 and lines:
            return json.loads(lines[-1])
        return children.describe_failure(self._process.returncode, errors)


def compare_parameters(answer: dict[str, Any] | str, shapes: Mapping[str, Shape], tied: Mapping[str, str], folder: Path) -> list[Notice]:
    """Raises: FailedError unless the tensors to write are exactly the parameters of the model, with their `shapes`."""
    if isinstance(answer, str):
        return [
            Notice(
                "merge-not-compared",
                f"the model's own parameter list is not known, so nothing was compared with it: {answer}",
                Where(str(folder)),
            )
        ]
    wanted: dict[str, list[int]] = answer["parameters"]
    have = {name: list(shape) for name, shape in shapes.items()}
    restored = {name for name, source in {**answer["tied"], **tied}.items() if source in have or name in have}
    restored |= {source for name, source in answer["tied"].items() if name in have}
    ignored = [re.compile(pattern) for pattern in answer["ignored"]]
    missing = [name for name in wanted if name not in have and name not in restored and not any(rule.search(name) for rule in ignored)]
    extra = [name for name in have if name not in wanted]
    other = [f"{name} {have[name]} instead of {wanted[name]}" for name in have if name in wanted and have[name] != wanted[name]]
    found = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}"
        for names, what in ((missing, "missing"), (extra, "unknown to the model"), (other, "of another shape"))
        if names
    ]
    if found:
        raise failed_error(
            "merge-other-model",
            f"the checkpoint does not hold the parameters of this model: {'; '.join(found)}",
            where=Where(str(folder)),
            hint=_hint(extra, wanted),
        )
    return []


def _hint(extra: Sequence[str], wanted: Collection[str]) -> str:
    levels = {name.partition(".")[0] for name in extra}
    if len(levels) == 1 and all(name.partition(".")[2] in wanted for name in extra):
        return f"the unknown names are this model's with `{levels.pop()}.` before them: save the state dict of the model itself"
    return "is it the model that was trained (`--base`)? Names of torchtitan and torchtune are not transformers' (docs/guide/merging.md)"


def load_and_run(stage: Path, carried: Collection[str] = (), *, allow_nonfinite: bool) -> list[Notice]:
    """Load the output with transformers. `carried`: tensors that the model does not have.

    Raises: FailedError if transformers reports other keys, or if the logits are not finite.
    """
    with Child("forward", stage) as child:
        answer = child.answer()
    if isinstance(answer, str):
        raise _does_not_load(f"transformers does not load the output: {answer}")
    report = {
        name: [key for key in keys if name != "unexpected_keys" or not _is_carried(key, carried)] for name, keys in answer["report"].items()
    }
    if report := {name: keys for name, keys in report.items() if keys}:
        what = "; ".join(f"{name.replace('_', ' ')}: {', '.join(keys[:_SHOWN])}" for name, keys in report.items())
        raise _does_not_load(f"transformers loads the output, but reports {what}")
    if answer["finite"] is False and not allow_nonfinite:
        raise _does_not_load("the model loads, and the logits of its first tokens are not finite")
    if answer["where"] == "shapes":
        return [
            Notice(
                "merge-verified-by-shapes",
                "the model is too large for this machine's memory, so its forward pass was checked by shapes alone",
            )
        ]
    return []


def _is_carried(key: str, carried: Collection[str]) -> bool:
    """Return whether a key that transformers does not expect is of a carried tensor, or of a carried layer, whose experts it stacks."""
    layer = re.match(r".*?\.\d+\.", key)
    return key in carried or (layer is not None and any(name.startswith(layer[0]) for name in carried))


def _does_not_load(message: str) -> FsdpTuneError:
    return failed_error("merge-does-not-load", message, hint="nothing was published; `--verify quick` writes it without loading")
