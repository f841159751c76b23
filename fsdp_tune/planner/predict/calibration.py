"""Calibrate plans: factors for the compute time and the reserved memory of a GPU model, learned from runs on
this machine and kept in the cache.

A factor is used for plans of the same torch, driver, family of models and dtype alone: for another one it may
be wrong by any amount.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.gpus import Hardware, detect
from fsdp_tune.planner.predict.divided_step import step_time
from fsdp_tune.planner.predict.efficiency import Efficiency, UnknownFigure, efficiency_of
from fsdp_tune.planner.predict.memory import cublas_workspace_bytes, peak_memory
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.rules.limits import computes_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import read_recipe_json
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.records import Environment

FULL_ROWS = 0.9
"""A plan is of rows of `data.max_length`. A run that computes fewer tokens than this share of them calibrates
nothing."""
FEWEST_LINES = 3
"""Lines of metrics.jsonl, without the first one, which includes the warm-up."""
LEAST_COMPUTING = 0.5
"""Share of a predicted step in which the GPU computes. Below it, a measured step depends on the host and the
links, whose time no factor changes."""
CLOSE = 0.05
"""Relative distance of a measured step to the prediction with the best factor, above which no factor explains
it."""
RESERVED = (0.8, 1.25)
"""Reserved memory relative to that of a plan. Outside, another cause than the allocator is likely."""
_FACTORS = (0.1, 10.0)


@dataclass(frozen=True, slots=True)
class Measured:
    recipe: Recipe
    step_seconds: float
    """Median of the counted steps, or of the lines of metrics.jsonl."""
    steps: int
    """Number of the last one."""
    torch: str | None = None
    driver: str | None = None
    """None: not known."""
    reserved_bytes: float | None = None
    """Peak of reserved memory, if the run did nothing between its steps and had the allocator of a plan; else
    None."""


@dataclass(frozen=True, slots=True)
class CalibrationSetting:
    """What a factor depends on, in addition to the GPU model."""

    family: str
    """`model_type` of the model."""
    dtype: str
    """Of matrix products."""
    torch: str | None
    driver: str | None
    """None: not known, and not compared."""

    def covers(self, other: CalibrationSetting) -> bool:
        is_same_driver = None in (self.driver, other.driver) or self.driver == other.driver
        return is_same_driver and replace(self, driver=None) == replace(other, driver=None)

    def __str__(self) -> str:
        driver = "" if self.driver is None else f", driver {self.driver}"
        return f"{self.family or 'unknown'} in {self.dtype}, torch {self.torch}{driver}"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was learned in one setting."""

    setting: CalibrationSetting
    factor: float | None
    """Compute time over that of the table; None: not learned."""
    steps: int
    memory: float | None = None
    """Peak of reserved memory over that of a plan, the largest of the runs that were measured together; None:
    not learned."""


def setting_of(recipe: Recipe, trace: Trace, torch: str | None, driver: str | None) -> CalibrationSetting:
    """Return the setting of a recipe with these versions."""
    family = trace.facts.config.get("model_type")
    return CalibrationSetting(
        str(family or ""), "fp8" if computes_in_fp8(recipe) else recipe.compute_dtype, torch, driver
    )


