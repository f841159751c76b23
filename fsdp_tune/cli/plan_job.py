"""The steps of `plan`: trace in a child process, predict, search, learn from a run, write the best recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_tune.cli.output import Screen
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.planner.search.search import Found, Ranking, Search, Target, rank_recipes

if TYPE_CHECKING:
    from fsdp_tune.planner.hardware.efficiency import Efficiency
    from fsdp_tune.planner.hardware.gpus import Hardware
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.planner.search.recomputation import Decided
    from fsdp_tune.planner.trace_format import Trace
    from fsdp_tune.planner.tracing import Tracing
    from fsdp_tune.recipe.schema import Recipe


@dataclass
class PlanJob:
    """One recipe on one kind of GPU. A context: leaving it ends the process that traces."""

    screen: Screen
    recipe: Recipe
    hardware: Hardware
    exact: bool = False
    rows: int | None = None
    tokens: int | None = None
    vocabulary: int | None = None
    efficiency: Efficiency | None = None
    _trace: Trace | None = field(default=None)

    def __post_init__(self) -> None:
        from fsdp_tune.planner.predict.calibration import learnt_efficiency

        self.efficiency = learnt_efficiency(self._cache(), self.hardware)

    def _cache(self) -> Path:
        assert self.recipe.data.cache_dir is not None, "the recipe is resolved"
        return Path(self.recipe.data.cache_dir)

    @cached_property
    def tracing(self) -> Tracing:
        from fsdp_tune.planner.tracing import Tracing

        return Tracing(self._cache() / "traces", exact=self.exact, vocabulary=self.vocabulary)

    def __enter__(self) -> PlanJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.tracing.close()

    def decide(self) -> Decided:
        """What the recipe leaves to a plan, for this GPU; the job goes on with it. FsdpTuneError where the recipe cannot be traced."""
        from fsdp_tune.cli.plan_auto import one_trace
        from fsdp_tune.planner.search.recomputation import Budget, Decided, is_open, least_recomputation

        found = Decided(self.recipe, {})
        if is_open(self.recipe):
            found = least_recomputation(self.recipe, Budget.of(self.hardware), one_trace(self.tracing))
            self.recipe = found.recipe
        return found

    def trace(self) -> Trace:
        """Of the recipe itself; FsdpTuneError where its model is not found or refuses the trace."""
        if self._trace is None:
            (found,) = self.tracing([self.recipe])
            if isinstance(found, FsdpTuneError):
                raise found
            self._trace = found
        return self._trace

    def plan_it(self) -> Plan:
        return self._plan_of(self.recipe, self.trace())

    def plan_other(self, recipe: Recipe) -> Plan:
        """Plan another resolved recipe on the same GPUs. Raises: FsdpTuneError if it cannot be traced."""
        (found,) = self.tracing([recipe])
        if isinstance(found, FsdpTuneError):
            raise found
        return self._plan_of(recipe, found)

    def _plan_of(self, recipe: Recipe, trace: Trace) -> Plan:
        from fsdp_tune.planner.predict.predict import plan

        return plan(recipe, self.hardware, trace, rows=self.rows, tokens=self.tokens, efficiency=self.efficiency)

    def plan_once(self) -> Plan:
        """`plan_it`, or what it said before of the same recipe on the same card; without a timeline then."""
        from fsdp_tune.planner.kept import keep_plan, kept_plan, plan_key
        from fsdp_tune.planner.tracing import trace_key

        assert self.rows is None, "a plan that knows the data is not kept"
        cache = self._cache() / "plans"
        trace = trace_key(self.recipe, exact=self.exact, vocabulary=self.vocabulary)
        key = plan_key(self.recipe, self.hardware, self.efficiency, trace)
        found = kept_plan(cache, key, self.recipe)
        if found is None:
            found = self.plan_it()
            keep_plan(cache, key, found)
        return found

    def _search(self) -> Search:
        def traced(recipes: Sequence[Recipe]) -> Iterator[Trace | None]:
            keys = self.tracing.ask(recipes)
            found = (self.tracing.result(key) for key in keys)
            return (None if isinstance(each, FsdpTuneError) else each for each in found)

        def progress(text: str) -> None:
            if self.screen.is_live:
                self.screen.say(f"trying {text}")

        return Search(self.hardware, traced, efficiency=self.efficiency, rows=self.rows, progress=progress)

    def search(self, target: Target) -> Ranking:
        return rank_recipes(self._search(), self.recipe, self.trace(), target)

    def smallest_hardware(self, ranked: Sequence[Found]) -> dict[str, Any] | None:
        from fsdp_tune.planner.search.search import smallest_hardware

        return smallest_hardware(self._search(), self.recipe, ranked)

    def scaling(self) -> list[dict[str, Any]]:
        from fsdp_tune.planner.search.scaling import scaling_table

        return scaling_table(self._search(), self.recipe)

    def calibrate(self, run: Path) -> None:
        """Learns from a run of this GPU, keeps what was learnt in the cache, and plans with it from now on."""
        from fsdp_tune.planner.predict.calibration import learn, read_run

        measured = read_run(run, self.hardware)
        with replace(self, recipe=measured.recipe, efficiency=None, _trace=None) as own:
            self.efficiency, factor = learn(self._cache(), self.hardware, measured, own.trace())
        self.screen.say(
            f"{self.hardware.name} took {factor:.2f} of the predicted time in {measured.steps} steps of {run}; kept for later plans"
        )
