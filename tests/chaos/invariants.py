"""Invariants of a run's files after every end. Each check returns the violations as text; an empty list is
good."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import STAGE_MARK
from fsdp_tune.core.ownership import live_owner
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from tests.faults.checks import half_files, verified_steps

NUMBERS = ("loss", "grad_norm", "learning_rate", "epoch", "tokens", "supervised_tokens", "eval_loss")


def step_differences(run: RunDir, reference: RunDir) -> list[str]:
    """Every step and every evaluation once, with all digits of the undisturbed run."""
    found, wanted = (
        [_numbers(line) for line in read_metrics(each) if "event" not in line] for each in (run, reference)
    )
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

    every = {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return {
        name: (
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else b"",
        )
        for name, tensor in every.items()
    }


def lost_checkpoints(run: RunDir, reported: Iterable[int], keep: int) -> list[str]:
    """Reported checkpoints that are gone although rotation keeps that many, and anything visible that is not
    complete."""
    there = verified_steps(run)
    newest = sorted(set(reported), reverse=True)[:keep]
    # A newer checkpoint that was not reported yet may have taken the place of an older one.
    lost = [
        step
        for step in newest
        if step not in there and len([other for other in there if other > step]) < keep
    ]
    found = [f"checkpoint-{step} was reported as saved and is gone; there are {there}" for step in lost]
    return found + [f"half written: {each}" for each in half_files(run.path)]


def leftovers(run: RunDir, *, is_finished: bool, seen: Collection[int]) -> list[str]:
    """What must not outlive the commands: the lock, shared memory, and after the last end also stages.
    `seen`: pids of the run."""
    found: list[str] = []
    owner = live_owner(run.lock)
    # of a machine with another name, its age alone would tell
    if owner is not None and Path(f"/proc/{owner.pid}").exists():
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
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    held = any(words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port for words in lines)
    return [f"port {port} is still open"] if held else []