def read_run(path: Path, hardware: Hardware) -> Measured:
    """Return the measured step time of a run on `hardware`. Raises: FsdpTuneError for a run on another
    device, or with too few lines."""
    run = RunDir(path)
    try:
        recipe = Recipe.model_validate_json(read_recipe_json(run))
        environment = Environment.read(run.environment_json) or Environment()
        lines = read_metrics(run)
    except (OSError, ValueError) as error:
        raise usage_error("calibrate-no-run", f"{path} cannot be used for calibration: {error}") from error
    devices = environment.devices
    found = detect(devices[0].get("name")) if devices and recipe.launch.device == "cuda" else None
    if found is None or found.name != hardware.name:
        ran_on = devices[0].get("name") if devices and recipe.launch.device != "cpu" else "the CPU"
        raise usage_error("calibrate-no-run", f"{path} ran on {ran_on}, and the plan is for {hardware.name}")
    took = [line for line in lines if "loss" in line and line.get("step_seconds")][1:]
    if len(took) < FEWEST_LINES:
        raise usage_error(
            "calibrate-no-run",
            f"{path} has {len(took)} lines of steps after the first; at least {FEWEST_LINES} are needed",
        )
    tokens = (
        statistics.median(line["tokens_per_second_per_device"] * line["step_seconds"] for line in took)
        * recipe.world_size
    )
    if (share := tokens / (recipe.global_batch_size * recipe.data.max_length)) < FULL_ROWS:
        message = (
            f"a step of {path} computed {share:.0%} of the tokens of full rows, and a plan is of full rows"
        )
        raise usage_error(
            "calibrate-no-run", message, hint="calibrate with a run of packed rows (`data.packing: true`)"
        )
    seconds = statistics.median(line["step_seconds"] for line in took)
    return Measured(recipe, seconds, int(took[-1]["step"]), torch=environment.versions.get("torch"))


def learn(cache: Path, hardware: Hardware, measured: Measured, trace: Trace) -> tuple[Efficiency, float]:
    """Fit the constants to the measured step time and save them; return them and measured ÷ predicted before.

    Raises: usage error if the step says nothing about the speed of the GPU.
    """
    machines, plain = measured.recipe.launch.num_machines, efficiency_of(hardware)

    def predicted(factor: float) -> float:
        return step_time(trace, hardware, machines, scaled(plain, factor)).step_seconds

    try:
        before = step_time(trace, hardware, machines, plain)
        if (share := before.compute_seconds / before.step_seconds) < LEAST_COMPUTING:
            raise _says_nothing(
                f"a GPU computes in {share:.0%} of its predicted step, and waits for the host or for "
                "others in the rest"
            )
        low, high = _FACTORS
        for _ in range(20):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if predicted(middle) < measured.step_seconds else (low, middle)
        factor = (low * high) ** 0.5
        if abs(predicted(factor) / measured.step_seconds - 1) > CLOSE:
            message = (
                f"it took {measured.step_seconds:.3g} s, and {before.step_seconds:.3g} s are predicted: "
                "not a question of computing"
            )
            raise _says_nothing(message)
    except UnknownFigure as error:
        raise usage_error(
            "calibrate-no-run", f"the time on {hardware.name} cannot be predicted: {error}"
        ) from error
    setting = setting_of(measured.recipe, trace, measured.torch, measured.driver)
    _keep(cache, hardware, setting, measured.steps, factor=factor)
    return calibrated_efficiency(cache, hardware, setting), measured.step_seconds / before.step_seconds


def learn_memory(cache: Path, hardware: Hardware, runs: Sequence[tuple[Measured, Trace]]) -> float | None:
    """Save the largest reserved memory of runs of one model relative to their plans, and return it.

    Returns None if no run has a figure. Raises: usage error if it says nothing about the allocator.
    """
    ratios = [
        measured.reserved_bytes / planned_reserved_bytes(trace, hardware)
        for measured, trace in runs
        if measured.reserved_bytes is not None
    ]
    if not ratios:
        return None
    low, high = RESERVED
    if not low <= (ratio := max(ratios)) <= high:
        message = f"a run reserved {ratio:.2f} times the planned memory: not a question of the allocator"
        raise usage_error("calibrate-no-run", message)
    measured, trace = runs[0]
    setting = setting_of(measured.recipe, trace, measured.torch, measured.driver)
    _keep(cache, hardware, setting, measured.steps, memory=ratio)
    return ratio


def planned_reserved_bytes(trace: Trace, hardware: Hardware) -> int:
    """Return the peak of reserved memory of a plan, without a learned factor."""
    return peak_memory(trace, workspace_bytes=cublas_workspace_bytes(hardware)).peak_reserved_bytes


