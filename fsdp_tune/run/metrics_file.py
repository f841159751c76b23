"""metrics.jsonl: one JSON object per line.

Rank 0 writes it while ranks run; the command appends its events, mostly between launches. It is read as it
grows, even if it is truncated or replaced meanwhile. The events among its lines are those of `run/events.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from pydantic_core import from_json

from fsdp_tune.core.atomic import json_safe
from fsdp_tune.core.files import LINE_BYTES, lines_of, open_regular, read_regular, refuse_larger
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import EVENTS, EarlyStopped
from fsdp_tune.run.metrics_event import MetricsEvent

METRICS_BYTES = 1 << 30
"""Limit of a metrics.jsonl that is read from its start; a line has half a KiB."""
TAIL_BYTES = 128
"""Of the last line that was read, by which a rewritten file is recognised: lines contain their time."""


class Follower:
    """Return the new complete lines of `path` at each call of `read`, without those that existed when this
    was created.

    A resumed run truncates metrics.jsonl to its checkpoint, in place or by a new file of the same name;
    reading then continues after the lines that were known before. A call reads at most `LINE_BYTES`, and one
    that raises OSError or MemoryError can be made again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._content()
        self._identity = self._stat()
        self._offset = len(self._known)
        self._end = self._known[-TAIL_BYTES:]

    def read(self) -> list[dict[str, Any]]:
        identity = self._stat()
        if identity is None:
            self._identity, self._offset, self._end = None, 0, b""
            return []
        if self._identity is not None and not self._is_continued(identity):
            content = self._content()
            self._offset = _known_lines_bytes(self._known, content)
            self._known = content[: self._offset]
            self._end = self._known[-TAIL_BYTES:]
        self._identity = identity
        if identity[1] == self._offset:
            return []
        with open_regular(self._path) as file:
            file.seek(self._offset)
            fresh = file.read(LINE_BYTES)
        end = fresh.rfind(b"\n") + 1 or (len(fresh) if len(fresh) == LINE_BYTES else 0)
        found = json_objects(fresh[:end])  # first: without memory for them, they are read again
        self._end = (self._end + fresh[:end])[-TAIL_BYTES:]
        self._offset += end
        return found

    def _is_continued(self, identity: tuple[int, int]) -> bool:
        """Return whether the file is the one that was read: a file system gives the number of a file that is
        gone to the next one."""
        if self._identity is None or identity[0] != self._identity[0] or identity[1] < self._offset:
            return False
        if identity[1] == self._identity[1]:
            return True
        with open_regular(self._path) as file:
            return _has_before(file, self._offset, self._end)

    def _stat(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size

    def _content(self) -> bytes:
        try:
            return read_regular(self._path, most_bytes=METRICS_BYTES)
        except FileNotFoundError:
            return b""


def _has_before(file: IO[bytes], offset: int, end: bytes) -> bool:
    """Return whether the bytes before an offset are the `end` of what was read."""
    file.seek(offset - len(end))
    return file.read(len(end)) == end


def _known_lines_bytes(old: bytes, new: bytes) -> int:
    """Return the length of the longest prefix of `new` whose lines are all in `old`."""
    known = set(old.splitlines(keepends=True))
    length = 0
    for line in new.splitlines(keepends=True):
        if line not in known or not line.endswith(b"\n"):
            break
        length += len(line)
    return length


class MetricsFile:
    """Append lines; on resume, truncate the file to the checkpoint's step so that each step occurs once.

    A disk error ends the run after a save: the lines that are `unwritten` are stored in the checkpoint, and
    the resumed run writes them.
    """

    def __init__(self, run: RunDir, *, resume_step: int | None, enabled: bool) -> None:
        self._path = run.metrics_jsonl
        self._file: IO[bytes] | None = None
        self.failure: OSError | None = None
        self.unwritten: list[str] = []
        if enabled:
            if self._path.exists():
                self._rewrite(lambda line: _is_before(line, resume_step))
            self._open()

    def _open(self) -> None:
        # Unbuffered: data that a full disk has refused must not be written again when the file is closed.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  open for the whole run

    def _rewrite(self, is_kept: Callable[[dict[str, Any]], bool]) -> bool:
        """Replace the file by one with the lines that are kept. A line that a crash has torn is left out.
        Returns whether the file is another one."""
        stage = self._path.with_suffix(".jsonl.tmp")
        with open_regular(self._path) as old:
            refuse_larger(self._path, os.fstat(old.fileno()).st_size, METRICS_BYTES)
            before = old.read().decode(errors="replace")
            kept = "".join(
                f"{line}\n"
                for line in before.splitlines()
                for value in _objects([line.encode()])
                if is_kept(value)
            )
            if kept == before:
                return False
            stage.write_text(kept, encoding="utf-8")
            stage.replace(self._path)
            late = old.read()  # an event of the command, appended meanwhile
        if late:
            with open(self._path, "ab") as file:
                file.write(late)
        return True

    def remove_evaluation(self, step: int) -> None:
        """Remove what an evaluation of `step` has written, if there was one: a resumed run that evaluates the
        step of its checkpoint may be the second to do so. Raises: OSError."""
        if self._file is not None and self.failure is None:
            before = self._file
            if self._rewrite(lambda line: line.get("step") != step or not _is_of_evaluation(line)):
                self._open()
                before.close()

    def write(self, line: Mapping[str, object]) -> None:
        if self._file is not None:
            self._append(json.dumps(json_safe(line), allow_nan=False))

    def write_missing(self, lines: list[str]) -> None:
        """Write the lines that an earlier launch could not write, unless an attempt in between has."""
        if self._file is not None and lines:
            present = set(read_regular(self._path, most_bytes=METRICS_BYTES).decode().splitlines())
            for line in lines:
                if line not in present:
                    self._append(line)

    def _append(self, line: str) -> None:
        assert self._file is not None
        if self.failure is None:
            try:
                _write_all(self._file, f"{line}\n".encode())
                return
            except OSError as error:
                self.failure = error
        self.unwritten.append(line)

    def event(self, event: MetricsEvent) -> None:
        self.write(event.line(time.time()))

    def close(self) -> None:
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                self._file.close()
            except OSError as error:
                self.failure = self.failure or error
            self._file = None


def _is_before(line: Mapping[str, Any], resume_step: int | None) -> bool:
    """Return whether a run that starts from the checkpoint of `resume_step` (None: from the base) has it."""
    step, kind = line.get("step", 0), EVENTS.get(str(line.get("event")))
    if not isinstance(step, int) or step > (resume_step or 0):
        return False
    return resume_step is not None or (kind is not None and kind.is_of_run)


def _is_of_evaluation(line: Mapping[str, Any]) -> bool:
    return "eval_loss" in line or line.get("event") == EarlyStopped.name


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may accept only a part of it at once."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def append_event(run: RunDir, event: MetricsEvent) -> None:
    """Append an event of the launcher. Rank 0, which appends to the same file, keeps it when it truncates the
    file.

    Raises: OSError. A part that the disk took is removed, so that the call can be made again.
    """
    text = json.dumps(json_safe(event.line(time.time())), allow_nan=False)
    with open(run.metrics_jsonl, "a+b", buffering=0) as file:
        before = written = file.seek(0, os.SEEK_END)
        # a rank that was killed may have left half a line
        start = "" if before == 0 or _ends_a_line(run) else "\n"
        rest = memoryview(f"{start}{text}\n".encode())
        try:
            while rest:
                count = file.write(rest)
                rest, written = rest[count:], written + count
        except OSError:
            if os.fstat(file.fileno()).st_size == written:  # rank 0 has written nothing since
                file.truncate(before)
            raise


def _ends_a_line(run: RunDir) -> bool:
    with open_regular(run.metrics_jsonl) as file:
        file.seek(-1, 2)
        return file.read() == b"\n"


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """Return the objects of metrics.jsonl, oldest first: losses, evaluations and events; [] if the file does
    not exist.

    Raises: usage error `run-unreadable` if it is not a regular file or above `METRICS_BYTES`.
    """
    try:
        refuse_larger(run.metrics_jsonl, run.metrics_jsonl.stat().st_size, METRICS_BYTES)
        return list(_objects(lines_of(run.metrics_jsonl)))
    except FileNotFoundError:
        return []


def metrics_with(path: Path, marker: bytes) -> list[dict[str, Any]]:
    """Return the objects of the lines of metrics.jsonl that contain `marker`; of a file above
    `METRICS_BYTES / 4` those at its end."""
    try:
        return list(_objects(lines_of(path, last_bytes=METRICS_BYTES // 4, marker=marker)))
    except FileNotFoundError:
        return []


class MetricsReader:
    """Read metrics.jsonl again and again, each time only what was appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._end = b""

    def read(self) -> tuple[Iterator[dict[str, Any]], bool]:
        """Return the objects of the new complete lines, and whether they replace those of earlier calls: the
        file is new, another one or gone, or was cut or rewritten.

        The lines are read as the iterator is consumed (a list of 100,000 would take 150 MB): consume it
        before the next call, which begins after the last line that was taken. Raises: usage error
        `run-unreadable`, OSError; the iterator raises OSError.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            was_read = self._offset > 0
            self._offset, self._end = 0, b""
            return iter(()), was_read
        try:
            status = os.fstat(file.fileno())
            refuse_larger(self._path, status.st_size, METRICS_BYTES)
            is_same = (
                status.st_ino == self._inode
                and status.st_size >= self._offset
                and _has_before(file, self._offset, self._end)
            )
        except BaseException:
            file.close()
            raise
        if not is_same:
            self._inode, self._offset, self._end = int(status.st_ino), 0, b""
        return _objects(self._new_lines(file)), not is_same

    def _new_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        with file:
            file.seek(self._offset)
            while line := file.readline(LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                    return  # it is being written
                self._offset += len(line)
                self._end = line[-TAIL_BYTES:]
                yield line


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, object]]:
    for line in lines:
        value = _parsed(line)
        if isinstance(value, dict):
            yield cast(dict[str, object], value)


def _parsed(line: bytes) -> object:
    """Return the value of a line; None for one that is not JSON (torn by a crash)."""
    try:
        return from_json(line)  # a quarter of the time of `json.loads`, which accepts more
    except ValueError:
        pass
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def json_objects(raw: bytes) -> list[dict[str, object]]:
    """Return the objects of a JSON Lines file, without lines that are not JSON objects (torn by a crash)."""
    return list(_objects(raw.split(b"\n")))


def seconds_in_steps(lines: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds of all steps of a run from its training lines in order: evaluations and saves
    excluded."""
    total, before = 0.0, 0
    for line in lines:
        total += float(line.get("step_seconds") or 0.0) * (line["step"] - before)
        before = line["step"]
    return total
