"""`plan(recipe, hardware, trace)`: predict memory, time and cost of one recipe on one kind of GPU.

What was learned from runs on this machine (`calibration`) scales the compute time and the reserved memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.gpus import CPU, Hardware, ModelDimensions, mfu
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.accuracy import FigureError, accuracy
from fsdp_tune.planner.predict.assumptions import assumptions_of
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.divided_step import step_time
from fsdp_tune.planner.predict.efficiency import Efficiency, UnknownFigure, efficiency_of
from fsdp_tune.planner.predict.experts import ExpertRow
from fsdp_tune.planner.predict.memory import (
    CONTEXT_BYTES,
    Fit,
    Fits,
    Memory,
    disk,
    fit,
    host_memory,
    total_steps,
)
from fsdp_tune.planner.predict.timing import StepTime
from fsdp_tune.planner.trace_format import Segments, Trace
from fsdp_tune.recipe.schedule import rate_line
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import batch_arithmetic


@dataclass(frozen=True, slots=True)
class StepParts(JsonAnswer):
    """Where the seconds of a step go. Communication and computation overlap."""

    phases: dict[str, float]
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    """Communication that nothing hides."""
    waiting_for_host_seconds: float
    """The GPU waits until the host has issued its next kernel."""


@dataclass(frozen=True, slots=True)
class SentGib(JsonAnswer):
    """What each GPU sends in a step."""

    within_machine: float | None
    between_machines: float | None


@dataclass(frozen=True, slots=True)
class HostGib(JsonAnswer):
    """Host memory of the machine with most, in addition to Python, torch and CUDA."""

    peak: float
    loading: float
    offloaded: float
    staging: float


@dataclass(frozen=True, slots=True)
class DiskGib(JsonAnswer):
    checkpoint: float
    checkpoints_at_most: float | None
    """Null if all checkpoints are kept."""
    merged: float
    cache: float | None
    """Null if the data is not prepared."""


@dataclass(frozen=True, slots=True)
class RunTotals(JsonAnswer):
    steps: int | None
    seconds: float | None
    dollars: float | None


@dataclass(frozen=True, slots=True)
class ScalingRow(JsonAnswer):
    """The recipe on another number of GPUs, with as many sequences on each."""

    num_processes: int
    num_machines: int
    step_seconds: float | None
    tokens_per_second: float | None
    """Of all GPUs."""
    fits: Fits
    peak_reserved_gib: float
    efficiency: float | None
    """Speed of a GPU relative to that in the smallest number of GPUs."""


@dataclass(frozen=True, slots=True)
class SmallestHardware(JsonAnswer):
    """The least hardware that fits, and the recipe for it."""

    gpu: str
    num_processes: int
    recipe_changes: dict[str, object]


@dataclass(frozen=True, slots=True)
class MeasuredPlan(JsonAnswer):
    """A recipe that was trained for a few steps, beside its prediction. Unknown values are
    None."""

    recipe_changes: dict[str, object]
    """Changed keys with their values, relative to the requested recipe; empty for that recipe."""
    batch: str
    outcome: str
    """`measured`, `out of memory`, `failed` or `not started`."""
    problem: str | None
    tokens_per_step: int
    """Of full rows, as planned."""
    predicted_step_seconds: float | None
    predicted_peak_reserved_gib: float
    step_seconds: float | None = None
    """Median of the counted steps."""
    tokens_per_second_per_device: float | None = None
    """Median of the counted steps, of the tokens that were computed: rows may be shorter than
    `data.max_length`."""
    num_processes: int | None = None
    peak_reserved_gib: float | None = None
    """Of rank 0."""

    @property
    def tokens_per_second(self) -> float:
        """Over all devices; 0 if nothing was measured."""
        return (self.tokens_per_second_per_device or 0.0) * (self.num_processes or 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """All predictions of a recipe. `as_dict` is plan.json and `plan --json`. Unknown values are None; sizes
    are GiB per device."""

    recipe: str
    gpu: str
    num_processes: int
    num_machines: int
    fits: Fits
    fits_because: str
    peak_allocated_gib: float
    peak_reserved_gib: float
    device_gib: float
    """Reserved memory, CUDA context and NCCL, as shown by nvidia-smi."""
    usable_gib: float
    where: str
    components: dict[str, float]
    """At the peak, with CUDA context and NCCL in addition; the sum of the others is `peak_allocated_gib`."""
    step_seconds: float | None
    tokens_per_second_per_device: float | None
    mfu: float | None
    time: StepParts | None
    communication_gib: SentGib
    host_gib_per_machine: HostGib
    disk_gib: DiskGib
    run: RunTotals
    batch: str
    rate: str
    """Learning rate at the start, at its peak, and at the end."""
    tokens_per_step: int
    accuracy: dict[str, FigureError]
    """Error of a figure on published runs, by its name."""
    unknown: list[str]
    assumptions: list[str]
    recipe_changes: dict[str, object]
    """Changed keys with their values, relative to the requested recipe; empty for that recipe."""
    place: int | None = None
    """Rank from 1, among all recipes, including those that are not shown."""
    equal_from: int | None = None
    """The place of the first recipe whose step takes the same time within the median error of `accuracy`; of
    these, the one with least memory is first. None if no other recipe is equal to this one."""
    decided: dict[str, str] = field(default_factory=dict[str, str])
    """Values that the recipe leaves to the plan, by key, each with its reason."""
    alternatives: tuple[Plan, ...] = ()
    scaling: tuple[ScalingRow, ...] = ()
    best_because: str | None = None
    smallest_hardware: SmallestHardware | None = None
    other_trainings: tuple[Plan, ...] = ()
    """LoRA and QLoRA, if the recipe does not fit or fits only with offloading. They train another model:
    nothing applies them."""
    measured: tuple[MeasuredPlan, ...] = ()
    """Of `--measure`, the fastest first."""
    experts: tuple[ExpertRow, ...] = ()
    """The recipe with the experts of each layer divided among 1, 2, 4 and 8 ranks, as far as they can be, and
    its own number of ranks; empty for a dense model."""
    experts_because: str | None = None
    """What dividing the experts gains and costs."""
    memory: Memory | None = None
    """Includes the timeline; not in the JSON."""

    def as_dict(self) -> dict[str, object]:
        """Return the plan as JSON, without alternatives of alternatives and without timeline."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "memory"}
        found: dict[str, object] = {
            name: value.as_dict() if isinstance(value, JsonAnswer) else value
            for name, value in values.items()
        }
        found["accuracy"] = {name: error.as_dict() for name, error in self.accuracy.items()}
        found["scaling"] = [row.as_dict() for row in self.scaling]
        found["measured"] = [each.as_dict() for each in self.measured]
        found["experts"] = [row.as_dict() for row in self.experts]
        for name in ("alternatives", "other_trainings"):
            found[name] = [_short(other) for other in getattr(self, name)]
        return found

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """Return the plan of `as_dict` without other plans. Raises: TypeError, ValueError or KeyError for
        other fields."""
        parts: dict[str, Any] = {
            "time": None if found["time"] is None else StepParts(**found["time"]),
            "communication_gib": SentGib(**found["communication_gib"]),
            "host_gib_per_machine": HostGib(**found["host_gib_per_machine"]),
            "disk_gib": DiskGib(**found["disk_gib"]),
            "run": RunTotals(**found["run"]),
            "accuracy": {name: FigureError(**error) for name, error in found["accuracy"].items()},
        }
        return cls(**{name: value for name, value in found.items() if name not in _OF_THE_SEARCH} | parts)