def _keep(
    cache: Path,
    hardware: Hardware,
    setting: CalibrationSetting,
    steps: int,
    *,
    factor: float | None = None,
    memory: float | None = None,
) -> None:
    """Save what was learned in a setting; None keeps what was learned there before."""
    known = _read(cache)
    every = known.get(hardware.name, [])
    before = next((each for each in every if each.setting == setting), Calibration(setting, None, steps))
    learned = replace(
        before,
        steps=steps,
        factor=before.factor if factor is None else factor,
        memory=before.memory if memory is None else memory,
    )
    known[hardware.name] = [*(each for each in every if each.setting != setting), learned]
    cache.mkdir(parents=True, exist_ok=True)
    write_json(_file(cache), {name: [asdict(each) for each in every] for name, every in known.items()})


def _says_nothing(why: str) -> FsdpTuneError:
    hint = "calibrate with a recipe of more tokens a step, on a GPU that no other program uses"
    return usage_error(
        "calibrate-no-run", f"the measured step says nothing about the speed of the GPU: {why}", hint=hint
    )


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


def calibrated_efficiency(cache: Path, hardware: Hardware, setting: CalibrationSetting) -> Efficiency:
    """Return the constants of a GPU: calibrated, if a factor was learned on this machine in such a setting,
    else those of the table. Raises: as `known_calibrations`."""
    return efficiency_for(known_calibrations(cache, hardware), hardware, setting)


def efficiency_for(
    known: Sequence[Calibration], hardware: Hardware, setting: CalibrationSetting
) -> Efficiency:
    """Return the constants of a GPU, calibrated by what is known about it.

    Their `calibration` and `memory_calibration` describe the factors; the first names the settings that were
    calibrated instead.
    """
    found = efficiency_of(hardware)
    times = {each.setting: each.factor for each in known if each.factor is not None}
    sizes = {each.setting: each.memory for each in known if each.memory is not None}
    if (learned := _newest(times, setting)) is not None:
        of, factor = learned
        words = f"computing takes {factor:.2f} times as long as by the table: learned on this machine ({of})"
        found = replace(scaled(found, factor), calibration=words)
    elif times:
        others = "; ".join(map(str, times))
        words = f"{hardware.name} is not calibrated for {setting}, only for {others}"
        found = replace(found, calibration=words)
    if (learned := _newest(sizes, setting)) is not None:
        of, factor = learned
        used = "" if factor > 1 else ", and is not lowered"
        words = f"reserved memory × {factor:.2f}: learned on this machine ({of}){used}"
        # A factor below 1 makes no plan fit: another layout of the same model may fragment its memory more.
        found = replace(found, reserved_factor=max(1.0, factor), memory_calibration=words)
    return found


def _newest(
    factors: dict[CalibrationSetting, float], wanted: CalibrationSetting
) -> tuple[CalibrationSetting, float] | None:
    """Return the newest factor of a setting that covers the wanted one, or None."""
    return next((each for each in reversed(factors.items()) if each[0].covers(wanted)), None)


def known_calibrations(cache: Path, hardware: Hardware) -> list[Calibration]:
    """Return what was learned about a GPU model on this machine, the newest last. Raises: usage error if the
    file is damaged."""
    return _read(cache).get(hardware.name, [])


def _file(cache: Path) -> Path:
    return cache / "calibration.json"


def _read(cache: Path) -> dict[str, list[Calibration]]:
    path = _file(cache)
    if not path.exists():
        return {}
    try:
        document: dict[str, list[dict[str, Any]] | float] = json.loads(path.read_text(encoding="utf-8"))
        # An earlier version has one factor of a GPU model, from an unknown setting.
        return {
            name: [_entry(each) for each in every]
            for name, every in document.items()
            if isinstance(every, list)
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise usage_error("calibration-damaged", f"{path} is damaged: {error}", hint="remove it") from error


def _entry(raw: dict[str, Any]) -> Calibration:
    factor, memory = raw["factor"], raw.get("memory")
    return Calibration(
        CalibrationSetting(**raw["setting"]),
        None if factor is None else float(factor),
        int(raw["steps"]),
        None if memory is None else float(memory),
    )
