"""Search the best recipe for given GPUs and a target: fastest, cheapest, longest rows. Pure.

Also resolves `fsdp.activation_checkpointing: auto`, the least recomputation with which a recipe fits, and
`fsdp.reshard_after_backward: auto`, false if it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_tune.core.command import Target
from fsdp_tune.core.errors import FsdpTuneError, Notice
from fsdp_tune.core.gpus import Hardware, known_hardware
from fsdp_tune.planner.predict.memory import Fit, cublas_workspace_bytes, fit, fit_into
from fsdp_tune.planner.predict.predict import SmallestHardware
from fsdp_tune.planner.search.alternatives import (
    CHECKPOINTING,
    OFFLOADS,
    Changes,
    batch_changes,
    changed,
    differences,
    fewer_gathers,
    is_refused,
    layouts,
    same_global_batch,
)
from fsdp_tune.planner.search.candidates import PlannedRecipe, Search, any_fits, rank, ranks_of_machine
from fsdp_tune.planner.search.long_rows import less_recomputed, longest
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.rules.limits import computes_in_fp8
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe

RECOMPUTATION, RESHARDING = "fsdp.activation_checkpointing", "fsdp.reshard_after_backward"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that one rank may use."""

    name: str
    usable_bytes: int
    workspace_bytes: int = 0
    reserved_factor: Callable[[Recipe, Trace], float] = lambda _recipe, _trace: 1.0
    """Return that of `fit_into` for a recipe."""

    @staticmethod
    def of(hardware: Hardware) -> MemoryBudget:
        return MemoryBudget(hardware.name, hardware.usable_bytes, cublas_workspace_bytes(hardware))

    def fit(self, recipe: Recipe, trace: Trace) -> Fit:
        """Return whether a recipe with this trace fits."""
        return fit_into(
            trace,
            self.usable_bytes,
            workspace_bytes=self.workspace_bytes,
            reserved_factor=self.reserved_factor(recipe, trace),
        )


@dataclass(frozen=True, slots=True)
class Decided:
    """A recipe with recomputation and resharding decided."""

    recipe: Recipe
    reasons: dict[str, str]
    """Reason of each value that was decided, by key; {} if none was."""
    notices: tuple[Notice, ...] = ()


def undecided(recipe: Recipe) -> list[str]:
    """Return the keys of a resolved recipe that a plan must decide."""
    return [key for key in (RECOMPUTATION, RESHARDING) if value_of(recipe, key) == "auto"]


def decide(recipe: Recipe, budget: MemoryBudget | None, trace: Callable[[Recipe], Trace]) -> Decided:
    """Return the recipe with the least recomputation that fits the budget, and then with fewer gathers if
    they fit.

    `recipe` is otherwise resolved. If the budget is unknown, or `trace` raises FsdpTuneError or ValueError
    (the model cannot be traced), everything is recomputed and resharded, with a notice: a slow run is better
    than one out of memory.
    """
    if not undecided(recipe):
        return Decided(recipe, {})
    if budget is None:
        return _decided_for_safety(recipe, "the memory of a rank is unknown")
    try:
        return decide_by_memory(recipe, budget, trace)
    except (FsdpTuneError, ValueError) as error:
        return _decided_for_safety(recipe, f"the step could not be traced: {error}")


def decide_by_memory(recipe: Recipe, budget: MemoryBudget, trace: Callable[[Recipe], Trace]) -> Decided:
    """Return `decide` for a known budget. Raises: FsdpTuneError or ValueError if the model cannot be
    traced."""
    found = Decided(recipe, {})
    if RECOMPUTATION in undecided(recipe):
        found = least_recomputation(
            with_resharding(recipe, after_backward=True) if RESHARDING in undecided(recipe) else recipe,
            budget,
            trace,
        )
    if RESHARDING not in undecided(recipe):
        return found
    kept = with_resharding(found.recipe, after_backward=False)
    fits = budget.fit(kept, trace(kept))
    if fits.answer == "yes":
        return replace(
            found, recipe=kept, reasons=found.reasons | {RESHARDING: f"it fits {budget.name}: {fits.because}"}
        )
    because = f"parameters that stay gathered between micro-batches would take {fits.because}"
    return replace(
        found,
        recipe=with_resharding(found.recipe, after_backward=True),
        reasons=found.reasons | {RESHARDING: because},
    )


