"""launch.json and resume.json: the launcher's input to its ranks in addition to the recipe and the data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.option import ProfiledSteps
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.document import Document


@dataclass(frozen=True, slots=True)
class LaunchRecord(Document):
    """launch.json: how the ranks were started. There is none for ranks that were started manually."""

    IS_PRIVATE: ClassVar[bool] = True

    started_at: float | None = None
    """Wall-clock time of the launcher."""
    profile: ProfiledSteps | None = None
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    """Why each resolved key has its value."""
    command: list[str] = field(default_factory=list[str])
    """Arguments of `fsdp-tune` as they were typed, with secrets masked; empty if the run was started from Python."""
    cwd: str | None = None
    """The directory in which they were typed."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of the file: `argv` and environment of the launcher, the number of ranks …"""


def train_command(run: RunDir, *options: str) -> str:
    """Return the shell command that starts the run again with `options`, which replace those that were typed.

    `…` stands for the other arguments if they are unknown: the run was started from Python or by an earlier version.
    """
    try:
        record = LaunchRecord.read(run.launch_json)
    except (OSError, FsdpTuneError):  # the command is part of a hint, and another problem is reported
        record = None
    if record is None or not record.command:
        return f"fsdp-tune train … {shlex.join(options)}"
    end = record.command.index("--") if "--" in record.command else len(record.command)
    replaced = {name for name, _ in _split(options)} | {"--overwrite", "--no-start"}
    kept = [word for name, words in _split(record.command[:end]) if name not in replaced for word in words]
    change = "" if record.cwd in (None, str(Path.cwd())) else f"cd {shlex.quote(record.cwd)} && "
    return change + shlex.join(["fsdp-tune", *kept, *options, *record.command[end:]])


def _split(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option by name with its words; the name of `--set KEY=VALUE` includes the key."""
    rest = iter(words)
    for word in rest:
        name, is_joined, value = word.partition("=")
        own = [word]
        if name in ("--set", "--resume", "--machine-rank") and not is_joined:
            own.append(value := next(rest, ""))
        yield f"{name} {value.partition('=')[0]}" if name == "--set" else name, own


@dataclass(frozen=True, slots=True)
class ResumeRequest(Document):
    """resume.json: the checkpoint that this launch starts from; None for step 0."""

    resume_from: str | None = None
    digests_checked: bool = False
    """Whether the launcher has just verified the digest of every file in it."""
    from_run: list[str] = field(default_factory=list[str])
    """Keys of the recipe whose files are gone (`recipe.read.start_inputs`). The launcher decides, since all ranks must load in one way."""
