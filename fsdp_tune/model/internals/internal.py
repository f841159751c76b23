"""An entry for a private name of a library: where it is, what needs it, and what happens in a version without
it.

A name is looked up when it is used, never at import: a run that does not use a feature does not need the
feature's names. A missing name has the fallback of its entry, or is refused with the feature and the
installed version.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, usage_error


class NoFallback(Enum):
    """Without a fallback, a missing name is refused."""

    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Internal:
    """A private name. `path` has the module before the colon, as entry points have."""

    path: str
    feature: str
    """What needs the name, as the subject of a sentence."""
    read_in: tuple[str, ...]
    """Minor versions of the library in whose source the name was read."""

    @property
    def library(self) -> str:
        return self.path.partition(":")[0].partition(".")[0]

    @property
    def last(self) -> str:
        """The name itself, without what holds it."""
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def refused(self) -> FsdpTuneError:
        """Return the error for an installed version without the name."""
        installed, newest = metadata.version(self.library), self.read_in[-1]
        older = [", ".join(self.read_in[:-1])] if len(self.read_in) > 1 else []
        return usage_error(
            "library-internal-missing",
            f"{self.feature} needs `{self.path.replace(':', '.')}`, which {self.library} {installed} does "
            f"not have; it is in {self.library} {' and '.join([*older, newest])}",
            hint=f'pip install "{self.library}=={newest}.*"',
        )

    def _owner(self) -> Any:
        module, _, names = self.path.partition(":")
        owner: object = importlib.import_module(module)
        for name in names.split(".")[:-1]:
            owner = getattr(owner, name)
        return owner


@dataclass(frozen=True, slots=True)
class Name(Internal):
    """A private name of a module or class, or a public one of a private module."""

    fallback: object = NoFallback.REFUSED

    def exists(self) -> bool:
        try:
            return hasattr(self._owner(), self.last)
        except (ImportError, AttributeError):
            return False

    def get(self) -> Any:
        """Return what has the name, or the fallback. Raises: usage error (exit 2) without either."""
        if self.exists():
            return getattr(self._owner(), self.last)
        if self.fallback is NoFallback.REFUSED:
            raise self.refused()
        return self.fallback

    def set(self, value: object) -> None:
        """Give the name another value. Raises: usage error (exit 2) if the name is refused."""
        self.get()
        setattr(self._owner(), self.last, value)

    @contextlib.contextmanager
    def replaced(self, value: object) -> Iterator[None]:
        """Give the name another value for the duration of the block. Without the name, nothing is replaced,
        unless that is refused."""
        self.get()
        if not self.exists():
            yield
            return
        owner = self._owner()
        before = vars(owner)[self.last]
        setattr(owner, self.last, value)
        try:
            yield
        finally:
            setattr(owner, self.last, before)


@dataclass(frozen=True, slots=True)
class Attribute(Internal):
    """A private attribute of objects, named by their class; many exist only on objects, once those are
    initialised."""

    fallback: Callable[[Any], Any] | NoFallback = NoFallback.REFUSED
    """The value for an object without the attribute."""

    def exists(self, owner: object) -> bool:
        return hasattr(owner, self.last)

    def of(self, owner: object) -> Any:
        """Return the attribute of an object, or the fallback. Raises: usage error (exit 2) without either."""
        if self.exists(owner):
            return getattr(owner, self.last)
        if isinstance(self.fallback, NoFallback):
            raise self.refused()
        return self.fallback(owner)

    def set(self, owner: object, value: object) -> None:
        """Set the attribute of an object that has it. Without it nothing is set, unless that is refused."""
        self.of(owner)
        if self.exists(owner):
            setattr(owner, self.last, value)


@dataclass(frozen=True, slots=True)
class Parameter(Internal):
    """A private keyword argument of a function. It has no fallback."""

    def exists(self) -> bool:
        try:
            return self.last in inspect.signature(self._owner()).parameters
        except (ImportError, AttributeError):
            return False

    def value(self, value: object) -> dict[str, Any]:
        """Return the keyword with a value, for a call. Raises: usage error (exit 2) if the function does not
        have it."""
        if not self.exists():
            raise self.refused()
        return {self.last: value}
