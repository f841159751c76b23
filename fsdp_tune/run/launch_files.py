"""Files that launcher and ranks exchange.

launch.json and resume.json: the launcher's input to its ranks in addition to the recipe and the data.

Files in logs/: of each rank a heartbeat while it runs and an outcome when it ends, and the verdict on the launch.

What a command and ranks that start before their run directory exists exchange, in a private temporary directory.

`train` starts the ranks while it still checks its inputs, so that they import the libraries meanwhile. They wait for `opened`, which the
command writes when the run directory is complete. Nothing of a run that is refused is on the disk afterwards.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.command import JsonAnswer, ProfiledSteps
from fsdp_tune.core.devices import GpuState
from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.core.files import read_regular
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
    """Arguments of `fsdp-tune` as they were typed, with secrets masked; empty if the run was started from Python."""
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
    """Return recipe.json as the last start wrote it. Raises: OSError; usage error if launch.json has other digests of it."""
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

    `…` stands for the other arguments if they are unknown: the run was started from Python or by an earlier version.
    """
    try:
        record = LaunchRecord.read(run.launch_json)
    except (OSError, FsdpTuneError):  # the command is part of a hint, and another problem is reported
        record = None
    if record is None or not record.command:
        return f"fsdp-tune train … {shlex.join(options)}"
    end = record.command.index("--") if "--" in record.command else len(record.command)
    replaced = {name for name, _ in _split(options)} | {"--overwrite", "--no-start", "--skip-rows"}  # the run has its rows
    kept = [word for name, words in _split(record.command[:end]) if name not in replaced for word in words]
    change = "" if record.cwd in (None, str(Path.cwd())) else f"cd {shlex.quote(record.cwd)} && "
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
    """Keys of the recipe whose files are gone (`recipe.references`). The launcher decides, since all ranks must load in one way."""
    ends_at: int | None = None
    """The step of `resume_from`, if the run has ended there, and ranks only bring its weights to the first machine."""


STOPPED = (ExitReason.PREEMPTED, ExitReason.INTERRUPTED, ExitReason.MAX_RUNTIME)
ECHO_CODES = frozenset({"lost-rank", "machine-failed"})
"""Codes of ranks and machines that only report the failure of another."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective in the flight recorder: the current one of a rank, or else its last."""

    name: str
    number: int
    """In its group."""
    group: str
    ended: bool
    entered: dict[str, int]
    """The last number that the rank entered, by group."""


@dataclass(frozen=True, slots=True)
class Heartbeat(Document):
    rank: int
    pid: int
    step: int
    phase: str
    time: float
    """Wall-clock time of the rank, used only to distinguish one write of the file from the next."""
    progressed_at: float
    """Monotonic time of its machine when the rank last made progress."""
    silent_seconds: float
    """Seconds since then when the file was written."""
    collective: Collective | None = None
    """Once the rank hangs."""
    done: int = 0
    """Finished batches of the phase, where the rank counts them: in an evaluation."""
    planned: int = 0
    """Batches of the phase; 0: not counted."""
    launch: str = ""
    """The launch that the rank belongs to (`LAUNCH_VARIABLE`)."""
    began_at: float = 0.0
    """Wall-clock time at which the rank started."""