_OF_THE_SEARCH = (
    "alternatives",
    "other_trainings",
    "scaling",
    "best_because",
    "smallest_hardware",
    "measured",
    "experts",
    "experts_because",
)


SHORT = (
    "place",
    "equal_from",
    "recipe_changes",
    "fits",
    "fits_because",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "device_gib",
    "step_seconds",
    "tokens_per_second_per_device",
    "mfu",
    "components",
    "num_processes",
    "batch",
)


def _short(plan: Plan) -> dict[str, object]:
    return {**{name: getattr(plan, name) for name in SHORT}, "is_yours": not plan.recipe_changes}


def plan(
    recipe: Recipe,
    hardware: Hardware,
    trace: Trace,
    *,
    rows: int | None = None,
    tokens: int | None = None,
    segments: Segments = "expandable",
    efficiency: Efficiency | None = None,
    recipe_changes: dict[str, object] | None = None,
) -> Plan:
    """Predict a resolved `recipe` on `hardware` from the `trace` of its step. Pure.

    `rows` and `tokens` are those of the prepared training data, if known; `efficiency` is calibrated on this
    machine.
    """
    efficiency = efficiency or efficiency_of(hardware)
    trace = full_depth(trace)
    found = fit(trace, hardware, segments=segments, reserved_factor=efficiency.reserved_factor)
    unknown: list[str] = []
    timed: StepTime | None = None
    try:
        timed = step_time(trace, hardware, recipe.launch.num_machines, efficiency)
    except UnknownFigure as error:
        unknown.append(f"step_seconds: {error}")
    row_tokens = trace.shapes.micro_batch * trace.shapes.accumulation * trace.shapes.tokens
    speed = row_tokens / trace.shapes.topology.row_size / timed.step_seconds if timed else None
    return Plan(
        recipe=recipe.name or "recipe",
        gpu=hardware.name,
        num_processes=recipe.world_size,
        num_machines=recipe.launch.num_machines,
        fits=found.answer,
        fits_because=found.because,
        peak_allocated_gib=found.memory.peak_allocated_bytes / GIB,
        peak_reserved_gib=found.reserved_bytes / GIB,
        device_gib=found.device_bytes / GIB,
        usable_gib=found.usable_bytes / GIB,
        where=found.memory.where,
        components=_components(found, hardware),
        memory=found.memory,
        step_seconds=timed.step_seconds if timed else None,
        tokens_per_second_per_device=speed,
        mfu=_mfu(trace, hardware, speed, unknown),
        time=_time(timed),
        communication_gib=_communication(timed),
        host_gib_per_machine=_host(recipe, trace, found.memory),
        disk_gib=_disk(recipe, trace, tokens, unknown),
        run=_run(recipe, hardware, timed, rows, unknown),
        batch=batch_arithmetic(recipe),
        rate=rate_line(recipe, total_steps(recipe, rows)).removeprefix("rate: "),
        tokens_per_step=row_tokens * recipe.data_size,
        accuracy=accuracy(recipe.launch.num_machines),
        unknown=unknown,
        assumptions=assumptions_of(recipe, trace, hardware, efficiency, segments),
        recipe_changes=recipe_changes or {},
    )


