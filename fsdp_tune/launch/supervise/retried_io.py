"""What a supervisor cannot look at or write at present. It ends no rank: it is tried again at the next poll,
and said once.

Permissions change, a file server is away, a ticket expires, a process runs out of descriptors or memory, a
user moves a file. The ranks notice none of that until they save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.library_errors import refusal_words

REFUSALS = (OSError, MemoryError, psutil.Error)
"""What a look raises that says nothing about the ranks."""
SETTLED_SECONDS = 5.0
"""A look that has not failed for so long works again; a file server may answer now and then."""


class Looks:
    """The looks of one launch, each by a name such as `reading metrics.jsonl`."""

    def __init__(self) -> None:
        self._failed_at: dict[str, float] = {}
        self._news: list[str] = []

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Look in the block. Whatever refuses it leaves the block and nothing else."""
        try:
            yield
        except REFUSALS as error:
            self.note(name, reason_of(error))
        else:
            self.note(name, None)

    def note(self, name: str, refusal: str | None, *, meanwhile: str = "") -> None:
        """Record how a look went; `refusal`: why it failed. `meanwhile`: what that means until it works."""
        now = LIVED.now()
        if refusal is not None:
            if name not in self._failed_at:
                self._news.append(
                    f"{name} fails: {refusal}; it is tried again{meanwhile}, and the ranks continue"
                )
            self._failed_at[name] = now
        elif name in self._failed_at and now - self._failed_at[name] >= SETTLED_SECONDS:
            del self._failed_at[name]
            self._news.append(f"{name} works again")

    def news(self) -> list[str]:
        """Return what began to fail, or works again, since the last call."""
        told, self._news = self._news, []
        return told


def reason_of(error: BaseException) -> str:
    """Describe why something could not be looked at or written, with the file if there is one."""
    words = refusal_words(error)
    if isinstance(error, OSError) and error.strerror is not None and error.filename is not None:
        return f"{error.filename}: {words}"
    return words