@dataclass(frozen=True, slots=True)
class RankState(Document):
    """Where one rank is. Everything but the rank may be unknown: a rank that hangs early has written no heartbeat."""

    rank: int
    step: int | None = None
    phase: str | None = None
    state: str | None = None
    """Why its process cannot run, or None."""
    waits_in: str | None = None
    at: str | None = None
    collective: Collective | None = None

    def __str__(self) -> str:
        parts = ["before its first heartbeat" if self.phase is None else f"step {self.step}, `{self.phase}`"]
        if self.state is not None:
            parts.append(self.state)
        if self.at is not None and (self.state is not None or self.waits_in is None):
            parts.append(f"at {self.at}")
        return f"rank {self.rank} ({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Outcome(Document):
    """Exit code and reason of a rank, and the problem that ended it. The last file that a rank writes."""

    IS_PRIVATE: ClassVar[bool] = True

    exit_code: int
    reason: ExitReason
    problem: Problem | None = None
    traceback: str | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of the file: loss, eval_loss, tokens …"""
    rank: int = 0
    step: int = 0
    time: float = 0.0
    launch: str = ""
    """The launch that the rank belonged to (`LAUNCH_VARIABLE`)."""

    def as_dict(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "rank": self.rank,
            "exit_code": int(self.exit_code),
            "exit_reason": self.reason.value,
            "step": self.step,
            "time": self.time,
            "launch": self.launch,
            "problem": {**problem.as_dict(), "hint": problem.hint, "ways_out": problem.ways_out} if problem else None,
            "traceback": self.traceback,
            **self.facts,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Outcome:
        facts = dict(raw)
        rank, code, reason, step, ended_at = (facts.pop(name) for name in ("rank", "exit_code", "exit_reason", "step", "time"))
        problem = Problem.from_dict(found) if (found := facts.pop("problem", None)) else None
        trace, launch = facts.pop("traceback", None), str(facts.pop("launch", ""))
        return cls(int(code), ExitReason(reason), problem, trace, facts, int(rank), int(step or 0), float(ended_at), launch)


@dataclass(frozen=True, slots=True)
class Verdict(Document):
    """How a launch ended, as its supervisor judged; killed ranks write no outcome of their own."""

    IS_PRIVATE: ClassVar[bool] = True

    exit_code: ExitCode
    reason: ExitReason
    step: int
    problem: Problem | None = None
    first_outcome: Outcome | None = None
    """Outcome of the first rank of this machine, with the loss and counts of the run; not in the file."""

    @property
    def is_stop(self) -> bool:
        """Whether a signal or `launch.max_runtime` ended the launch, and nothing failed."""
        return self.problem is None and self.reason in STOPPED

    def as_dict(self) -> dict[str, Any]:
        return {
            "exit_code": int(self.exit_code),
            "exit_reason": self.reason.value,
            "step": self.step,
            "time": time.time(),
            "problem": self.problem.as_dict() if self.problem else None,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Verdict:
        problem = Problem.from_dict(raw["problem"]) if raw.get("problem") else None
        return cls(ExitCode(raw["exit_code"]), ExitReason(raw["exit_reason"]), int(raw["step"]), problem)


LAUNCH_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set by torch's agent for its ranks to the id of its rendezvous (PET_RDZV_ID), which differs between launches over several machines."""


def read_heartbeat(run: RunDir, rank: int, launch: str | None = None) -> Heartbeat | None:
    """Return the last heartbeat of a rank; None before the first, and for a file that is damaged or of another version.

    `launch`: None too for a heartbeat of another launch. A rank of an earlier one may still run on a machine that was lost and is back.
    """
    try:
        beat = Heartbeat.read(run.rank_heartbeat(rank))
    except FsdpTuneError:
        return None
    return beat if beat is not None and launch in (None, beat.launch) else None


def read_outcome(run: RunDir, rank: int, launch: str | None = None) -> Outcome | None:
    """Return the outcome of a rank; None if it has not ended, and if not of `launch`. An unreadable file is a failure."""
    path = run.rank_outcome(rank)
    try:
        outcome = Outcome.read(path)
        return outcome if outcome is not None and launch in (None, outcome.launch) else None
    except FsdpTuneError as error:
        problem = Problem("outcome-unreadable", f"rank {rank} left an outcome that cannot be read: it {error}", Where(str(path)))
        return Outcome(ExitCode.FAILED, ExitReason.FAILED, problem, rank=rank)


def clear(run: RunDir, ranks: Iterable[int], *, with_verdict: bool) -> None:
    """Delete the files of an earlier launch, so that they are not mistaken for those of this one."""
    if with_verdict:
        run.outcome_json.unlink(missing_ok=True)
    cleared = set(ranks)
    for stage in run.logs.glob("rank-*.heartbeat.*.tmp"):
        if int(stage.name.removeprefix("rank-").partition(".")[0]) in cleared:
            stage.unlink(missing_ok=True)
    for rank in cleared:
        run.rank_heartbeat(rank).unlink(missing_ok=True)
        run.rank_outcome(rank).unlink(missing_ok=True)