def least_recomputation(recipe: Recipe, budget: MemoryBudget, trace: Callable[[Recipe], Trace]) -> Decided:
    """Return the first of none, selective and full that fits, or else the one with least memory. Later kinds
    are not traced, nor those that contradict another key."""
    tried: list[tuple[str, Fit]] = []
    for kind in CHECKPOINTING:
        other = with_recomputation(recipe, kind)
        if is_refused(other):
            continue
        found = budget.fit(other, trace(other))
        if found.answer == "yes":
            without = f"; {tried[-1][0]} would take {tried[-1][1].because}" if tried else ""
            return Decided(
                other,
                {RECOMPUTATION: f"the least that fits {budget.name}: {found.because}{without}"},
            )
        tried.append((kind, found))
    kind, least = min(tried, key=lambda each: each[1].device_bytes)
    message = (
        f"the recipe may not fit {budget.name} with any activation checkpointing; {kind} needs least: "
        f"{least.because}"
    )
    notice = Notice("recomputation-is-not-enough", message, hint="`fsdp-tune plan` ranks recipes that fit")
    return Decided(
        with_recomputation(recipe, kind), {RECOMPUTATION: f"needs least memory: {least.because}"}, (notice,)
    )


def with_recomputation(recipe: Recipe, kind: str) -> Recipe:
    return recipe.model_copy(
        update={"fsdp": recipe.fsdp.model_copy(update={"activation_checkpointing": kind})}
    )


def with_resharding(recipe: Recipe, *, after_backward: bool) -> Recipe:
    return recipe.model_copy(
        update={"fsdp": recipe.fsdp.model_copy(update={"reshard_after_backward": after_backward})}
    )


def _decided_for_safety(recipe: Recipe, why: str) -> Decided:
    reasons: dict[str, str] = {}
    notices: list[Notice] = []
    for key in undecided(recipe):
        if key == RECOMPUTATION:
            recipe, became, hint = with_recomputation(recipe, "full"), "full", "write none, selective or full"
            code = "recomputation-not-planned"
        else:
            recipe, became, hint = with_resharding(recipe, after_backward=True), "true", "write true or false"
            code = "resharding-not-planned"
        reasons[key] = f"{became}, to be safe: {why}"
        notices.append(Notice(code, f"`{key}: auto` became {became}: {why}", hint=hint))
    return Decided(recipe, reasons, tuple(notices))


SHOWN = 12
"""Number of alternatives in a plan."""


MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class Ranking:
    ranked: tuple[PlannedRecipe, ...]
    """Best first, at most `SHOWN`, each with its rank among all recipes; always includes the requested
    recipe."""
    because: str | None
    placed: tuple[PlannedRecipe, ...]
    """All recipes, best first."""

    def to_measure(self, count: int) -> list[PlannedRecipe]:
        """Return the `count` recipes that are predicted to be fastest and may fit, and the requested one.

        The order of the ranking is another: of recipes whose times are equal within the error, its first need
        least memory.
        """
        found = [each for each in sorted(self.placed, key=rank) if each.plan.fits != "no"]
        return found[:count] + [each for each in found[count:] if not each.plan.recipe_changes]


def rank_recipes(search: Search, base: Recipe, trace: Trace, target: Target) -> Ranking:
    """Rank recipes for a target, including `base`; `trace` is that of `base`."""
    search_for, order = {
        "fastest": (fastest, rank),
        "cheapest": (cheapest, _by_cost),
        "largest-context": (longest, _by_length),
    }[target]
    others = [each for each in search_for(search, base, trace) if not _is_same(each.recipe, base, trace)]
    placed = with_places(sorted([search.price(base, trace, base), *others], key=order))
    cut = next(each for each in placed if not each.plan.recipe_changes)
    shown = placed[:SHOWN] if cut in placed[:SHOWN] else [*placed[: SHOWN - 1], cut]
    return Ranking(tuple(shown), why_first(placed, target), tuple(placed))


