"""What commands and jobs share: declared options, the base of `--json` answers, and the interface by which
long work reports progress.

Options are declared at the fields of the jobs' arguments; `cli/verbs.py` makes commands of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args, get_type_hints

from fsdp_tune.core.errors import usage_error

MergedDtype = Literal["keep", "bf16", "fp16", "fp32"]
"""Those of `core.tensors.dtypes.OF_OPTION`, which imports numpy."""
MergeCheck = Literal["quick", "full", "none"]
BaseWeights = Literal["trained", "original"]
Target = Literal["fastest", "cheapest", "largest-context"]
"""What recipes are ranked by."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a field is on the command line:
    `step: Annotated[int | None, Option("Merge the checkpoint of this step.")] = None`.

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
    """Fields of a nested group of options that a command has:
    `allowed: Annotated[Allowed, Only("remote_code")]`."""

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
            hint="give the first and the last step, as in `--profile steps=10:13`; the first steps "
            "allocate and compile, so start later",
        )
    return steps


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """A document of a command, or a part of one. docs/reference/schemas has the JSON Schema of each.

    The fields are those of the JSON; `for_` is written as `for`.
    """

    __pydantic_config__: ClassVar[dict[str, bool]] = {}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self, dict_factory=_named)


def _named(fields: list[tuple[str, object]]) -> dict[str, object]:
    return {name.rstrip("_"): value for name, value in fields}


class Bar(Protocol):
    def advance(self, n: int = 1) -> None:
        """Add `n` finished units; may be called from several threads."""
        ...


class OpenBar(Protocol):
    """Opens a bar for `total` units (None: unknown), as a context manager."""

    def __call__(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Bar]: ...
