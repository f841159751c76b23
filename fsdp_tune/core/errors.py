"""Problems as data: code, message, position and hint; the documented exit codes; and the errors of libraries
that become problems.

Every error that a user can cause is raised as `FsdpTuneError` with one or more `Problem`s. Any other
exception is a bug of this package. Only the command line (`cli/`) prints problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

from fsdp_tune.core.units import without_long_words


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    OUT_OF_MEMORY = 3
    NON_FINITE = 4
    LOST_RANK = 5
    NOT_COMPARABLE = 6
    INTERRUPTED = 130
    PREEMPTED = 143


class ExitReason(StrEnum):
    FINISHED = "finished"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    MAX_RUNTIME = "max_runtime"
    OUT_OF_MEMORY = "out_of_memory"
    NON_FINITE = "non_finite"
    LOST_RANK = "lost_rank"
    FAILED = "failed"


STOP_CODES = (ExitCode.INTERRUPTED, ExitCode.PREEMPTED)
"""Exit codes of a run that was asked to stop, and saved."""
EXIT_CODE_OF_REASON: dict[ExitReason, ExitCode] = {
    ExitReason.FINISHED: ExitCode.OK,
    ExitReason.PREEMPTED: ExitCode.PREEMPTED,
    ExitReason.INTERRUPTED: ExitCode.INTERRUPTED,
    ExitReason.MAX_RUNTIME: ExitCode.PREEMPTED,
    ExitReason.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    ExitReason.NON_FINITE: ExitCode.NON_FINITE,
    ExitReason.LOST_RANK: ExitCode.LOST_RANK,
    ExitReason.FAILED: ExitCode.FAILED,
}


@dataclass(frozen=True, slots=True)
class Where:
    """A position in the user's input. `line` and `column` count from 1; `source` is a path or `--set #2`."""

    source: str | None = None
    line: int | None = None
    column: int | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if self.source is not None:
            object.__setattr__(self, "source", without_long_words(self.source))

    def __str__(self) -> str:
        parts = [str(part) for part in (self.source, self.line, self.column) if part is not None]
        return ":".join(parts)


NOWHERE = Where()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `code` is a stable kebab-case name, listed in docs/reference/messages.tsv."""

    code: str
    message: str
    where: Where = NOWHERE
    hint: str | None = None
    ways_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Truncate words of thousands of characters, which a message may quote from a recipe, an argument or
        a library."""
        set_field = object.__setattr__
        set_field(self, "message", without_long_words(self.message))
        set_field(self, "hint", None if self.hint is None else without_long_words(self.hint))
        set_field(self, "ways_out", tuple(map(without_long_words, self.ways_out)))

    def as_dict(self) -> dict[str, Any]:
        hints = [*([self.hint] if self.hint else []), *self.ways_out]
        return {
            "code": self.code,
            "file": self.where.source,
            "line": self.where.line,
            "column": self.where.column,
            "key": self.where.key,
            "message": self.message,
            "hint": "; ".join(hints) or None,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Problem:
        """Create a problem from its `as_dict`, or from a rank's outcome, which stores the ways out
        separately."""
        where = Where(raw.get("file"), raw.get("line"), raw.get("column"), raw.get("key"))
        return cls(
            str(raw["code"]),
            str(raw["message"]),
            where,
            raw.get("hint"),
            tuple(map(str, raw.get("ways_out", ()))),
        )

    def at(self, where: Where) -> Problem:
        return replace(self, where=where)


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that does not stop the command (a translated spelling, an inactive key)."""

    code: str
    message: str
    where: Where = NOWHERE
    hint: str | None = None
    strict: bool = field(default=False)
    """Whether `validate --strict` treats the notice as an error."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", without_long_words(self.message))
        object.__setattr__(self, "hint", None if self.hint is None else without_long_words(self.hint))

    def as_dict(self) -> dict[str, Any]:
        return Problem(self.code, self.message, self.where, self.hint).as_dict()


class FsdpTuneError(Exception):
    """All problems found, with the exit code of the command."""

    def __init__(self, *problems: Problem, exit_code: ExitCode = ExitCode.USAGE) -> None:
        assert problems, "an error needs at least one problem"
        self.problems = problems
        self.exit_code = exit_code
        super().__init__("; ".join(problem.message for problem in problems))


class FailedError(FsdpTuneError):
    """The run or the check failed (exit 1), as opposed to an error in the user's input (exit 2)."""

    def __init__(self, *problems: Problem, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(*problems, exit_code=exit_code)


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of an error in the block to a list, so that later checks still run."""
    try:
        yield
    except FsdpTuneError as error:
        problems.extend(error.problems)


def usage_error(
    code: str,
    message: str,
    *,
    hint: str | None = None,
    where: Where = NOWHERE,
    ways_out: tuple[str, ...] = (),
) -> FsdpTuneError:
    """Return an error with one problem and exit code 2."""
    return FsdpTuneError(Problem(code, message, where, hint, ways_out))


def failed_error(
    code: str,
    message: str,
    *,
    hint: str | None = None,
    where: Where = NOWHERE,
    ways_out: tuple[str, ...] = (),
) -> FailedError:
    """Return an error with one problem and exit code 1."""
    return FailedError(Problem(code, message, where, hint, ways_out))
