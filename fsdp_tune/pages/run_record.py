"""Curves of a run: one number over the steps, thinned without losing an extreme.

Everything that a report says about one run, read from the files of its directory. Secrets in recipes and commands are masked.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_tune.core.secrets import mask_text, masked
from fsdp_tune.core.units import GIB
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.launch.run_status import RunStatus, run_status
from fsdp_tune.recipe.schema.keys import values_by_key
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import AnyEvent, TrainStarted, number, read_event
from fsdp_tune.run.launch_files import LaunchRecord
from fsdp_tune.run.metrics_file import read_metrics, seconds_in_steps
from fsdp_tune.run.records import Environment, Prediction, ReadBack

Line = dict[str, Any]
"""One object of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A number over the steps of a run."""

    steps: Sequence[int]
    """Increasing."""
    values: Sequence[float | None]
    """One for each step; None is a gap: NaN, infinite or unknown."""

    def finite(self) -> list[tuple[int, float]]:
        """Return (step, value) of the points that are not gaps."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    def thinned(self, limit: int) -> Curve:
        """Return at most `limit` (6 or more) points: the first, the last, and of each bucket between them least, greatest and first gap."""
        count = len(self.steps)
        if count <= limit:
            return self
        kinds = 3 if None in self.values else 2
        buckets = (limit - 2) // kinds
        kept = {0, count - 1}
        for bucket in range(buckets):
            begin, end = (1 + (count - 2) * edge // buckets for edge in (bucket, bucket + 1))
            kept |= _extremes(self.values, range(begin, end))
        order = sorted(kept)
        return Curve([self.steps[at] for at in order], [self.values[at] for at in order])


def _extremes(values: Sequence[float | None], among: Iterable[int]) -> set[int]:
    """Return the indices of the least value, the greatest value and the first gap."""
    found = {at: values[at] for at in among}
    numbers = {at: value for at, value in found.items() if value is not None}
    gap = next((at for at, value in found.items() if value is None), None)
    kept = {min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)} if numbers else set[int]()
    return kept if gap is None else kept | {gap}


def curve_of(lines: Iterable[Line], name: str) -> Curve:
    """Return the curve of a field over the lines that have it."""
    own = [line for line in lines if name in line]
    return Curve([line["step"] for line in own], [number(line[name]) for line in own])


@dataclass(frozen=True, slots=True)
class RunLines:
    """The lines of metrics.jsonl by kind, each in the order of steps; events in the order of the file."""

    losses: list[Line]
    evals: list[Line]
    events: list[AnyEvent]


def sorted_lines(lines: Iterable[Line]) -> RunLines:
    """Divide lines by kind. Where a run was resumed at an earlier step, the lines of the later attempt replace those of the earlier one.

    Rank 0 cuts the file back when it resumes, so that steps repeat only in a copy, or in a file that another program has joined.
    """
    found = RunLines([], [], [])
    for line in lines:
        step = line.get("step")
        if (event := read_event(line)) is not None:
            if isinstance(event, TrainStarted):
                _drop_from(found.losses, event.step + 1)
                _drop_from(found.evals, event.step + 1)
            found.events.append(event)
        elif isinstance(step, int) and "loss" in line:
            if found.losses and step <= found.losses[-1]["step"]:
                _drop_from(found.evals, step)
            _drop_from(found.losses, step)
            found.losses.append(line)
        elif isinstance(step, int) and "eval_loss" in line:
            _drop_from(found.evals, step)
            found.evals.append(line)
    return found


def _drop_from(lines: list[Line], step: int) -> None:
    while lines and lines[-1]["step"] >= step:
        lines.pop()