def disk_refusal(run: RunDir) -> str | None:
    """Return why the disk refuses a file of the size of a heartbeat in a run's logs; None if it accepts one, or if the logs are gone."""
    if not run.logs.is_dir():
        return None
    probe = run.logs / f"write-probe-{os.getpid()}"
    try:
        write_file(probe, "can this directory be written?\n" * 32, private=True)  # the size of a heartbeat
        DISK.unlink(probe)
    except OSError as error:
        return f"{run.logs} cannot be written ({error.strerror})"
    return None


@dataclass(frozen=True, slots=True)
class EarlyStart:
    path: Path

    @property
    def accelerate_yaml(self) -> Path:
        """What RUN/accelerate.yaml will contain."""
        return self.path / "accelerate.yaml"

    @property
    def launcher_log(self) -> Path:
        """The launcher's output. RUN/logs/launcher.log gets a copy."""
        return self.path / "launcher.log"

    @property
    def recipe_json(self) -> Path:
        """The resolved recipe without what a plan decides. The first rank inspects its model."""
        return self.path / "recipe.json"

    @property
    def inspection_json(self) -> Path:
        """The document of `model.loading.inspect`; empty if it could not be made."""
        return self.path / "inspection.json"

    @property
    def opened(self) -> Path:
        """Exists once the run directory is complete."""
        return self.path / "opened"


# ---- `doctor`: what the command asks of its ranks, and the parts of the facts that they measure.


@dataclass(frozen=True, slots=True)
class MessageSize:
    """A collective of the recipe that is to be measured. `bytes` is the full buffer."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class HealthRequest:
    """What the command passes to the ranks of its machine, next to the recipe."""

    messages: list[MessageSize]
    checkpoint_bytes: int | None
    gpus_before: list[GpuState]


@dataclass(frozen=True, slots=True)
class HealthFiles:
    """The private directory of one command, which its ranks read and write. It has the names of a run directory for the launcher."""

    path: Path

    @property
    def request(self) -> Path:
        return self.path / "request.json"

    @property
    def facts(self) -> Path:
        """Of all ranks of all machines; written by the first rank of this one."""
        return self.path / "facts.json"

    @property
    def probe(self) -> Path:
        """The path of what the ranks leave in the output directory while they measure."""
        return self.path / "probe"

    def phase(self, rank: int) -> Path:
        """What a rank does now."""
        return self.path / f"phase-{rank}"

    def problem(self, rank: int) -> Path:
        """Why a rank has failed."""
        return self.path / f"problem-{rank}.json"

    def problems(self) -> dict[int, Path]:
        """Return those that exist, by rank. If machines start other numbers of ranks, they are not those that the command expects."""
        return {int(path.stem.removeprefix("problem-")): path for path in sorted(self.path.glob("problem-*.json"))}


@dataclass(frozen=True, slots=True)
class CollectiveTime(JsonAnswer):
    kind: str
    bytes: int
    """Of the full buffer."""
    seconds: float
    """Shortest of several."""


@dataclass(frozen=True, slots=True)
class LinkTime(JsonAnswer):
    """An exchange with the rank of the same local number on another machine, while all machines exchange in pairs."""

    machine: int
    """The other one."""
    bytes: int
    """In each direction."""
    seconds: float
    """Until this rank has received them; shortest of several."""


@dataclass(frozen=True, slots=True)
class NetworkInterface(JsonAnswer):
    name: str
    mbits: int
    """Nominal rate in Mbit/s; 0: unknown."""
    mtu: int
    """Largest packet in bytes."""


@dataclass(frozen=True, slots=True)
class NetworkFacts(JsonAnswer):
    """Of one machine."""

    used: str | None
    """The interface of gloo; null if it chooses one itself."""
    interfaces: list[NetworkInterface]
    """Those that are up and have an address, without loopback and those of containers."""

    @property
    def mbits(self) -> int:
        """Nominal rate of the interface in use; 0: unknown."""
        return next((each.mbits for each in self.interfaces if each.name == self.used), 0)


@dataclass(frozen=True, slots=True)
class OutputFacts(JsonAnswer):
    directory: str
    """The output directory, or the nearest directory above it that exists."""
    error: str | None
    """Why this rank cannot write there."""
    visible_ranks: int
    """Ranks whose files this rank sees."""
    sees_rename: bool
    lock: Literal["works", "not shared", "missing", "untested"]
    """`not shared`: another machine's lock does not exclude this one."""
    free_bytes: int | None
    written_bytes: int
    write_seconds: float
