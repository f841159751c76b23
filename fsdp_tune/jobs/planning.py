"""Steps that jobs plan with: decide what a recipe leaves to a plan, trace in a child process, predict, search, learn from a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_tune.core import devices, environment
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.devices import Device
from fsdp_tune.core.errors import FsdpTuneError, Notice, usage_error
from fsdp_tune.core.gpus import Hardware, detect
from fsdp_tune.planner import tracing as traces
from fsdp_tune.planner.kept import keep_plan, kept_plan, plan_key
from fsdp_tune.planner.predict.calibration import calibrated_efficiency, learn, read_run
from fsdp_tune.planner.predict.efficiency import Efficiency
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.planner.predict.predict import plan as predict
from fsdp_tune.planner.search.pricing import PlannedRecipe, Search
from fsdp_tune.planner.search.recomputation import Decided, MemoryBudget, is_undecided, least_recomputation
from fsdp_tune.planner.search.recomputation import decide as decide_recomputation
from fsdp_tune.planner.search.scaling import scaling_table
from fsdp_tune.planner.search.search import Ranking, Target, other_trainings, rank_recipes, smallest_hardware
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.not_yet import value_of
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Prediction


def visible_gpu(recipe: Recipe) -> Device | None:
    """Return this machine's first accelerator, or None if it is not of the recipe's kind."""
    if recipe.launch.device == "cpu":
        return None
    visible = devices.visible_devices(os.environ)
    return visible[0] if visible and visible[0].kind == recipe.launch.device else None


def budget_of(recipe: Recipe, gpu: Device | None) -> MemoryBudget | None:
    """Return the memory of a rank: its GPU's by the table or the driver, or its share of the host's. None if it is unknown."""
    if recipe.launch.device == "cpu":
        facts, ranks = environment.host(), recipe.local_world_size
        known = [size for size in (facts["memory_bytes"], facts["memory_limit_bytes"]) if size is not None]
        return MemoryBudget(f"the host's memory, shared by {ranks} ranks", min(known) // ranks) if known else None
    if gpu is None:
        return None
    if (hardware := detect(gpu.name)) is not None:
        return MemoryBudget.of(hardware)
    return MemoryBudget(gpu.name, gpu.memory_bytes) if gpu.memory_bytes is not None else None


def decide(recipe: Recipe, budget: MemoryBudget | None, *, offline: bool = False) -> Decided:
    """Decide what a resolved recipe leaves to a plan, from a trace in a child process or in the cache.

    The notices name what was decided without knowing the memory.
    """
    with traces.Tracing(_cache_of(recipe) / "traces", offline=offline) as tracing:
        return decide_recomputation(recipe, budget, _one_trace(tracing))


def decisions(decided: Decided) -> dict[str, str]:
    """Return key → the value that was decided, with the reason."""
    return {key: f"{value_of(decided.recipe, key)} ({reason})" for key, reason in decided.reasons.items()}


def _cache_of(recipe: Recipe) -> Path:
    assert recipe.data.cache_dir is not None, "the recipe is resolved"
    return Path(recipe.data.cache_dir)


def _one_trace(tracing: traces.Tracing) -> Callable[[Recipe], Trace]:
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
    efficiency: Efficiency | None = None
    _trace: Trace | None = field(default=None)

    def __post_init__(self) -> None:
        self.efficiency = calibrated_efficiency(_cache_of(self.recipe), self.hardware)

    @cached_property
    def _tracing(self) -> traces.Tracing:
        return traces.Tracing(_cache_of(self.recipe) / "traces", exact=self.exact)

    def __enter__(self) -> PlanSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._tracing.close()

    def decide(self) -> Decided:
        """Decide for this GPU what the recipe leaves to a plan, and use it from now on. Raises: FsdpTuneError if it cannot be traced."""
        found = Decided(self.recipe, {})
        if is_undecided(self.recipe):
            found = least_recomputation(self.recipe, MemoryBudget.of(self.hardware), _one_trace(self._tracing))
            self.recipe = found.recipe
        return found

    def trace(self) -> Trace:
        """Trace the recipe itself, once. Raises: FsdpTuneError if its model is not found or cannot be traced."""
        if self._trace is None:
            self._trace = _one_trace(self._tracing)(self.recipe)
        return self._trace

    def plan(self) -> Plan:
        return predict(self.recipe, self.hardware, self.trace(), efficiency=self.efficiency)

    def plan_other(self, recipe: Recipe) -> Plan:
        """Plan another resolved recipe on the same GPUs. Raises: FsdpTuneError if it cannot be traced."""
        return predict(recipe, self.hardware, _one_trace(self._tracing)(recipe), efficiency=self.efficiency)

    def plan_once(self) -> Plan:
        """Return the plan kept from an earlier command, without its timeline, or make and keep it."""
        cache = _cache_of(self.recipe) / "plans"
        key = plan_key(self.recipe, self.hardware, self.efficiency, traces.trace_key(self.recipe, exact=self.exact, vocabulary=None))
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

    def smallest_hardware(self, ranked: Sequence[PlannedRecipe]) -> dict[str, Any] | None:
        return smallest_hardware(self._search(), self.recipe, ranked)

    def other_trainings(self) -> tuple[Plan, ...]:
        return tuple(each.plan for each in other_trainings(self._search(), self.recipe))

    def scaling(self) -> list[dict[str, Any]]:
        return scaling_table(self._search(), self.recipe)

    def calibrate(self, run: Path) -> str:
        """Learn this GPU's speed from a run and use it here and in later plans. Return a line that reports it."""
        measured = read_run(run, self.hardware)
        with replace(self, recipe=measured.recipe, efficiency=None, _trace=None) as own:
            self.efficiency, factor = learn(_cache_of(self.recipe), self.hardware, measured, own.trace())
        return f"{self.hardware.name} took {factor:.2f} of the predicted time in {measured.steps} steps of {run}; kept for later plans"


