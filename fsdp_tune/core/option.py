"""Options of the command line, declared at the fields of the jobs' arguments; `cli/verbs.py` makes commands of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from fsdp_tune.core.errors import usage_error

MergedDtype = Literal["keep", "bf16", "fp16", "fp32"]
MergeCheck = Literal["quick", "full", "none"]
BaseWeights = Literal["trained", "original"]
Target = Literal["fastest", "cheapest", "largest-context"]
"""What recipes are ranked by."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a field is on the command line: `step: Annotated[int | None, Option("Merge the checkpoint of this step.")] = None`.

    Name, type, choices (of a `Literal`) and default are those of the field.
    """

    help: str
    flags: tuple[str, ...] = ()
    """In the place of `--name-of-the-field`."""
    metavar: str | None = None
    minimum: int | None = None
    read: Callable[[Any], Any] | None = None
    """Returns the value of what was typed, which is a `typed`. Raises: usage error."""
    typed: Any = str


class Argument(Option):
    """A positional argument."""


@dataclass(frozen=True, slots=True)
class Only:
    """Fields of a nested group of options that a command has: `allowed: Annotated[Allowed, Only("remote_code")]`."""

    names: tuple[str, ...]


def declared(group: type) -> Iterator[tuple[str, Option]]:
    """Yield the options of a dataclass: name of the field and its `Option`."""
    for name, hint in get_type_hints(group, include_extras=True).items():
        yield from ((name, each) for each in get_args(hint) if isinstance(each, Option))


_WRITTEN = re.compile(r"steps=(\d+)(?::(\d+))?")


class ProfiledSteps(NamedTuple):
    """The first and the last profiled step, inclusive; steps count from 1, as in metrics.jsonl."""

    first: int
    last: int


def parse_profile(text: str) -> ProfiledSteps:
    """Parse `steps=10:13` or `steps=10`. Raises: usage error (exit 2) for anything else."""
    found = _WRITTEN.fullmatch(text.strip())
    steps = ProfiledSteps(int(found[1]), int(found[2] or found[1])) if found else None
    if steps is None or not 1 <= steps.first <= steps.last:
        raise usage_error(
            "profile-not-understood",
            f"`--profile {text}` does not name steps",
            hint="give the first and the last step, as in `--profile steps=10:13`; the first steps allocate and compile, so start later",
        )
    return steps
