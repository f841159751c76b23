"""Which files a machine has sent to the mirror, over several commands."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

from fsdp_tune.cluster.mirror.remote_run import Listing, is_there
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.files import read_regular
from fsdp_tune.run.manifest import FileEntry


class SentFiles:
    """Which files were sent: appended to a file of the run, so that a later command does not send them again.

    A file counts as sent while the mirror has it with the size and stamp that it had after it was sent.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._sent: dict[str, tuple[str, str]] = {}
        with suppress(OSError, ValueError, TypeError):
            for line in read_regular(path).decode().splitlines():
                name, digest, stamp = json.loads(line)
                self._sent[str(name)] = (str(digest), str(stamp))

    def has(self, listing: Listing, name: str, entry: FileEntry) -> bool:
        found = listing.get(name)
        is_known = (
            found is not None and found.stamp != "" and self._sent.get(name) == (entry.digest, found.stamp)
        )
        return is_known and is_there(listing, name, entry)

    def add(self, name: str, entry: FileEntry, stamp: str) -> None:
        with self._lock:
            self._sent[name] = (entry.digest, stamp)
            with suppress(OSError), DISK.open_private(self._path, "ab") as file:
                DISK.write(file, (json.dumps([name, entry.digest, stamp]) + "\n").encode())
