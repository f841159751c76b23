"""metrics.jsonl: one JSON object per line.

Rank 0 writes it while ranks run, the launcher between launches. It is read as it grows, even if it is truncated or replaced meanwhile. The
events among its lines are those of `run/events.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

from fsdp_tune.core.atomic import json_safe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import EVENTS, MetricsEvent


class Follower:
    """Return the new complete lines of `path` at each call of `read`, without those that existed when this was created.

    A resumed run truncates metrics.jsonl to its checkpoint, in place or by a new file of the same name; reading then continues
    after the lines that were known before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._content()
        self._identity = self._stat()
        self._offset = len(self._known)

    def read(self) -> list[dict[str, Any]]:
        identity = self._stat()
        if identity is None:
            self._identity, self._offset = None, 0
            return []
        if self._identity is not None and (identity[0] != self._identity[0] or identity[1] < self._offset):
            self._offset = _known_lines_bytes(self._known, self._content())
            self._known = b""  # rank 0 truncates once, at its start; the lines of a restarted group are returned again
        self._identity = identity
        if identity[1] == self._offset:
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        end = fresh.rfind(b"\n") + 1
        self._offset += end
        return json_objects(fresh[:end])

    def _stat(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


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

    A disk error ends the run after a save: the lines that are `unwritten` are stored in the checkpoint, and the resumed run writes
    them.
    """

    def __init__(self, run: RunDir, *, resume_step: int | None, enabled: bool) -> None:
        self._path = run.metrics_jsonl
        self._file: IO[bytes] | None = None
        self.failure: OSError | None = None
        self.unwritten: list[str] = []
        if enabled:
            self._truncate(resume_step)
            # Unbuffered: data that a full disk has refused must not be written again when the file is closed.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  open for the whole run

    def _truncate(self, resume_step: int | None) -> None:
        if not self._path.exists():
            return
        kept: list[str] = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                fields = json.loads(line)
                step, kind = fields.get("step", 0), EVENTS.get(fields.get("event"))
            except (ValueError, AttributeError):
                continue  # a line torn by a crash
            if isinstance(step, int) and step <= (resume_step or 0) and (resume_step is not None or (kind is not None and kind.is_of_run)):
                kept.append(line)
        stage = self._path.with_suffix(".jsonl.tmp")
        stage.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        stage.replace(self._path)

    def write(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._append(json.dumps(json_safe(line), allow_nan=False))

    def write_missing(self, lines: list[str]) -> None:
        """Write the lines that an earlier launch could not write, unless an attempt in between has."""
        if self._file is not None and lines:
            present = set(self._path.read_text(encoding="utf-8").splitlines())
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


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may accept only a part of it at once."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def append_event(run: RunDir, event: MetricsEvent) -> None:
    """Append an event of the launcher. Rank 0, which appends to the same file, keeps it when it truncates the file."""
    line = event.line(time.time())
    with open(run.metrics_jsonl, "a+b") as file:
        if file.tell() > 0 and not _ends_a_line(run):
            file.write(b"\n")  # a rank that was killed may have left half a line
        file.write(json.dumps(line).encode() + b"\n")


def _ends_a_line(run: RunDir) -> bool:
    with open(run.metrics_jsonl, "rb") as file:
        file.seek(-1, 2)
        return file.read() == b"\n"


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """Return the objects of metrics.jsonl, oldest first: losses, evaluations and events; [] if the file does not exist."""
    try:
        return json_objects(run.metrics_jsonl.read_bytes())
    except FileNotFoundError:
        return []


def json_objects(raw: bytes) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, without lines that are not JSON objects (torn by a crash)."""
    found: list[dict[str, Any]] = []
    for line in raw.split(b"\n"):
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(cast(dict[str, Any], value))
    return found


def seconds_in_steps(lines: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds of all steps of a run from its training lines in order: evaluations and saves excluded."""
    total, before = 0.0, 0
    for line in lines:
        total += float(line.get("step_seconds") or 0.0) * (line["step"] - before)
        before = line["step"]
    return total
