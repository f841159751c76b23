"""The claim of the one command that writes to a mirror, on stores that have neither locks nor renames.

Claims are the files `writers/00000001.json`, …. A command claims a mirror by creating the next number on
condition that there is no such file, which succeeds for exactly one of several; the highest number is in
force, and nothing is decided by removing or replacing a file. The owner rewrites its file every few seconds,
and looks for a higher number before it completes a file, writes a manifest or removes anything.

An owner has ended if it recorded that, if its process would be visible here and is not, if it was an earlier
command of this process, or if its process is not visible here and its file stays as it is for
`SILENCE_SECONDS`. That is measured by the clock of the store against itself, or by waiting; the clocks of the
machines are not compared.

Not excluded: a request of an owner that was silent for so long and is executed after it was taken over (a
suspended machine), a store that ignores conditions and two commands that start within seconds. Each file that
is damaged so is found by its digest when it is downloaded.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fsdp_tune.core.ownership import Owner, is_running, parse_owner, this_owner
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import NoConditionalWritesError, UrlError

WRITERS = "writers"
BEAT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
POLL_SECONDS = 2.0
SETTLE_SECONDS = 3.0
"""After a claim without a condition, until it is read back."""
RELEASE_SECONDS = 5.0
"""The longest that the end of a command waits for a request of its claim."""
_KEPT: set[str] = set()
"""Ids of the claims that writers of this process keep."""
_NAME = re.compile(rf"{WRITERS}/(\d{{8}})\.json")


@dataclass(frozen=True, slots=True)
class WriterRecord:
    """A file of `writers/`."""

    owner: Owner
    run: str
    """The run directory on the owner's machine."""
    beat: int = 0
    """Counts the times that the owner has written the file."""
    has_ended: bool = False

    def to_json(self) -> bytes:
        return (
            json.dumps(
                {**asdict(self.owner), "run": self.run, "beat": self.beat, "has_ended": self.has_ended}
            )
            + "\n"
        ).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> WriterRecord | None:
        """Return the record in a file, or None if it is damaged."""
        owner = parse_owner(raw)
        if owner is None:
            return None
        fields = json.loads(raw)
        try:
            beat = int(fields.get("beat") or 0)
        except (ValueError, TypeError, OverflowError):
            return None
        return cls(owner, str(fields.get("run")), beat, fields.get("has_ended") is True)

    def __str__(self) -> str:
        return f"{self.owner} (run {self.run})"


class MirrorInUseError(Exception):
    """Another command writes to the mirror, or may do so."""

    def __init__(self, record: WriterRecord | None, *, is_certain: bool) -> None:
        super().__init__(f"{record or 'another command'} writes to it")
        self.record = record
        """None if it cannot be read."""
        self.is_certain = is_certain
        """Whether the other one certainly lives. If not, the same call may succeed within
        `SILENCE_SECONDS`."""


@dataclass(frozen=True, slots=True)
class _Sighting:
    """What another claim was when it was first seen so, by the monotonic clock of this process."""

    contents: bytes | None
    number: int
    seconds: float


