"""Plan a recipe: what it needs, how fast it is, and which recipe is best, before the first GPU-hour.

Other jobs use the steps: decide what a recipe leaves to a plan, trace in a child process, predict, search, learn from a run.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from fsdp_tune.core import devices
from fsdp_tune.core.atomic import DISK, check_output_file, write_file
from fsdp_tune.core.command import Target
from fsdp_tune.core.devices import Device, Machine, installed_versions, nvidia_driver, this_machine
from fsdp_tune.core.errors import FsdpTuneError, Notice, failed_error, usage_error
from fsdp_tune.core.gpus import CPU, Hardware, cpu_rank, detect, known_hardware
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.recipes import check_cache, resolve_recipe
from fsdp_tune.planner import tracing as traces
from fsdp_tune.planner.gpu_file import find_or_read_hardware
from fsdp_tune.planner.predict.calibration import Measured, calibrated_efficiency, known_calibrations, learn, read_run, setting_of
from fsdp_tune.planner.predict.experts import expert_rows, why_experts
from fsdp_tune.planner.predict.memory import disk
from fsdp_tune.planner.predict.mixture import LOADS_ASSUMED
from fsdp_tune.planner.predict.predict import Plan, ScalingRow, SmallestHardware
from fsdp_tune.planner.predict.predict import plan as predict
from fsdp_tune.planner.predict.timing import Efficiency, UnknownFigure
from fsdp_tune.planner.search.alternatives import devices_of_machine, differences
from fsdp_tune.planner.search.candidates import PlannedRecipe, Search
from fsdp_tune.planner.search.scaling import forced_changes, machines_for, scaling_table
from fsdp_tune.planner.search.search import (
    RECOMPUTATION,
    RESHARDING,
    Decided,
    MemoryBudget,
    Ranking,
    decide_by_memory,
    other_trainings,
    rank_recipes,
    smallest_hardware,
    undecided,
)
from fsdp_tune.planner.search.search import decide as decide_with_trace
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.planner.tracing import keep_plan, kept_plan, plan_key
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.read.overrides import OptionOverride
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.rules.contradictions import INPUTS
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import World
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
        facts, ranks = devices.host(), recipe.local_world_size
        known = [size for size in (facts["memory_bytes"], facts["memory_limit_bytes"]) if size is not None]
        return MemoryBudget(f"the host's memory, shared by {ranks} ranks", min(known) // ranks) if known else None
    if gpu is None:
        return None
    if (hardware := detect(gpu.name)) is not None:
        return MemoryBudget.of(hardware)
    return MemoryBudget(gpu.name, gpu.memory_bytes) if gpu.memory_bytes is not None else None


def decide_open_keys(recipe: Recipe, budget: MemoryBudget | None, *, offline: bool = False) -> Decided:
    """Decide what a resolved recipe leaves to a plan, from a trace in a child process or in the cache.

    The notices name what was decided without knowing the memory.
    """
    with traces.Tracing(_cache_of(recipe) / "traces", offline=offline) as tracing:
        return decide_with_trace(recipe, budget, _one_trace(tracing))


def decisions(decided: Decided) -> dict[str, str]:
    """Return key → the value that was decided, with the reason."""
    values = {key: value_of(decided.recipe, key) for key in decided.reasons}
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return {key: f"{words[key]} ({reason})" for key, reason in decided.reasons.items()}


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
    _trace: Trace | None = field(default=None)

    @property
    def efficiency(self) -> Efficiency:
        """The constants of this GPU for this recipe, calibrated if this machine has measured such a one. Raises: as `trace`."""
        setting = setting_of(self.recipe, self.trace(), installed_versions(["torch"])["torch"], self._driver)
        return calibrated_efficiency(_cache_of(self.recipe), self.hardware, setting)

    @cached_property
    def _driver(self) -> str | None:
        return nvidia_driver()

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
        if undecided(self.recipe):
            found = decide_by_memory(self.recipe, MemoryBudget.of(self.hardware), _one_trace(self._tracing))
            self.recipe = found.recipe
        return found

    def trace(self) -> Trace:
        """Trace the recipe itself, once. Raises: FsdpTuneError if its model is not found or cannot be traced."""
        if self._trace is None:
            self._trace = _one_trace(self._tracing)(self.recipe)
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
        return replace(made, experts=rows, experts_because=why_experts(rows, self.recipe), assumptions=[*made.assumptions, *assumed])

    def plan_other(self, recipe: Recipe) -> Plan:
        """Plan another resolved recipe on the same GPUs. Raises: FsdpTuneError if it cannot be traced."""
        return predict(recipe, self.hardware, _one_trace(self._tracing)(recipe), efficiency=self.efficiency)

    def plan_once(self) -> Plan:
        """Return the plan kept from an earlier command, without its timeline, or make and keep it."""
        cache = _cache_of(self.recipe) / "plans"
        calibrations = (known_calibrations(_cache_of(self.recipe), self.hardware), self._driver)
        key = plan_key(self.recipe, self.hardware, calibrations, traces.trace_key(self.recipe, exact=self.exact, vocabulary=None))
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
        """Learn this GPU's speed from a run and use it here and in later plans. Return a line that reports it."""
        measured = read_run(run, self.hardware)
        factor = self.learn(measured)
        return f"{self.hardware.name} took {factor:.2f} of the predicted time in {measured.steps} steps of {run}; kept for later plans"

    def learn(self, measured: Measured) -> float:
        """Learn this GPU's speed, use it here and in later plans, and return measured ÷ predicted time."""
        with replace(self, recipe=measured.recipe, _trace=None) as own:
            return learn(_cache_of(self.recipe), self.hardware, measured, own.trace())[1]