def _components(found: Fit, hardware: Hardware) -> dict[str, float]:
    """Return GiB at the peak by component, with those outside the allocator."""
    components = {name: size / GIB for name, size in found.memory.components.items()}
    if hardware.name == CPU:
        components["process"] = found.outside_bytes / GIB
    else:
        components["CUDA context"] = CONTEXT_BYTES / GIB
    if found.outside_bytes > CONTEXT_BYTES and hardware.name != CPU:
        components["NCCL"] = (found.outside_bytes - CONTEXT_BYTES) / GIB
    return components


def model_size(trace: Trace) -> ModelDimensions | None:
    """Return the dimensions of the model; None if the number of active parameters is unknown."""
    counts = trace.counts
    if counts.active_parameters is None:
        return None
    return ModelDimensions(
        counts.active_parameters,
        counts.trained_parameters,
        counts.layers,
        counts.attention_heads,
        counts.head_dim,
    )


def _mfu(trace: Trace, hardware: Hardware, speed: float | None, unknown: list[str]) -> float | None:
    peak = hardware.peak_flops("bf16")
    if peak is None:
        unknown.append(f"mfu: {hardware.name} has no known dense bf16 peak")
    size = model_size(trace)
    if size is None:
        unknown.append("mfu: the model's configuration does not define the number of experts per token")
    return None if speed is None or size is None else mfu(size, float(trace.shapes.tokens), speed, peak)


def _time(timed: StepTime | None) -> StepParts | None:
    if timed is None:
        return None
    return StepParts(
        phases=timed.phases,
        compute_seconds=timed.compute_seconds,
        communication_seconds=timed.communication_seconds,
        exposed_seconds=timed.exposed_seconds,
        waiting_for_host_seconds=timed.issue_seconds,
    )


def _communication(timed: StepTime | None) -> SentGib:
    if timed is None:
        return SentGib(None, None)
    return SentGib(timed.volume.machine_link_bytes / GIB, timed.volume.network_bytes / GIB)


def _host(recipe: Recipe, trace: Trace, memory: Memory) -> HostGib:
    host = host_memory(recipe, trace, memory)
    return HostGib(
        host.peak_bytes / GIB, host.loading_bytes / GIB, host.offloaded_bytes / GIB, host.staging_bytes / GIB
    )


def _disk(recipe: Recipe, trace: Trace, tokens: int | None, unknown: list[str]) -> DiskGib:
    needed = disk(recipe, trace, tokens)
    if needed.cache_bytes is None:
        unknown.append("disk_gib.cache: the data is not prepared")
    most = (
        None if needed.most_checkpoints is None else needed.most_checkpoints * needed.checkpoint_bytes / GIB
    )
    cache = None if needed.cache_bytes is None else needed.cache_bytes / GIB
    return DiskGib(needed.checkpoint_bytes / GIB, most, needed.merged_bytes / GIB, cache)


def _run(
    recipe: Recipe, hardware: Hardware, timed: StepTime | None, rows: int | None, unknown: list[str]
) -> RunTotals:
    steps = total_steps(recipe, rows)
    if steps is None:
        unknown.append("run.steps: the number of rows is known after the data is prepared")
    seconds = steps * timed.step_seconds if steps is not None and timed else None
    price = hardware.dollars_per_hour
    cost = seconds / 3600 * recipe.world_size * price if seconds is not None and price is not None else None
    if price is None:
        unknown.append("run.dollars: no price is given (`--dollars-per-hour PRICE`)")
    return RunTotals(steps, seconds, cost)
