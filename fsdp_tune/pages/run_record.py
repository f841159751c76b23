"""Everything that a report says about one run, read from the files of its directory. Secrets in recipes and
commands are masked."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_tune.core.files import read_regular
from fsdp_tune.core.secrets import mask_text, masked
from fsdp_tune.core.units import GIB
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.launch.run_status import RunStatus, run_status
from fsdp_tune.pages.metrics_table import Curve, Line, MetricsTable, sort_lines
from fsdp_tune.recipe.schema.keys import values_by_key
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import number
from fsdp_tune.run.launch_files import LaunchRecord
from fsdp_tune.run.metrics_event import AnyEvent
from fsdp_tune.run.metrics_file import MetricsReader, read_metrics
from fsdp_tune.run.records import Environment, Prediction, ReadBack


class _SortedLines(list[dict[str, Any]]):
    """Lines as they are in the file, in the order of their steps."""

    @property
    def newest_step(self) -> int:
        return self[-1]["step"] if self else -1

    def add(self, step: int, line: Line) -> None:
        self.drop_from(step)
        self.append(dict(line))

    def drop_from(self, step: int) -> None:
        while self and self[-1]["step"] >= step:
            self.pop()


@dataclass(frozen=True, slots=True)
class RunLines:
    """The lines of metrics.jsonl by kind, each in the order of steps; events in the order of the file."""

    losses: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    events: list[AnyEvent]


def sorted_lines(lines: Iterable[Line]) -> RunLines:
    """Return the lines by kind (`metrics_table.sort_lines`)."""
    losses, evals, events = _SortedLines(), _SortedLines(), list[AnyEvent]()
    sort_lines(lines, losses, evals, events)
    return RunLines(losses, evals, events)


ENVIRONMENT_VARIABLES = "launch.env."
FREE_MEMORY = "memory available"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, as its files describe it when they are read. A run that has not trained yet has no lines."""

    run: RunDir
    label: str
    """Its name in legends, different from those of the other runs of the report."""
    status: RunStatus
    """`launch.run_status.run_status`."""
    metrics: MetricsTable
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

    @property
    def lines(self) -> RunLines:
        """The lines of metrics.jsonl with every value as it is in the file, which is read again."""
        return sorted_lines(read_metrics(self.run))

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run as JSON; None for what is not known."""
        metrics, step = self.metrics, self.status.step or 0
        return {
            "run_dir": str(self.run.path),
            "label": self.label,
            "state": self.status.state,
            "steps": step,
            "total_steps": self.status.total_steps,
            "seconds_in_steps": metrics.seconds_in_steps(),
            "tokens": int(tokens)
            if (tokens := number(metrics.losses.last.get("tokens"))) is not None
            else None,
            "loss": _ends(metrics.curve("loss")),
            "eval_loss": _ends(metrics.curve("eval_loss")),
            "tokens_per_second_per_device": _middle(metrics.curve("tokens_per_second_per_device")),
            "mfu": _middle(metrics.curve("mfu")),
            "peak_reserved_gib": _highest(metrics.curve("peak_reserved_gib")),
            "peak_host_gib": _highest(metrics.curve("peak_host_gib")),
            "events": dict(Counter(event.name for event in metrics.events)),
            "problem": self.status.problem,
        }


class RunReader:
    """Reads a run again and again; of metrics.jsonl each time only what is new."""

    def __init__(self, run: RunDir, label: str) -> None:
        self.run, self._label = run, label
        self._metrics, self._reader = MetricsTable(), MetricsReader(run.metrics_jsonl)

    def read(self) -> RunRecord:
        """Read a run, also one that is being written. The record shares its metrics with those of other
        calls.

        Raises: usage error `run-unreadable` for damaged files and those of a newer version.
        """
        run = self.run
        lines, are_all = self._reader.read()
        if are_all:
            self._metrics = MetricsTable()
        self._metrics.add(lines)
        launch, environment = (
            LaunchRecord.read(run.launch_json) or LaunchRecord(),
            Environment.read(run.environment_json),
        )
        return RunRecord(
            run=run,
            label=self._label,
            status=run_status(run),
            metrics=self._metrics,
            recipe={
                key: _recipe_text(key, value) for key, value in values_by_key(read_resolved(run)).items()
            },
            reasons=launch.reasons,
            written=_text_of(run.recipe_yaml),
            command=shlex.join(["fsdp-tune", *map(mask_text, launch.command)]) if launch.command else "",
            environment=_environment(environment) if environment is not None else {},
            plan=Prediction.read(run.plan_json),
            data=Prepared.read(run.data_json),
            readback=ReadBack.read(run.readback_json),
        )


def read_run(run: RunDir, label: str) -> RunRecord:
    """Read a run once. Raises: as `RunReader.read`."""
    return RunReader(run, label).read()


_WORDS = re.compile(r"(?:[\d.]+e[-+]?\d+|[^-_/])+[-_/]*")
"""Words of a name; `1e-5` is not divided."""


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each directory: its own, with as many of its parents as the names need to
    differ.

    The words that all names begin or end with are left out, as long as each keeps a word with a letter.
    """
    depth = 1
    while True:
        names = [str(Path(*path.parts[-depth:])) for path in paths]
        if len(set(names)) == len(set(paths)) or depth >= max(len(path.parts) for path in paths):
            break
        depth += 1
    if len(set(names)) < 2:
        return names
    words = [_WORDS.findall(name) for name in names]
    head, tail = _shared(words), _shared([each[::-1] for each in words])
    short = [_cut_to(each, head, tail) for each in words]
    return short if len(set(short)) == len(set(names)) and all(map(_has_letter, short)) else names


