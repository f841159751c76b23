"""The steps that `train --profile` asks for: how they are written, and how ranks learn of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdp_tune.core.errors import usage_error
from fsdp_tune.run.directory import RunDir

_WRITTEN = re.compile(r"steps=(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """Both are recorded; steps count from 1, as in metrics.jsonl."""

    first: int
    last: int


def parse_profile(text: str) -> ProfiledSteps:
    """`steps=10:13` or `steps=10`; FsdpTuneError (exit 2) for anything else."""
    found = _WRITTEN.fullmatch(text.strip())
    steps = ProfiledSteps(int(found[1]), int(found[2] or found[1])) if found else None
    if steps is None or not 1 <= steps.first <= steps.last:
        raise usage_error(
            "profile-not-understood",
            f"--profile {text}: this names no steps",
            hint="write the first and the last step, as in `--profile steps=10:13`; the first steps allocate and compile, so begin later",
        )
    return steps


def profile_of(run: RunDir) -> ProfiledSteps | None:
    asked = run.launch().get("profile")
    return ProfiledSteps(*asked) if asked else None
