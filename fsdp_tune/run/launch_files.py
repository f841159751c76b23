"""launch.json and resume.json: the launcher's input to its ranks in addition to the recipe and the data."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.command import ProfiledSteps
from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.files import read_regular, working_directory
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Document


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
    """Arguments of `fsdp-tune` as they were typed, with secrets masked; empty if the run was started from
    Python."""
    cwd: str | None = None
    """The directory in which they were typed."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of the file: `argv` and environment of the launcher, the number of ranks …"""
    boot: str = ""
    """Id of the boot of the first machine in which the launcher was started."""
    boot_seconds: float = 0.0
    """Seconds from that boot to the start. A change of the date does not matter to them."""
    recipes: list[str] = field(default_factory=list[str])
    """Digests (`RunDir.recipe_digest`) of the recipe.json of this start, and of the one that it replaces."""


def read_recipe_json(run: RunDir) -> bytes:
    """Return recipe.json as the last start wrote it. Raises: OSError; usage error if launch.json has other
    digests of it."""
    content = read_regular(run.recipe_json)
    try:
        record = LaunchRecord.read(run.launch_json)
    except FsdpTuneError:
        record = None  # damaged itself; each command that uses it refuses it
    if record is not None and record.recipes and run.recipe_digest() not in record.recipes:
        raise usage_error(
            "run-unreadable",
            "it is not what the last start of the run wrote (digest differs)",
            where=Where(str(run.recipe_json)),
            ways_out=(
                f"restore it, for example from {run.history} if the recipe was not changed since",
                "`fsdp-tune train RECIPE --overwrite` starts over",
            ),
        )
    return content


def train_command(run: RunDir, *options: str) -> str:
    """Return the shell command that starts the run again with `options`, which replace those that were typed.

    `…` stands for the other arguments if they are unknown: the run was started from Python or by an earlier
    version.
    """
    try:
        record = LaunchRecord.read(run.launch_json)
    except (OSError, FsdpTuneError):  # the command is part of a hint, and another problem is reported
        record = None
    if record is None or not record.command:
        return f"fsdp-tune train … {shlex.join(options)}"
    end = record.command.index("--") if "--" in record.command else len(record.command)
    # the run has its rows
    replaced = {name for name, _ in _split(options)} | {
        "--overwrite",
        "--no-start",
        "--skip-rows",
    }
    kept = [word for name, words in _split(record.command[:end]) if name not in replaced for word in words]
    change = "" if record.cwd in (None, str(working_directory())) else f"cd {shlex.quote(record.cwd)} && "
    return change + shlex.join(["fsdp-tune", *kept, *options, *record.command[end:]])


def _split(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option by name with its words; the name of `--set KEY=VALUE` includes the key."""
    rest = iter(words)
    for word in rest:
        name, is_joined, value = word.partition("=")
        own = [word]
        if name in ("--set", "--resume", "--machine-rank", "--skip-rows") and not is_joined:
            own.append(value := next(rest, ""))
        yield f"{name} {value.partition('=')[0]}" if name == "--set" else name, own


@dataclass(frozen=True, slots=True)
class ResumeRequest(Document):
    """resume.json: the checkpoint that this launch starts from; None for step 0."""

    resume_from: str | None = None
    digests_checked: bool = False
    """Whether the launcher has just verified the digest of every file in it."""
    from_run: list[str] = field(default_factory=list[str])
    """Keys of the recipe whose files are gone (`recipe.references`). The launcher decides, since all ranks
    must load in one way."""
    ends_at: int | None = None
    """The step of `resume_from`, if the run has ended there, and ranks only bring its weights to the first
    machine."""
    saves: bool = True
    """False: no checkpoint is written. What `plan --measure` trains is removed when its steps are
    measured."""


def disk_refusal(run: RunDir) -> str | None:
    """Return why the disk refuses a file of the size of a heartbeat in a run's logs; None if it accepts one,
    or if the logs are gone."""
    probe = run.logs / f"write-probe-{os.getpid()}"
    try:
        if not run.logs.is_dir():
            return None
        write_file(probe, "can this directory be written?\n" * 32, private=True)  # the size of a heartbeat
        DISK.unlink(probe)
    except OSError as error:
        return f"{run.logs} cannot be written ({error.strerror})"
    return None
