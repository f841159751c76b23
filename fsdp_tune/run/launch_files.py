"""launch.json and resume.json: the launcher's input to its ranks in addition to the recipe and the data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from fsdp_tune.core.errors import usage_error
from fsdp_tune.run.document import Document

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


@dataclass(frozen=True, slots=True)
class LaunchRecord(Document):
    """launch.json: how the ranks were started. There is none for ranks that were started manually."""

    IS_PRIVATE: ClassVar[bool] = True

    started_at: float | None = None
    """Wall-clock time of the launcher."""
    profile: ProfiledSteps | None = None
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    """Why each resolved key has its value."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of the file: command and environment of the ranks, the number of ranks …"""


@dataclass(frozen=True, slots=True)
class ResumeRequest(Document):
    """resume.json: the checkpoint that this launch starts from; None for step 0."""

    resume_from: str | None = None
    digests_checked: bool = False
    """Whether the launcher has just verified the digest of every file in it."""