# ---- The plan of a run on this machine. Nothing is predicted on a CPU, or for a GPU that is not in the table.


class MachinePlan(NamedTuple):
    """The plan of a run on this machine."""

    decided: Decided
    prediction: Plan | None
    """None if nothing is predicted; a notice gives the reason."""
    notices: list[Notice]


def plan_here(recipe: Recipe) -> MachinePlan:
    """Decide what a resolved recipe leaves to a plan, and predict it for this machine's GPU.

    A trace that fails stops no training.
    """
    gpu = visible_gpu(recipe)
    decided = decide_open_keys(recipe, budget_of(recipe, gpu)) if undecided(recipe) else Decided(recipe, {})
    if recipe.launch.device != "cuda":
        return MachinePlan(decided, None, list(decided.notices))
    hardware = detect(gpu.name) if gpu is not None else None
    if hardware is None:
        name = gpu.name if gpu is not None else "this machine's GPU"
        why = f"{name} is not in the table of GPUs, so nothing is predicted"
        return MachinePlan(decided, None, [*decided.notices, Notice("not-planned", why)])
    try:
        with PlanSession(decided.recipe, hardware) as plans:
            return MachinePlan(decided, replace(plans.plan_once(), decided=decisions(decided)), list(decided.notices))
    except (FsdpTuneError, ValueError) as error:
        why = f"the step could not be traced, so nothing is predicted: {error}"
        return MachinePlan(decided, None, [*decided.notices, Notice("not-planned", why)])


def trace_of(recipe: Recipe) -> Trace | None:
    """Return the trace of a step of a resolved recipe; None if it cannot be traced here."""
    try:
        with traces.Tracing(_cache_of(recipe) / "traces") as tracing:
            return _one_trace(tracing)(recipe)
    except (FsdpTuneError, ValueError):
        return None


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """Return the size of a checkpoint of a resolved recipe, from a trace; None if the step cannot be traced here."""
    trace = trace_of(recipe)
    return None if trace is None else disk(recipe, trace, None).checkpoint_bytes


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


