"""What must hold after every end of a run. Each check returns the violations as text; an empty list is good."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.atomic import STAGE_MARK
from fsdp_tune.ownership import live_owner
from fsdp_tune.run_dir import RunDir
from tests.chaos.draw import AGENT, CHILD, COMMAND, FULL_DISK, KILL, LOADER, LONG_STOP, RANK, READ_ONLY_DISK, SIGNALS, Disturbance
from tests.chaos.processes import Process
from tests.faults.checks import half_files, verified_steps

NUMBERS = ("loss", "grad_norm", "learning_rate", "epoch", "tokens", "supervised_tokens", "eval_loss")
NAMING_SECONDS = 10.0
"""From `launch.hang_timeout` until the rank that stands still is named."""
READING_SECONDS = 2.0
"""For this harness to see it, on a busy machine."""
OK, FAILED, LOST, INTERRUPTED, PREEMPTED = 0, 1, 5, 130, 143


@dataclass
class Attempt:
    """One start of the commands of a run, to their end."""

    codes: list[int | None]
    """Exit codes by machine, as `Popen` has them; None: it did not end in time."""
    text: str = ""
    """All that the commands printed."""
    problems: list[str] = field(default_factory=list)
    """`code: message` of the errors that they reported."""
    restarts: int = 0
    named_after_seconds: float | None = None
    """From the disturbance until a hang was reported."""
    saved: list[int] = field(default_factory=list)
    """Steps of the checkpoints that were reported as saved."""
    target: Process | None = None
    """Which process was disturbed; None where nothing was (yet)."""
    left: list[str] = field(default_factory=list)
    """Processes that have outlived the commands."""


def step_differences(run: RunDir, reference: RunDir) -> list[str]:
    """Every step and every evaluation once, with all digits of the undisturbed run."""
    found, wanted = ([_numbers(line) for line in each.metrics() if "event" not in line] for each in (run, reference))
    if found == wanted:
        return []
    first = next((pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]), None)
    detail = f"{first[0]} instead of {first[1]}" if first else "one ends early"
    return [f"metrics.jsonl has {len(found)} lines of steps instead of {len(wanted)}, or others: {detail}"]


def _numbers(line: dict[str, Any]) -> tuple[Any, ...]:
    return line.get("step"), *((key, line[key]) for key in NUMBERS if key in line and not _is_nan(line[key]))


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def merged_differences(run: RunDir, reference: RunDir) -> list[str]:
    """The tensors of the merged model, bit for bit."""
    if not run.merged.is_dir():
        return ["there is no merged model"]
    found, wanted = _tensors(run.merged), _tensors(reference.merged)
    if found.keys() != wanted.keys():
        return [f"the merged model has other tensors: {sorted(found.keys() ^ wanted.keys())}"]
    return [f"{name} of the merged model differs" for name in wanted if found[name] != wanted[name]]


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    import torch
    from safetensors.torch import load_file

    every = {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b"")
        for name, tensor in every.items()
    }


def lost_checkpoints(run: RunDir, reported: Iterable[int], keep: int) -> list[str]:
    """Reported checkpoints that are gone although rotation keeps that many, and anything visible that is not complete."""
    there = verified_steps(run)
    newest = sorted(set(reported), reverse=True)[:keep]
    # A newer checkpoint that was not reported yet may have taken the place of an older one.
    lost = [step for step in newest if step not in there and len([other for other in there if other > step]) < keep]
    found = [f"checkpoint-{step} was reported as saved and is gone; there are {there}" for step in lost]
    return found + [f"half written: {each}" for each in half_files(run.path)]


def leftovers(run: RunDir, *, is_finished: bool, seen: Collection[int]) -> list[str]:
    """What must not outlive the commands: the lock, shared memory, and after the last end also stages. `seen`: pids of the run."""
    found: list[str] = []
    if (owner := live_owner(run.lock)) is not None:
        found.append(f"run.lock is still held by {owner}")
    shared = ((path, re.match(r"torch_(\d+)_", path.name)) for path in Path("/dev/shm").iterdir())
    found += [f"{path} is left" for path, match in shared if match and int(match[1]) in seen]
    if is_finished:
        hidden = [
            *run.path.glob(".*"),
            *run.path.parent.glob(f".{run.name}*"),
            *run.path.rglob(f"*{STAGE_MARK}*"),
            *run.path.rglob("*.tmp"),
        ]
        found += [f"{path.relative_to(run.path.parent)} is left" for path in sorted(set(hidden))]
    return found


def listening(port: int) -> list[str]:
    """A port of the run on which a process still listens."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    held = any(words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port for words in lines)
    return [f"port {port} is still open"] if held else []


