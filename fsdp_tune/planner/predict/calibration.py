"""Calibrate plans: factors for a GPU model, learned from a run on this machine and kept in the cache."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.gpus import Hardware, detect
from fsdp_tune.planner.predict.divided_step import step_time
from fsdp_tune.planner.predict.timing import Efficiency, UnknownFigure, efficiency_of
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import read_recipe_json
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.records import Environment

FEWEST_LINES = 3
"""Lines of metrics.jsonl, without the first one, which includes the warm-up."""


_FACTORS = (0.1, 10.0)


@dataclass(frozen=True, slots=True)
class Measured:
    recipe: Recipe
    step_seconds: float
    """Median over the lines of metrics.jsonl."""
    steps: int


def read_run(path: Path, hardware: Hardware) -> Measured:
    """Return the measured step time of a run on `hardware`. Raises: FsdpTuneError for a run on another
    device, or with too few lines."""
    run = RunDir(path)
    try:
        recipe = Recipe.model_validate_json(read_recipe_json(run))
        devices = (Environment.read(run.environment_json) or Environment()).devices
        lines = read_metrics(run)
    except (OSError, ValueError) as error:
        raise usage_error("calibrate-no-run", f"{path} cannot be used for calibration: {error}") from error
    found = detect(devices[0].get("name")) if devices and recipe.launch.device == "cuda" else None
    if found is None or found.name != hardware.name:
        ran_on = devices[0].get("name") if devices and recipe.launch.device != "cpu" else "the CPU"
        raise usage_error("calibrate-no-run", f"{path} ran on {ran_on}, and the plan is for {hardware.name}")
    took = [
        (line["step"], line["step_seconds"]) for line in lines if "loss" in line and line.get("step_seconds")
    ][1:]
    if len(took) < FEWEST_LINES:
        raise usage_error(
            "calibrate-no-run",
            f"{path} has {len(took)} lines of steps after the first; at least {FEWEST_LINES} are needed",
        )
    return Measured(recipe, statistics.median(seconds for _, seconds in took), int(took[-1][0]))


def learn(cache: Path, hardware: Hardware, measured: Measured, trace: Trace) -> tuple[Efficiency, float]:
    """Fit the constants to the measured step time and save them; return them and measured ÷ predicted
    before."""
    machines = measured.recipe.launch.num_machines
    try:
        predicted = step_time(trace, hardware, machines).step_seconds
        low, high = _FACTORS
        for _ in range(20):
            middle = (low * high) ** 0.5
            slower = step_time(
                trace, hardware, machines, scaled(efficiency_of(hardware), middle)
            ).step_seconds
            low, high = (middle, high) if slower < measured.step_seconds else (low, middle)
    except UnknownFigure as error:
        raise usage_error(
            "calibrate-no-run", f"the time on {hardware.name} cannot be predicted: {error}"
        ) from error
    factor = (low * high) ** 0.5
    known = _read(cache)
    known[hardware.name] = {"factor": factor, "steps": measured.steps}
    cache.mkdir(parents=True, exist_ok=True)
    write_json(_file(cache), known)
    return scaled(efficiency_of(hardware), factor), measured.step_seconds / predicted


def scaled(efficiency: Efficiency, factor: float) -> Efficiency:
    """Return the constants for compute that takes `factor` times as long."""
    return replace(
        efficiency,
        matmul=efficiency.matmul / factor,
        attention_forward=efficiency.attention_forward / factor,
        attention_backward=efficiency.attention_backward / factor,
        bandwidth=efficiency.bandwidth / factor,
        is_measured=True,
    )


def calibrated_efficiency(cache: Path, hardware: Hardware) -> Efficiency | None:
    """Return the calibrated constants of a GPU on this machine; None if it was not calibrated."""
    found = _read(cache).get(hardware.name)
    return scaled(efficiency_of(hardware), found["factor"]) if found else None


def _file(cache: Path) -> Path:
    return cache / "calibration.json"


def _read(cache: Path) -> dict[str, dict[str, float]]:
    path = _file(cache)
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise usage_error("calibration-damaged", f"{path} is damaged: {error}", hint="remove it") from error