ENVIRONMENT_VARIABLES = "launch.env."


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, as its files describe it when they are read. A run that has not trained yet has no lines."""

    run: RunDir
    label: str
    """Its name in legends, different from those of the other runs of the report."""
    status: RunStatus
    """`launch.run_status.run_status`."""
    lines: RunLines
    recipe: dict[str, str]
    """Every key of the resolved recipe with its value as text."""
    reasons: dict[str, str]
    """Why a resolved key has its value."""
    written: str
    """The recipe as it was written; empty if its file is gone."""
    command: str
    """The command as it was typed; empty if the run was started from Python."""
    environment: dict[str, str]
    """Versions, machine and devices as text."""
    plan: Prediction | None
    data: Prepared | None
    readback: ReadBack | None

    def curve(self, name: str) -> Curve:
        """Return the curve of a field of training lines or of evaluations."""
        return curve_of(self.lines.evals if name.startswith("eval_") else self.lines.losses, name)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run as JSON; None for what is not known."""
        losses = self.lines.losses
        step = self.status.step or 0
        return {
            "run_dir": str(self.run.path),
            "label": self.label,
            "state": self.status.state,
            "steps": step,
            "total_steps": self.status.total_steps,
            "seconds_in_steps": seconds_in_steps(losses),
            "tokens": losses[-1].get("tokens") if losses else None,
            "loss": _ends(self.curve("loss")),
            "eval_loss": _ends(self.curve("eval_loss")),
            "tokens_per_second_per_device": _middle(self.curve("tokens_per_second_per_device")),
            "mfu": _middle(self.curve("mfu")),
            "peak_reserved_gib": _highest(self.curve("peak_reserved_gib")),
            "peak_host_gib": _highest(self.curve("peak_host_gib")),
            "events": dict(Counter(event.name for event in self.lines.events)),
            "problem": self.status.problem,
        }


def read_run(run: RunDir, label: str) -> RunRecord:
    """Read a run, also one that is being written. Raises: usage error `run-unreadable` for damaged files and those of a newer version."""
    launch, environment = LaunchRecord.read(run.launch_json) or LaunchRecord(), Environment.read(run.environment_json)
    return RunRecord(
        run=run,
        label=label,
        status=run_status(run),
        lines=sorted_lines(read_metrics(run)),
        recipe={key: _recipe_text(key, value) for key, value in values_by_key(read_resolved(run)).items()},
        reasons=launch.reasons,
        written=_text_of(run.recipe_yaml),
        command=shlex.join(["fsdp-tune", *map(mask_text, launch.command)]) if launch.command else "",
        environment=_environment(environment) if environment is not None else {},
        plan=Prediction.read(run.plan_json),
        data=Prepared.read(run.data_json),
        readback=ReadBack.read(run.readback_json),
    )


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each directory: its own, with as many of its parents as the names need to differ."""
    depth = 1
    while True:
        names = [str(Path(*path.parts[-depth:])) for path in paths]
        if len(set(names)) == len(set(paths)) or depth >= max(len(path.parts) for path in paths):
            return names
        depth += 1


def differences(maps: Sequence[Mapping[str, str]], *, ignored: Sequence[str] = ()) -> dict[str, list[str | None]]:
    """Return the keys whose values are not the same in all mappings, with the value of each; None where there is none."""
    keys = dict.fromkeys(key for each in maps for key in each if key not in ignored)
    values = {key: [each.get(key) for each in maps] for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def _recipe_text(key: str, value: Any) -> str:
    if isinstance(value, str):
        return masked(key.removeprefix(ENVIRONMENT_VARIABLES), value) if key.startswith(ENVIRONMENT_VARIABLES) else mask_text(value)
    return mask_text(json.dumps(value, ensure_ascii=False))


def _text_of(path: Path) -> str:
    try:
        return mask_text(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return ""


def _environment(found: Environment) -> dict[str, str]:
    devices = Counter(f"{device.get('name')}, {_size(device.get('memory_bytes'))}" for device in found.devices)
    return {
        **{name: str(version) for name, version in found.versions.items() if version is not None},
        "devices": "; ".join(f"{count} × {device}" for device, count in devices.items()) or "none",
        **{
            name.removesuffix("_bytes").replace("_", " "): _size(value) if name.endswith("_bytes") else str(value)
            for name, value in found.host.items()
            if value is not None
        },
        **{f"extension {extension.get('name')}": json.dumps(extension, sort_keys=True) for extension in found.extensions},
    }


def _size(size_bytes: Any) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if isinstance(size_bytes, int | float) else "unknown"


def _ends(curve: Curve) -> dict[str, Any] | None:
    """Return first, last and best value with its step, and how many values are not finite; None without a value."""
    if not curve.steps:
        return None
    points = curve.finite()
    best = min(points, key=lambda point: point[1], default=(None, None))
    return {
        "first": curve.values[0],
        "last": curve.values[-1],
        "best": best[1],
        "best_step": best[0],
        "not_finite": len(curve.steps) - len(points),
    }


def _middle(curve: Curve) -> float | None:
    points = curve.finite()
    return median(value for _, value in points) if points else None


def _highest(curve: Curve) -> float | None:
    return max((value for _, value in curve.finite()), default=None)