def plan(
    recipe: LoadedRecipe,
    *,
    gpu: str | None = None,
    num_gpus: int | None = None,
    target: Target | None = None,
    search: bool = True,
    exact: bool = False,
    calibrate: Path | None = None,
    dollars_per_hour: float | None = None,
    write: Path | None = None,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Plan:
    """Predict memory, time, communication and disk of a recipe from a traced step, and rank recipes that fit. Starts nothing.

    `gpu` is a name of the table or a YAML file, by default this machine's; `num_gpus` counts those of all machines. `target` ranks
    other recipes (fastest by default); without `search` only this recipe is planned. `exact` traces every layer. `calibrate` learns the
    GPU's speed from a finished run. `dollars_per_hour` is the price of one GPU. `write` is a file for the best recipe.
    Raises: FsdpTuneError. A recipe that does not fit is not an error: `fits` of the result is yes, tight or no.
    """
    with session(recipe):
        if not search and (target or write):
            raise usage_error("usage", "`--no-search` ranks nothing: leave it out, or `--target` and `--write`")
        if dollars_per_hour is not None and not 0 <= dollars_per_hour < math.inf:
            raise usage_error("usage", f"`--dollars-per-hour {dollars_per_hour}` is not a price", hint="--dollars-per-hour 2.5")
        if write is not None:
            check_output_file(write)
        planned = planned_here(recipe, gpu, num_gpus, allowed, observer)
        if dollars_per_hour is not None:
            planned = replace(planned, hardware=replace(planned.hardware, dollars_per_hour=dollars_per_hour))
        if planned.hardware.name == CPU:
            if target or write:
                raise usage_error("usage", "recipes are ranked for GPUs, and this one runs on the CPU", hint="name a GPU by `--gpu`")
            search = False
        with PlanSession(planned.recipe, planned.hardware, exact=exact) as plans:
            if calibrate is not None:
                observer.message(plans.calibrate(calibrate))
            decided = plans.decide()
            observer.notices(decided.notices)
            made = replace(plans.with_experts(plans.plan()), decided=planned.forced | decisions(decided))
            observer.planned(made, "recipe")
            return _ranked(plans, planned, made, target or "fastest", write, observer) if search else made


@dataclass(frozen=True, slots=True)
class PlannedHere:
    """The recipe for the GPUs that are planned, and the keys that the user wrote, by section."""

    recipe: Recipe
    hardware: Hardware
    written: dict[str, object]
    forced: dict[str, str]
    """Key → the value that `--num-gpus` forces, with the reason."""


def planned_here(loaded: LoadedRecipe, gpu: str | None, num_gpus: int | None, allowed: Allowed, observer: Observer) -> PlannedHere:
    plain = loaded.recipe
    on_cpu = gpu is None and plain.launch.device == "cpu"
    hardware = None if on_cpu else find_or_read_hardware(gpu) if gpu is not None else _own_gpu()
    options: list[OptionOverride] = []
    forced: dict[str, str] = {}
    if num_gpus is not None:
        machine_devices = devices_of_machine(hardware) if hardware is not None else num_gpus
        options, forced = _on_other_ranks(loaded, num_gpus, machine_devices)
    written = _with_options(loaded, options)
    if hardware is not None and plain.launch.device != "cuda":  # GPUs are planned, whatever the recipe runs on here
        options.append(OptionOverride(f"plan for {hardware.name}", "launch.device=cuda"))
    resolution = resolve_recipe(_with_options(loaded, options), allowed, observer, planned=hardware)
    check_cache(resolution.recipe)
    observer.notices(resolution.notices)
    if hardware is None:
        budget = budget_of(resolution.recipe, None)
        if budget is None:
            raise usage_error("no-gpu-named", "the memory of this machine is not known", hint="name a GPU by `--gpu`")
        hardware = cpu_rank(budget.usable_bytes)
    return PlannedHere(resolution.recipe, hardware, written.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True), forced)


def _with_options(loaded: LoadedRecipe, options: list[OptionOverride]) -> LoadedRecipe:
    return parse_recipe(loaded.text, loaded.path, loaded.overrides, name=loaded.recipe.name, options=options, unneeded=INPUTS)


def _on_other_ranks(loaded: LoadedRecipe, num_gpus: int, machine_devices: int) -> tuple[list[OptionOverride], dict[str, str]]:
    """Return the keys that `--num-gpus` sets, and those that it forces. Keys given by `--set` are left to contradict."""
    machines = machines_for(num_gpus, machine_devices)
    given = {override.partition("=")[0].strip() for override in loaded.overrides}
    forced = {key: value for key, value in forced_changes(loaded.recipe, World(num_gpus, machines)).items() if key not in given}
    option = f"--num-gpus {num_gpus}"
    keys = {"launch.num_processes": num_gpus, "launch.num_machines": machines} | forced
    options = [OptionOverride(option, f"{key}={value if isinstance(value, str) else json.dumps(value)}") for key, value in keys.items()]
    instead = {key: json.dumps(value_of(loaded.recipe, key)) for key in forced}
    return options, {key: f"{json.dumps(value)} instead of {instead[key]}, for `{option}`" for key, value in forced.items()}


def _own_gpu() -> Hardware:
    name = this_machine("auto").device_name
    found = detect(name)
    if found is not None:
        return found
    problem = f"this machine's {name} is not in the table" if name else "this machine shows no GPU"
    raise usage_error("no-gpu-named", problem, hint=f"name one by `--gpu`: {', '.join(known_hardware())}, or a YAML file")


def _ranked(plans: PlanSession, planned: PlannedHere, made: Plan, target: Target, write: Path | None, observer: Observer) -> Plan:
    """Add the ranked recipes and the scaling table to a plan, and write the best recipe."""
    with observer.progress("trying recipes", None, "recipes") as bar:
        found = plans.search(target, lambda _changes: bar.advance())
    best = found.ranked[0].recipe if found.ranked and found.ranked[0].plan.fits != "no" else None
    smallest = plans.smallest_hardware(found.ranked) if best is None else None
    alternatives = tuple(each.plan for each in found.ranked)
    others = plans.other_trainings() if best is None or best.fsdp.offload_params else ()
    made = replace(made, alternatives=alternatives, best_because=found.because, smallest_hardware=smallest, other_trainings=others)
    observer.planned(made, "ranking")
    made = replace(made, scaling=tuple(plans.scaling()))
    observer.planned(made, "scaling")
    if write is not None:
        if best is None:
            raise usage_error("nothing-fits", f"no recipe fits {made.num_processes} × {made.gpu}, so there is none to write")
        why = [f"# {made.recipe} for {made.num_processes} × {made.gpu}, as `fsdp-tune plan` ranks it.", f"# Why: {made.best_because}."]
        write_file(write, recipe_text(plans, write, planned.written, found.ranked[0], why))
        observer.message(f"the best recipe is {write}")
    return made