def _shared(words: Sequence[Sequence[str]]) -> int:
    """Return how many words all begin with; a separator after a word does not count."""
    count = 0
    for each in zip(*words, strict=False):
        if len({word.rstrip("-_/") for word in each}) > 1:
            break
        count += 1
    return min(count, min(map(len, words)) - 1)


def _cut_to(words: Sequence[str], head: int, tail: int) -> str:
    """Return the name without its first `head` and last `tail` words; a number keeps the word before it."""
    tail = min(tail, len(words) - head - 1)
    kept = "".join(words[head : len(words) - tail]).rstrip("-_/")
    return kept if _has_letter(kept) else "".join(words[max(0, head - 1) : len(words) - tail]).rstrip("-_/")


def _has_letter(name: str) -> bool:
    return any(character.isalpha() for character in name)


def differing_values(
    maps: Sequence[Mapping[str, str]], *, ignored: Sequence[str] = ()
) -> dict[str, list[str | None]]:
    """Return the keys whose values are not the same in all mappings, with the value of each; None where there
    is none."""
    keys = dict.fromkeys(key for each in maps for key in each if key not in ignored)
    values = {key: [each.get(key) for each in maps] for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def differing_environment(runs: Sequence[RunRecord]) -> dict[str, list[str | None]]:
    """Return the facts of the environments that differ; the free memory at a start always does."""
    return differing_values([run.environment for run in runs], ignored=(FREE_MEMORY,))


def _recipe_text(key: str, value: object) -> str:
    if isinstance(value, str):
        return (
            masked(key.removeprefix(ENVIRONMENT_VARIABLES), value)
            if key.startswith(ENVIRONMENT_VARIABLES)
            else mask_text(value)
        )
    return mask_text(json.dumps(value, ensure_ascii=False))


def _text_of(path: Path) -> str:
    try:
        return mask_text(read_regular(path).decode(errors="replace"))
    except FileNotFoundError:
        return ""


def _environment(found: Environment) -> dict[str, str]:
    devices = Counter(
        f"{device.get('name')}, {_size(device.get('memory_bytes'))}" for device in found.devices
    )
    return {
        **{name: str(version) for name, version in found.versions.items() if version is not None},
        "devices": "; ".join(f"{count} × {device}" for device, count in devices.items()) or "none",
        **{
            name.removesuffix("_bytes").replace("_", " "): _size(value)
            if name.endswith("_bytes")
            else str(value)
            for name, value in found.host.items()
            if value is not None
        },
        **{
            f"extension {extension.get('name')}": json.dumps(extension, sort_keys=True)
            for extension in found.extensions
        },
    }


def _size(size_bytes: object) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if isinstance(size_bytes, int | float) else "unknown"


def _ends(curve: Curve) -> dict[str, object] | None:
    """Return first, last and best value with its step, and how many values are not finite; None without a
    value."""
    if not len(curve):
        return None
    points = curve.finite()
    best = int(points.values.argmin()) if len(points) else None
    return {
        "first": _value(curve.values[0]),
        "last": _value(curve.values[-1]),
        "best": float(points.values[best]) if best is not None else None,
        "best_step": int(points.steps[best]) if best is not None else None,
        "not_finite": len(curve) - len(points),
    }


def _value(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _middle(curve: Curve) -> float | None:
    points = curve.finite()
    return float(np.median(points.values)) if len(points) else None


def _highest(curve: Curve) -> float | None:
    points = curve.finite()
    return float(points.values.max()) if len(points) else None
