"""Plans of one recipe on one kind of GPU, from traces in a child process: what a recipe leaves to a plan is
decided, and the recipe is predicted, searched and learned from."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_tune.core import devices, host
from fsdp_tune.core.command import Target
from fsdp_tune.core.devices import Device, nvidia_driver
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.gpus import Hardware, detect
from fsdp_tune.core.package_versions import installed_versions
from fsdp_tune.planner import tracing as traces
from fsdp_tune.planner.predict.calibration import (
    CalibrationSetting,
    Measured,
    calibrated_efficiency,
    efficiency_for,
    known_calibrations,
    learn,
    learn_memory,
    read_run,
    setting_of,
)
from fsdp_tune.planner.predict.efficiency import Efficiency, UnknownFigure
from fsdp_tune.planner.predict.experts import expert_rows, why_experts
from fsdp_tune.planner.predict.mixture import LOADS_ASSUMED
from fsdp_tune.planner.predict.predict import Plan, ScalingRow, SmallestHardware
from fsdp_tune.planner.predict.predict import plan as predict
from fsdp_tune.planner.search.auto_recomputation import Decided, MemoryBudget, decide_by_memory, undecided
from fsdp_tune.planner.search.auto_recomputation import decide as decide_with_trace
from fsdp_tune.planner.search.candidates import PlannedRecipe, Search
from fsdp_tune.planner.search.other_trainings import other_trainings
from fsdp_tune.planner.search.scaling import scaling_table
from fsdp_tune.planner.search.search import Ranking, rank_recipes
from fsdp_tune.planner.search.smallest_hardware import smallest_hardware
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.planner.tracing import keep_plan, kept_plan, plan_key
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe


def visible_gpu(recipe: Recipe) -> Device | None:
    """Return this machine's first accelerator, or None if it is not of the recipe's kind."""
    if recipe.launch.device == "cpu":
        return None
    visible = devices.visible_devices(os.environ)
    return visible[0] if visible and visible[0].kind == recipe.launch.device else None


def budget_of(recipe: Recipe, gpu: Device | None) -> MemoryBudget | None:
    """Return the memory of a rank: its GPU's by the table or the driver, or its share of the host's. None if
    it is unknown."""
    if recipe.launch.device == "cpu":
        facts, ranks = host.host(), recipe.local_world_size
        known = [size for size in (facts["memory_bytes"], facts["memory_limit_bytes"]) if size is not None]
        return (
            MemoryBudget(f"the host's memory, shared by {ranks} ranks", min(known) // ranks)
            if known
            else None
        )
    if gpu is None:
        return None
    if (hardware := detect(gpu.name)) is not None:
        return _calibrated_budget(recipe, hardware, functools.cache(nvidia_driver))
    return MemoryBudget(gpu.name, gpu.memory_bytes) if gpu.memory_bytes is not None else None


def _calibrated_budget(recipe: Recipe, hardware: Hardware, driver: Callable[[], str | None]) -> MemoryBudget:
    """Return the memory of a GPU, with what was learned about its allocator on this machine. `driver` is
    called where something is left to decide, and what was learned is then read once."""
    known = functools.cache(functools.partial(known_calibrations, cache_of(recipe), hardware))

    def factor(tried: Recipe, trace: Trace) -> float:
        return efficiency_for(known(), hardware, _setting(tried, trace, driver())).reserved_factor

    return replace(MemoryBudget.of(hardware), reserved_factor=factor)


def _setting(recipe: Recipe, trace: Trace, driver: str | None) -> CalibrationSetting:
    return setting_of(recipe, trace, installed_versions(["torch"])["torch"], driver)


def decide_open_keys(recipe: Recipe, budget: MemoryBudget | None, *, offline: bool = False) -> Decided:
    """Decide what a resolved recipe leaves to a plan, from a trace in a child process or in the cache.

    The notices name what was decided without knowing the memory.
    """
    with traces.Tracing(cache_of(recipe) / "traces", offline=offline) as tracing:
        return decide_with_trace(recipe, budget, one_trace(tracing))


def decisions(decided: Decided) -> dict[str, str]:
    """Return key → the value that was decided, with the reason."""
    values = {key: value_of(decided.recipe, key) for key in decided.reasons}
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return {key: f"{words[key]} ({reason})" for key, reason in decided.reasons.items()}


def cache_of(recipe: Recipe) -> Path:
    assert recipe.data.cache_dir is not None, "the recipe is resolved"
    return Path(recipe.data.cache_dir)


def one_trace(tracing: traces.Tracing) -> Callable[[Recipe], Trace]:
    def traced(recipe: Recipe) -> Trace:
        (found,) = tracing([recipe])
        if isinstance(found, FsdpTuneError):
            raise found
        return found

    return traced


@dataclass
class PlanSession:
    """Plans of one recipe on one kind of GPU. A context: leaving it ends the process that traces."""

    recipe: Recipe
    hardware: Hardware
    exact: bool = False
    _trace: Trace | None = field(default=None)

    @property
    def efficiency(self) -> Efficiency:
        """The constants of this GPU for this recipe, calibrated if this machine has measured such a one.
        Raises: as `trace`."""
        setting = _setting(self.recipe, self.trace(), self._driver)
        return calibrated_efficiency(cache_of(self.recipe), self.hardware, setting)

    @functools.cached_property
    def _driver(self) -> str | None:
        return nvidia_driver()

    @functools.cached_property
    def _tracing(self) -> traces.Tracing:
        return traces.Tracing(cache_of(self.recipe) / "traces", exact=self.exact)

    def __enter__(self) -> PlanSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._tracing.close()

    def decide(self) -> Decided:
        """Decide for this GPU what the recipe leaves to a plan, and use it from now on. Raises: FsdpTuneError
        if it cannot be traced."""
        found = Decided(self.recipe, {})
        if undecided(self.recipe):
            budget = _calibrated_budget(self.recipe, self.hardware, lambda: self._driver)
            found = decide_by_memory(self.recipe, budget, one_trace(self._tracing))
            self.recipe = found.recipe
        return found

    def trace(self) -> Trace:
        """Trace the recipe itself, once. Raises: FsdpTuneError if its model is not found or cannot be
        traced."""
        if self._trace is None:
            self._trace = one_trace(self._tracing)(self.recipe)
        return self._trace

    def plan(self) -> Plan:
        return predict(self.recipe, self.hardware, self.trace(), efficiency=self.efficiency)

    def with_experts(self, made: Plan) -> Plan:
        """Add to the plan of this recipe what other numbers of ranks that divide the experts would change."""
        try:
            rows = expert_rows(self.trace(), self.hardware, self.recipe.launch.num_machines, self.efficiency)
        except UnknownFigure as error:
            return replace(made, unknown=[*made.unknown, f"experts: {error}"])
        assumed = [LOADS_ASSUMED] if rows and LOADS_ASSUMED not in made.assumptions else []
        return replace(
            made,
            experts=rows,
            experts_because=why_experts(rows, self.recipe),
            assumptions=[*made.assumptions, *assumed],
        )

    def plan_other(self, recipe: Recipe) -> Plan:
        """Plan another resolved recipe on the same GPUs. Raises: FsdpTuneError if it cannot be traced."""
        return predict(recipe, self.hardware, one_trace(self._tracing)(recipe), efficiency=self.efficiency)

    def plan_once(self) -> Plan:
        """Return the plan kept from an earlier command, without its timeline, or make and keep it."""
        cache = cache_of(self.recipe) / "plans"
        calibrations = (known_calibrations(cache_of(self.recipe), self.hardware), self._driver)
        key = plan_key(
            self.recipe,
            self.hardware,
            calibrations,
            traces.trace_key(self.recipe, exact=self.exact, vocabulary=None),
        )
        found = kept_plan(cache, key, self.recipe)
        if found is None:
            found = self.plan()
            keep_plan(cache, key, found)
        return found

    def _search(self, progress: Callable[[str], None] = lambda _text: None) -> Search:
        def traced(recipes: Sequence[Recipe]) -> Iterator[Trace | None]:
            found = (self._tracing.result(key) for key in self._tracing.request(recipes))
            return (None if isinstance(each, FsdpTuneError) else each for each in found)

        return Search(self.hardware, traced, efficiency=self.efficiency, progress=progress)

    def search(self, target: Target, progress: Callable[[str], None]) -> Ranking:
        """Rank other recipes; `progress` is called with the changes of each recipe that is tried."""
        return rank_recipes(self._search(progress), self.recipe, self.trace(), target)

    def smallest_hardware(self, ranked: Sequence[PlannedRecipe]) -> SmallestHardware | None:
        return smallest_hardware(self._search(), self.recipe, ranked)

    def other_trainings(self) -> tuple[Plan, ...]:
        return tuple(each.plan for each in other_trainings(self._search(), self.recipe))

    def scaling(self) -> list[ScalingRow]:
        return scaling_table(self._search(), self.recipe)

    def calibrate(self, run: Path) -> str:
        """Learn this GPU's speed from a run and use it here and in later plans. Return a line that reports
        it."""
        measured = read_run(run, self.hardware)
        factor = self.learn(measured)
        return (
            f"{self.hardware.name} took {factor:.2f} of the predicted time in {measured.steps} steps of "
            f"{run}; kept for later plans"
        )

    def learn(self, measured: Measured) -> float:
        """Learn this GPU's speed, use it here and in later plans, and return measured ÷ predicted time."""
        with replace(self, recipe=measured.recipe, _trace=None) as own:
            return learn(cache_of(self.recipe), self.hardware, measured, own.trace())[1]

    def learn_memory(self, runs: Sequence[Measured]) -> float | None:
        """Learn the reserved memory of runs of this model, use it here and in later plans.

        Returns the largest measured ÷ planned; None if no run has a figure.
        """
        traced = one_trace(self._tracing)
        with_traces = [(each, traced(each.recipe)) for each in runs if each.reserved_bytes is not None]
        return learn_memory(cache_of(self.recipe), self.hardware, with_traces)