_BATCH = ("training.global_batch_size", "training.per_device_train_batch_tokens")
"""Keys that the search resets and that `_settle_batch` keeps."""


def recipe_text(plans: PlanSession, path: Path, written: dict[str, object], best: PlannedRecipe, why: Sequence[str]) -> str:
    """Return the text of the file `path`. It begins with the comments `why`.

    `written` are the keys that the user wrote, by section; they keep their place. Raises: FsdpTuneError if the text is not a recipe
    that loads as `best` and fits.
    """
    body = recipe_body(plans.recipe, written, best)
    again = _load(body, path, best.recipe, plans.hardware)
    planned = plans.plan_other(again)
    if planned.fits == "no":
        raise failed_error("written-recipe-differs", f"the recipe for {path} does not fit when it is planned again: {planned.fits_because}")
    return "\n".join([*why, _predicted(planned), "", body])


def recipe_body(base: Recipe, written: dict[str, object], best: PlannedRecipe) -> str:
    """Return a ranked recipe as its user would write it, with the changed keys marked. `base` is the resolved recipe of the user."""
    changes = best.plan.recipe_changes
    document = _document(written, base, best.recipe, changes)
    return _marked(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), changes)


def _document(written: Mapping[str, object], base: Recipe, best: Recipe, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of the file: the user's, less those that `best` has otherwise, and the changes."""
    document: dict[str, Any] = copy.deepcopy(dict(written))
    sections = {section: cast("dict[str, object]", keys) for section, keys in document.items() if isinstance(keys, dict)}
    for section, keys in sections.items():
        for name in list(keys):
            key = f"{section}.{name}"
            if key not in (*changes, *_BATCH) and value_of(best, key) != value_of(base, key):
                del keys[name]
    if document.get("launch", {}).get("device") == "cpu":
        document["launch"]["device"] = best.launch.device
    for key in (RECOMPUTATION, RESHARDING):  # a plan might decide differently for another micro-batch
        section, name = key.split(".")
        if document.get(section, {}).get(name) == "auto":
            document[section][name] = value_of(best, key)
    size = {"launch.num_processes": best.world_size, "launch.num_machines": best.launch.num_machines}
    for key, value in {**changes, **size}.items():
        section, name = key.split(".")
        document.setdefault(section, {})[name] = value
    _settle_batch(document.setdefault("training", {}), best)
    return document


def _settle_batch(training: dict[str, object], best: Recipe) -> None:
    """Write the batch as the user did: by tokens, by the global batch, or by accumulation."""
    if training.get("per_device_train_batch_tokens") is not None:
        training.pop("per_device_train_batch_size", None)
    elif training.get("global_batch_size") is not None:
        training["global_batch_size"] = best.global_batch_size
        training.pop("gradient_accumulation_steps", None)
    else:
        training["gradient_accumulation_steps"] = best.training.gradient_accumulation_steps


def _load(text: str, path: Path, best: Recipe, hardware: Hardware) -> Recipe:
    """Load and resolve the text as `train` would. Raises: FsdpTuneError if it is refused or is not `best`."""
    loaded = parse_recipe(text, path, unneeded=INPUTS)
    machine = Machine(best.launch.device, best.world_size, 1, hardware.name, hardware.capability)
    again = resolve(loaded.recipe, machine, cwd=Path.cwd(), assume=best.launch.device, positions=loaded.positions).recipe
    if found := differences(best, again):
        raise failed_error("written-recipe-differs", f"the recipe for {path} is not the one that was planned: {', '.join(found)}")
    return again


def _predicted(planned: Plan) -> str:
    predicted = f"# Predicted: {planned.device_gib:.1f} of {planned.usable_gib:.1f} GiB on each GPU (fits: {planned.fits})"
    if planned.step_seconds is not None and planned.tokens_per_second_per_device is not None:
        predicted += f", {planned.step_seconds:.3g} s a step, {planned.tokens_per_second_per_device:,.0f} tokens a second and GPU"
    return f"{predicted}."


def _marked(text: str, changes: Mapping[str, object]) -> str:
    """Mark the lines of changed keys; keys of a section are indented by two."""
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        key = line.split(":")[0]
        if not line.startswith(" "):
            section = key
        is_changed = line.startswith("  ") and f"{section}.{key.strip()}" in changes
        lines.append(f"{line}  # changed by plan" if is_changed else line)
    return "\n".join(lines) + "\n"