class Writer:
    """The claim of this command on a mirror; until `claim` or `adopt` has succeeded, it owns nothing."""

    def __init__(self, directory: RemoteDirectory, run: Path) -> None:
        self._directory = directory
        self._record = WriterRecord(this_owner(), str(run.absolute()))
        self._number: int | None = None
        self._is_lost = False
        self._is_away = False
        self._seen: _Sighting | None = None
        self._ended = threading.Event()
        self._beats: threading.Thread | None = None

    @property
    def is_owner(self) -> bool:
        """Whether the mirror has been claimed; `check` finds out whether it still is."""
        return self._number is not None

    @property
    def key(self) -> str:
        """Return what another process of this command passes to `adopt`."""
        return f"{self._number or 0}:{self._record.owner.claim}"

    def adopt(self, key: str) -> None:
        """Write under the claim of the process that started this one, which keeps it, or claim in its place
        if it has not succeeded."""
        number, _, claim = key.partition(":")
        self._number = int(number) or None
        self._record = replace(self._record, owner=replace(self._record.owner, claim=claim))

    def claim(self) -> WriterRecord | None:
        """Claim the mirror and keep it. Returns the record of an owner that ended without giving it back.

        Raises: MirrorInUseError, UrlError. Calls after an uncertain `MirrorInUseError` succeed once the other
        owner has been silent.
        """
        numbers, taken = self._numbers(), None
        if number := max(numbers, default=0):
            raw = self._directory.read(_name(number))
            other = WriterRecord.from_json(raw) if raw is not None else None
            # whose answer was lost
            is_own = other is not None and other.owner.claim == self._record.owner.claim
            if not is_own and (other is None or not other.has_ended):
                self._require_dead(number, raw, other)
                taken = other
        if not self._create(number + 1):
            time.sleep(SETTLE_SECONDS)
            if not self._is_mine(number + 1):
                raise MirrorInUseError(None, is_certain=False)
        self._number = number + 1
        _KEPT.add(self._record.owner.claim)
        for old in numbers:
            with suppress(UrlError):
                self._directory.remove(_name(old))
        self._beats = threading.Thread(target=self._keep, daemon=True)
        self._beats.start()
        return taken

    def claim_patiently(self, waits_for: Callable[[WriterRecord | None], object]) -> WriterRecord | None:
        """Claim the mirror; `waits_for` is called once if it takes a while to see whether an owner lives.
        Raises as `claim`."""
        is_waiting = False
        while True:
            try:
                return self.claim()
            except MirrorInUseError as error:
                if error.is_certain:
                    raise
                if not is_waiting:
                    waits_for(error.record)
                    is_waiting = True
                time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raises: UrlError if the mirror is not this command's any more, or if the store does not respond."""
        number = self._number
        if number is None:
            raise UrlError("another command may write to it", "other")
        if not self._is_lost:
            highest = max(self._numbers(), default=0)
            if not highest and not self._is_mine(number):  # someone has emptied the mirror
                with suppress(MirrorInUseError):  # another command was faster
                    self._create(number)
            self._is_lost = (highest or number) != number or not self._is_mine(number)
        if self._is_lost:
            raise UrlError(
                "another command has taken it over, since this one was silent for a minute", "other"
            )

    def release(self) -> None:
        """Stop writing, and record it. Does nothing without a claim of its own; a store that does not respond
        is left as it is."""
        self._ended.set()
        if self._beats is not None:
            self._beats.join(RELEASE_SECONDS)
            if not self._beats.is_alive() and not self._is_away:
                with suppress(OSError):
                    self._write(has_ended=True)
            self._beats = None
        self._number = None
        _KEPT.discard(self._record.owner.claim)

    def _keep(self) -> None:
        while not self._is_lost and not self._ended.wait(BEAT_SECONDS):
            try:
                self._write()
                self._is_away = False
            except OSError:
                self._is_away = True

    def _write(self, *, has_ended: bool = False) -> None:
        assert self._number is not None
        self.check()
        self._record = replace(self._record, beat=self._record.beat + 1, has_ended=has_ended)
        self._directory.write(_name(self._number), self._record.to_json(), ())

    def _create(self, number: int) -> bool:
        """Create a claim. Returns whether the store made sure that there was none. Raises: MirrorInUseError,
        UrlError."""
        data = self._record.to_json()
        try:
            if self._directory.create(_name(number), data) or self._is_mine(number):  # its answer was lost
                return True
        except NoConditionalWritesError:
            self._directory.write(_name(number), data)
            return False
        raise MirrorInUseError(None, is_certain=False)

    def _is_mine(self, number: int) -> bool:
        raw = self._directory.read(_name(number))
        record = WriterRecord.from_json(raw) if raw is not None else None
        return record is not None and record.owner.claim == self._record.owner.claim

    def _require_dead(self, number: int, raw: bytes | None, other: WriterRecord | None) -> None:
        """Raises: MirrorInUseError unless the owner of claim `number` has ended. `raw`: its file. `other`:
        the record in it, if it has one.

        It has ended if its process would be visible here and is not; if it is a command of this process that
        has released its claim, which the store may not have recorded; or if its process would not be visible
        here and the file has stayed the same for `SILENCE_SECONDS`.
        """
        if (
            other is not None
            and self._record.owner.is_same_process(other.owner)
            and other.owner.claim not in _KEPT
        ):
            return
        runs = is_running(other.owner) if other is not None else None
        if runs:
            raise MirrorInUseError(other, is_certain=True)
        if runs is False:
            return
        now = time.monotonic()
        if self._seen is None or self._seen.number != number:
            self._seen = _Sighting(raw, number, now - self._age(number))
        elif self._seen.contents != raw:
            self._seen = _Sighting(raw, number, now)
            raise MirrorInUseError(other, is_certain=True)
        if now - self._seen.seconds < SILENCE_SECONDS:
            raise MirrorInUseError(other, is_certain=False)

    def _age(self, number: int) -> float:
        """Return the seconds since a claim was written: by the clock of the store, which stamps another file
        for it now."""
        probe = f"{WRITERS}/{self._record.owner.claim}.clock"
        self._directory.write(probe, b"")
        now, written = self._directory.modified(probe), self._directory.modified(_name(number))
        self._directory.remove(probe)
        return max(0.0, now - written) if now is not None and written is not None else 0.0

    def _numbers(self) -> list[int]:
        return sorted(
            int(match[1]) for name in self._directory.list(WRITERS) if (match := _NAME.fullmatch(name))
        )


def _name(number: int) -> str:
    return f"{WRITERS}/{number:08d}.json"