def with_places(found: Sequence[PlannedRecipe]) -> list[PlannedRecipe]:
    """Return recipes that are sorted by the target with their places; those whose times are equal within the
    error by memory.

    Each recipe is compared with the fastest one of the last group on as many GPUs, so that the order within
    these is consistent; a group has the place of its fastest one.
    """
    groups: list[list[PlannedRecipe]] = []
    last: dict[int, list[PlannedRecipe]] = {}
    for each in found:
        group = last.get(each.plan.num_processes)
        if group is not None and _is_equal(group[0], each):
            group.append(each)
        else:
            groups.append([each])
            last[each.plan.num_processes] = groups[-1]
    placed: list[PlannedRecipe] = []
    for group in groups:
        first = len(placed) + 1
        for each in sorted(group, key=lambda one: one.plan.device_gib):
            equal_from = first if len(group) > 1 else None
            placed.append(
                PlannedRecipe(each.recipe, replace(each.plan, place=len(placed) + 1, equal_from=equal_from))
            )
    return placed


def _is_equal(faster: PlannedRecipe, slower: PlannedRecipe) -> bool:
    """Return whether two recipes take the same time per token within the median error of times, with rows of
    one length on as many GPUs; and whether both fit, or both are tight."""
    one, other = faster.plan, slower.plan
    kinds = [
        (each.plan.fits, each.plan.num_processes, each.recipe.data.max_length) for each in (faster, slower)
    ]
    if kinds[0] != kinds[1] or one.fits == "no":
        return False
    error = max(each.accuracy["step_seconds"].median_percent or 0.0 for each in (one, other))
    times = _device_seconds(faster), _device_seconds(slower)
    return times[1] < float("inf") and times[1] <= times[0] * (1 + error / 100)


def _is_same(recipe: Recipe, base: Recipe, trace: Trace) -> bool:
    """Return whether a candidate equals the requested recipe, whose `kernels.loss` may be auto."""
    changes = differences(base, recipe)
    loss = changes.pop("kernels.loss", None)
    return not changes and loss in (None, "chunked" if trace.facts.slice_tokens else "full")


def fastest(search: Search, base: Recipe, trace: Trace) -> list[PlannedRecipe]:
    """Plan all layouts; with offloading only if nothing fits without it."""
    found: list[PlannedRecipe] = []
    for offload in OFFLOADS:
        found += search.layouts(base, trace, layouts(base, offload=offload))
        if any_fits(found):
            break
    return [*found, *_with_fewer_gathers(search, base, trace, found)]


KEPT_LAYOUTS = 2


def _with_fewer_gathers(
    search: Search, base: Recipe, trace: Trace, found: Sequence[PlannedRecipe]
) -> list[PlannedRecipe]:
    """Plan the fastest layouts that accumulate once more, with parameters that stay gathered between
    micro-batches."""
    wanted: list[Changes] = []
    for each in sorted(found, key=rank):
        changes = fewer_gathers(each.recipe)
        if each.plan.fits != "yes" or len(wanted) == KEPT_LAYOUTS:
            break
        if changes is not None and changes not in wanted:
            wanted.append(changes)
    return search.layouts(base, trace, wanted) if wanted else []