# ---- The plan of a run on this machine. Nothing is predicted on a CPU, or for a GPU that is not in the table.


def plan_here(recipe: Recipe) -> tuple[Decided, Plan | None, list[Notice]]:
    """Decide what a resolved recipe leaves to a plan, and predict it for this machine's GPU. Notices give the reason for no prediction.

    A trace that fails stops no training.
    """
    gpu = visible_gpu(recipe)
    decided = decide(recipe, budget_of(recipe, gpu)) if is_undecided(recipe) else Decided(recipe, {})
    if recipe.launch.device != "cuda":
        return decided, None, list(decided.notices)
    hardware = detect(gpu.name) if gpu is not None else None
    if hardware is None:
        name = gpu.name if gpu is not None else "this machine's GPU"
        why = f"{name} is not in the table of GPUs, so nothing is predicted"
        return decided, None, [*decided.notices, Notice("not-planned", why)]
    try:
        with PlanSession(decided.recipe, hardware) as plans:
            return decided, replace(plans.plan_once(), decided=decisions(decided)), list(decided.notices)
    except (FsdpTuneError, ValueError) as error:
        why = f"the step could not be traced, so nothing is predicted: {error}"
        return decided, None, [*decided.notices, Notice("not-planned", why)]


def refuse_what_cannot_fit(plan: Plan | None) -> None:
    """Raise a usage error for a recipe that needs more memory than the GPU has, even if the prediction is too high by its usual error."""
    if plan is not None and plan.fits == "no":
        raise usage_error(
            "does-not-fit",
            f"the recipe does not fit {plan.gpu}: {plan.fits_because}; the peak is at {plan.where}",
            ways_out=("`fsdp-tune plan` ranks recipes that fit", "`--ignore-plan` to try it all the same"),
        )


def keep_prediction(run: RunDir, plan: Plan | None) -> None:
    """Write plan.json; without a prediction remove that of an earlier start, which would be compared with this one's figures."""
    if plan is None:
        DISK.unlink(run.plan_json)
    else:
        Prediction.from_dict(plan.as_dict()).write(run.plan_json)