def judge(disturbance: Disturbance | None, attempt: Attempt, *, hang_seconds: float, has_restarts: bool) -> list[str]:
    """Compare how the commands ended with what the documentation promises for the disturbance."""
    found = [f"{process} has outlived the commands" for process in attempt.left]
    found += ["an exception reached the terminal"] if "Traceback (most recent call last)" in attempt.text else []
    allowed = _allowed_codes(disturbance, attempt, has_restarts=has_restarts)
    for machine, code in enumerate(attempt.codes):
        if code is None:
            found.append(f"the command of machine {machine} does not end")
        elif code not in allowed | _of_the_killed(disturbance, attempt, machine):
            found.append(f"the command of machine {machine} ended with {code}, not one of {sorted(allowed)}: {'; '.join(attempt.problems)}")
    if not _may_harm(disturbance, attempt) and attempt.restarts:
        found.append(f"a healthy run was restarted {attempt.restarts} times")
    if disturbance is None or attempt.target is None:
        return found
    return found + _unnamed(disturbance, attempt, hang_seconds)


def _may_harm(disturbance: Disturbance | None, attempt: Attempt) -> bool:
    """Whether the run may end otherwise than finished."""
    if disturbance is None or (attempt.target is None and disturbance.kind not in (FULL_DISK, READ_ONLY_DISK)):
        return False
    if disturbance.kind == LONG_STOP:
        return disturbance.target in (RANK, LOADER)
    return disturbance.kind in (KILL, *SIGNALS, FULL_DISK, READ_ONLY_DISK)


def _allowed_codes(disturbance: Disturbance | None, attempt: Attempt, *, has_restarts: bool) -> set[int]:
    """A disturbance may come when all is done, so 0 is always allowed."""
    if disturbance is None or not _may_harm(disturbance, attempt):
        return {OK}
    kind, target = disturbance.kind, disturbance.target
    if kind in SIGNALS:
        if target in (COMMAND, AGENT, RANK):
            return {OK, INTERRUPTED if kind == "SIGINT" else PREEMPTED}
        return {OK, FAILED}
    if kind in (FULL_DISK, READ_ONLY_DISK):
        return {OK, FAILED}
    if target in (LOADER, CHILD) and kind == KILL:
        return {OK, FAILED}
    return {OK, LOST} | ({FAILED} if target == COMMAND else set())


def _of_the_killed(disturbance: Disturbance | None, attempt: Attempt, machine: int) -> set[int]:
    """A command that is killed has no exit code; one that is signalled before it listens has Python's."""
    if disturbance is None or attempt.target is None or attempt.target.machine != machine or disturbance.target != COMMAND:
        return set()
    return {-9} if disturbance.kind == KILL else set()


def _unnamed(disturbance: Disturbance, attempt: Attempt, hang_seconds: float) -> list[str]:
    """Where one rank was killed or stood still, the message must name that one, in time."""
    target, text = attempt.target, attempt.text
    assert target is not None
    text = " ".join(text.split())  # long messages are wrapped
    if all(code == OK for code in attempt.codes) and not attempt.restarts:
        return []
    if disturbance.kind == KILL and target.role == RANK and f"rank {target.rank} was killed by SIGKILL" not in text:
        return [f"rank {target.rank} was killed, and is not named"]
    if disturbance.kind != LONG_STOP or target.role not in (RANK, LOADER):
        return []
    found = (
        []
        if re.search(rf"nothing has moved for [^:]*: rank {target.rank} \(", text)
        else [f"rank {target.rank} stood still, and is not named"]
    )
    limit = hang_seconds + NAMING_SECONDS + READING_SECONDS
    if attempt.named_after_seconds is None or attempt.named_after_seconds > limit:
        found.append(f"the hang was reported after {attempt.named_after_seconds} s, not within {limit:.0f} s")
    return found