def cheapest(search: Search, base: Recipe, trace: Trace) -> list[PlannedRecipe]:
    """Plan layouts on all GPUs and on smaller powers of two of them; where they recompute, also shared rows
    and slices of the MLP."""
    found: list[PlannedRecipe] = []
    size = base.world_size
    counts = [size, *(1 << power for power in range(size.bit_length() - 1, -1, -1) if 1 << power < size)]
    for number in counts:
        machines = max(1, -(-number // base.local_world_size))
        fewer = {"launch.num_processes": number, "launch.num_machines": machines, **same_global_batch(base)}
        other = base if number == size else changed(base, fewer)
        if other is None or other.global_batch_size != base.global_batch_size:
            continue
        search.progress(f"{number} GPUs")
        planned = fastest(search, other, trace)
        for each in [*planned, *less_recomputed(search, other, trace, planned)]:
            made = replace(each.plan, recipe_changes=differences(base, each.recipe))
            found.append(PlannedRecipe(each.recipe, made))
    return found


def _by_cost(found: PlannedRecipe) -> tuple[int, float]:
    """Sort key: fewest GPU-seconds per token first."""
    return rank(found)[0], _device_seconds(found)


def _by_length(found: PlannedRecipe) -> tuple[int, int, float, float]:
    """Sort key: longest rows first."""
    order, *others = rank(found)
    return order, -found.recipe.data.max_length, others[0], others[1]


def smallest_hardware(
    search: Search, base: Recipe, ranked: Sequence[PlannedRecipe]
) -> SmallestHardware | None:
    """Return hardware for a recipe that does not fit: as many larger GPUs, else more of the same; None if
    1,024 are not enough."""
    leanest = min(
        (each.recipe for each in ranked),
        key=lambda recipe: recipe.training.per_device_train_batch_size,
        default=base,
    )
    nothing = {"fsdp.activation_checkpointing_offload": False, "fsdp.offload_params": False}
    lean = changed(
        leanest, {"fsdp.sharding_strategy": "FULL_SHARD", "fsdp.activation_checkpointing": "full", **nothing}
    )
    one = lean and changed(lean, batch_changes(1, base.global_batch_size // base.data_size))
    traced = next(search.trace([one])) if one else None
    if one is None or traced is None:
        return None
    larger = sorted(known_hardware().values(), key=lambda gpu: gpu.usable_bytes)
    multiplies_in = "fp8" if computes_in_fp8(one) else one.compute_dtype
    for gpu in (
        gpu
        for gpu in larger
        if gpu.usable_bytes > search.hardware.usable_bytes and gpu.peak_flops(multiplies_in)
    ):
        if fit(traced, gpu).answer == "yes":
            return SmallestHardware(gpu.name, base.world_size, differences(base, one))
    return _more(search, base, one)


def _more(search: Search, base: Recipe, one: Recipe) -> SmallestHardware | None:
    number = base.world_size * 2
    while number <= MOST_DEVICES:
        machines = max(1, -(-number // ranks_of_machine(base, search.hardware)))
        batch = batch_changes(1, max(1, base.global_batch_size * base.topology.row_size // number))
        other = changed(one, {"launch.num_processes": number, "launch.num_machines": machines, **batch})
        traced = next(search.trace([other])) if other else None
        if other is not None and traced is not None and search.fit(traced).answer == "yes":
            return SmallestHardware(search.hardware.name, number, differences(base, other))
        number *= 2
    return None


LORA: Changes = {"lora.target_modules": "all-linear"}


NF4: Changes = {"quantization.load": "nf4"}


def other_trainings(search: Search, base: Recipe) -> list[PlannedRecipe]:
    """Plan LoRA and QLoRA for a recipe that does not fit, QLoRA alone if it has adapters, nothing if it is
    quantised: other trainings.

    Each has one sequence a forward and recomputes all layers. Parameters are offloaded only if neither fits
    without.
    """
    trainings = (
        [] if base.quantization is not None else [NF4] if base.lora is not None else [LORA, LORA | NF4]
    )
    found: list[PlannedRecipe] = []
    for offload in (False, True):
        found = list(_trainings(search, base, trainings, offload=offload))
        if any_fits(found):
            break
    return found


def _trainings(
    search: Search, base: Recipe, trainings: list[Changes], *, offload: bool
) -> Iterator[PlannedRecipe]:
    layout: Changes = {"fsdp.activation_checkpointing": "full", "fsdp.offload_params": offload}
    if base.world_size > 1:
        layout["fsdp.sharding_strategy"] = "FULL_SHARD"
    for keys in trainings:
        recipe = changed(base, keys | layout | batch_changes(1, base.global_batch_size // base.data_size))
        trace = next(search.trace([recipe])) if recipe is not None else None
        if recipe is not None and trace is not None:
            search.progress(adapter_method(keys))
            made = search.price(recipe, trace, base)
            yield PlannedRecipe(recipe, replace(made.plan, recipe_changes=keys | made.plan.recipe_changes))


def adapter_method(changes: Changes) -> str:
    return "QLoRA" if NF4.keys() <= changes.keys() else "LoRA"


def _device_seconds(found: PlannedRecipe) -> float:
    made = found.plan
    return (
        float("inf")
        if made.step_seconds is None
        else made.step_seconds * made.num_processes / made.tokens_per_step
    )


def why_first(ranked: Sequence[PlannedRecipe], target: Target) -> str | None:
    """Explain the first rank in a sentence with figures; None if nothing fits."""
    first = ranked[0].plan if ranked else None
    if first is None or first.fits == "no":
        return None
    fitting = [each for each in ranked if each.plan.fits == first.fits]
    what = {"fastest": "fastest", "cheapest": "cheapest", "largest-context": "longest"}[target]
    if first.step_seconds is None and target != "largest-context":
        what = f"smallest (the speed of {first.gpu} is unknown)"
    said = [
        f"the {what} of {len(fitting)} that fit"
        if first.fits == "yes"
        else "nothing fits with memory to spare; this one is tight"
    ]
    equal = [
        each for each in ranked if first.equal_from is not None and each.plan.equal_from == first.equal_from
    ]
    if equal:
        error = max(each.plan.accuracy["step_seconds"].median_percent or 0.0 for each in equal)
        said.append(
            f"{len(equal) - 1} more are equal within the median error of such times ({error:g} %) "
            "and need no less memory"
        )
    others = [each for each in fitting[1:] if each not in equal and _layout_of(each) != _layout_of(ranked[0])]
    if others and first.step_seconds is not None and others[0].plan.step_seconds is not None:
        more, gpus = _device_seconds(ranked[0]) / _device_seconds(others[0]) - 1, others[0].plan.num_processes
        is_same = gpus == first.num_processes
        than = (
            f"{abs(more):.0%} {'more' if more > 0 else 'less'} {'time' if is_same else 'GPU time'} per token"
        )
        on = "" if is_same else f", on {gpus} GPUs instead of {first.num_processes}"
        said.append(f"{than} than the next layout, {_name(others[0].recipe)}{on}")
    recipe = ranked[0].recipe
    possible = {each.recipe.fsdp.activation_checkpointing for each in ranked if each.plan.fits == "yes"}
    cheaper = [kind for kind in _less_recomputation(recipe) if kind not in possible]
    refused = [each for each in ranked if each.recipe.fsdp.activation_checkpointing in cheaper]
    if refused:
        least = min(refused, key=lambda each: each.plan.device_gib)
        without = least.recipe.fsdp.activation_checkpointing
        needed = f"{_name(least.recipe)} needs {least.plan.device_gib:.1f} GiB of {least.plan.usable_gib:.1f}"
        answer = "it is tight at best" if least.plan.fits == "tight" else "no recipe fits"
        said.append(f"with activation checkpointing `{without}` {answer} ({needed})")
    return "; ".join(said)


def _less_recomputation(recipe: Recipe) -> tuple[str, ...]:
    order = ("none", "selective", "full")
    return (
        order[: order.index(recipe.fsdp.activation_checkpointing)]
        if recipe.fsdp.activation_checkpointing in order
        else ()
    )


def _layout_of(found: PlannedRecipe) -> tuple[Any, ...]:
    fsdp, others = (
        found.recipe.fsdp,
        (found.recipe.topology.row_size, found.recipe.kernels.mlp_slice_tokens is None),
    )
    keys = (fsdp.sharding_strategy, fsdp.reshard_after_backward, fsdp.activation_checkpointing)
    return *keys, fsdp.activation_checkpointing_offload, fsdp.offload_params, *others


def _name(recipe: Recipe) -> str:
    fsdp = recipe.fsdp
    strategy = fsdp.sharding_strategy + (" + offload" if fsdp.offload_params else "")
    strategy += ", gathered between micro-batches" if fsdp.reshard_after_backward is False else ""
    inputs = ", inputs on the host" if fsdp.activation_checkpointing_offload else ""
    slices = (
        f", MLP in slices of {recipe.kernels.mlp_slice_tokens:,}"
        if recipe.kernels.mlp_slice_tokens is not None
        else ""
    )
    sharing = recipe.topology.row_size
    rows = (
        f"{recipe.training.per_device_train_batch_size} {'a GPU' if sharing == 1 else f'for {sharing} GPUs'}"
    )
    return f"{strategy}, activation checkpointing {fsdp.activation_checkpointing}{inputs}{slices}, {rows}"
