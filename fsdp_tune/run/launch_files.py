"""launch.json and resume.json: the launcher's input to its ranks in addition to the recipe and the data."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.errors import usage_error
from fsdp_tune.run.directory import Checkpoint, RunDir

_WRITTEN = re.compile(r"steps=(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
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
class LaunchRecord:
    """launch.json: how the ranks were started; defaults for ranks that were started manually."""

    started_at: float | None = None
    """Wall-clock time of the launcher."""
    profile: ProfiledSteps | None = None

    @classmethod
    def read(cls, run: RunDir) -> LaunchRecord:
        try:
            raw: dict[str, Any] = json.loads(run.launch_json.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        return cls(raw.get("started_at"), ProfiledSteps(*raw["profile"]) if raw.get("profile") else None)


def write_launch(run: RunDir, plan: Mapping[str, Any], reasons: Mapping[str, str], profile: ProfiledSteps | None) -> None:
    """Write launch.json. `plan`: command, environment and ranks, for `status`. `reasons`: why each resolved key has its value."""
    profiled = [profile.first, profile.last] if profile else None
    write_json(run.launch_json, {**plan, "started_at": time.time(), "reasons": dict(reasons), "profile": profiled}, private=True)


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """resume.json: the checkpoint that this launch starts from; None for step 0."""

    checkpoint: str | None = None
    digests_checked: bool = False
    """Whether the launcher has just verified the digest of every file in it."""

    @classmethod
    def read(cls, run: RunDir) -> ResumeRequest:
        try:
            raw: dict[str, Any] = json.loads(run.resume_json.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        return cls(raw.get("resume_from"), bool(raw.get("digests_checked", False)))


def write_resume(run: RunDir, checkpoint: Checkpoint | None, *, digests_checked: bool) -> None:
    """Write resume.json, which the ranks of the next launch read."""
    write_json(run.resume_json, {"resume_from": str(checkpoint.path) if checkpoint else None, "digests_checked": digests_checked})
