"""Search the best recipe for given GPUs. Every layout is traced once, at a micro-batch from which all others are derived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from fsdp_tune.planner.hardware.efficiency import Efficiency
from fsdp_tune.planner.hardware.gpus import Hardware, known_hardware
from fsdp_tune.planner.predict.blend import at_micro_batch, prime_for
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.fits import CONTEXT_BYTES, fit
from fsdp_tune.planner.predict.predict import Plan, plan
from fsdp_tune.planner.search.candidates import (
    OFFLOADS,
    Changes,
    Offload,
    batch_changes,
    changed,
    differences,
    layouts,
    least_state_bytes,
    micro_batches,
    ranks_of_machine,
)
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.rules.precision import computes_in_fp8
from fsdp_tune.recipe.schema import Recipe

Target = Literal["fastest", "cheapest", "largest-context"]
SHOWN = 12
"""Number of alternatives in a plan."""
MOST_DEVICES = 1024


class Tracer(Protocol):
    """Trace recipes in parallel in other processes, and yield the traces in order; None for a recipe that cannot be traced."""

    def __call__(self, recipes: Sequence[Recipe]) -> Iterator[Trace | None]: ...


@dataclass(frozen=True, slots=True)
class PlannedRecipe:
    """A recipe with its plan."""

    recipe: Recipe
    plan: Plan


@dataclass(slots=True)
class Search:
    """Inputs of a search besides the recipe."""

    hardware: Hardware
    trace: Tracer
    efficiency: Efficiency | None = None
    rows: int | None = None
    progress: Callable[[str], None] = lambda _text: None

    def price(self, recipe: Recipe, trace: Trace, base: Recipe) -> PlannedRecipe:
        changes = differences(base, recipe)
        made = plan(recipe, self.hardware, trace, rows=self.rows, efficiency=self.efficiency, recipe_changes=changes)
        return PlannedRecipe(recipe, replace(made, memory=None))

    def layouts(self, base: Recipe, trace: Trace, *, offload: Offload) -> list[PlannedRecipe]:
        """Plan every layout that could fit, at every micro-batch up to the first that does not fit; `trace` is that of `base`."""
        batches = micro_batches(base)
        counts, prime = trace.counts, prime_for(trace)
        possible: list[Changes] = []
        traced: list[Recipe] = []
        for changes in layouts(base, offload=offload):
            lean = changed(base, changes | batch_changes(*batches[0]))
            # With accumulation if any of the batches accumulates.
            family = changed(base, changes | batch_changes(prime, min(2, batches[0][1])))
            if lean is None or family is None:
                continue
            if least_state_bytes(lean, counts) + CONTEXT_BYTES <= self.hardware.usable_bytes:
                possible.append(changes)
                traced.append(family)
        found: list[PlannedRecipe] = []
        for changes, at_prime in zip(possible, self.trace(traced), strict=True):
            self.progress(_words(changes))
            if at_prime is not None:
                found += self._layout(base, changes, full_depth(at_prime), batches)
        return found

    def _layout(self, base: Recipe, changes: Changes, at_prime: Trace, batches: list[tuple[int, int]]) -> list[PlannedRecipe]:
        found: list[PlannedRecipe] = []
        in_slices = base.kernels.loss == "auto" and at_prime.facts.get("slice_tokens")
        for micro, accumulation in batches:
            recipe = changed(base, changes | batch_changes(micro, accumulation))
            if recipe is None or (in_slices and micro * base.data.max_length <= in_slices):
                continue
            found.append(self.price(recipe, at_micro_batch(at_prime, micro, accumulation), base))
            if found[-1].plan.fits == "no":
                break
        return found


def _words(changes: Changes) -> str:
    words = {key: key.split(".")[1] if value is True else str(value) for key, value in changes.items() if value is not False}
    return ", ".join(word for key, word in words.items() if key != "fsdp.auto_wrap_policy")


@dataclass(frozen=True, slots=True)
class Ranking:
    ranked: tuple[PlannedRecipe, ...]
    """Best first, at most `SHOWN`, each with its rank among all recipes; always includes the requested recipe."""
    because: str | None


def rank_recipes(search: Search, base: Recipe, trace: Trace, target: Target) -> Ranking:
    """Rank recipes for a target, including `base`; `trace` is that of `base`."""
    search_for, order = {"fastest": (best_layouts, rank), "cheapest": (cheapest, _by_cost), "largest-context": (longest, _by_length)}[
        target
    ]
    others = [each for each in search_for(search, base, trace) if not _is_same(each.recipe, base, trace)]
    found = sorted([search.price(base, trace, base), *others], key=order)
    placed = [PlannedRecipe(each.recipe, replace(each.plan, place=place)) for place, each in enumerate(found, 1)]
    cut = next(each for each in placed if not each.plan.recipe_changes)
    shown = placed[:SHOWN] if cut in placed[:SHOWN] else [*placed[: SHOWN - 1], cut]
    return Ranking(tuple(shown), why_first(found, target))


def _is_same(recipe: Recipe, base: Recipe, trace: Trace) -> bool:
    """Return whether a candidate equals the requested recipe, whose `kernels.loss` may be auto."""
    changes = differences(base, recipe)
    loss = changes.pop("kernels.loss", None)
    return not changes and loss in (None, "chunked" if trace.facts.get("slice_tokens") else "full")


def best_layouts(search: Search, base: Recipe, trace: Trace) -> list[PlannedRecipe]:
    """Plan all layouts; with offloading only if nothing fits without it."""
    found: list[PlannedRecipe] = []
    for offload in OFFLOADS:
        found += search.layouts(base, trace, offload=offload)
        if _any_fits(found):
            break
    return found


def _any_fits(found: Sequence[PlannedRecipe]) -> bool:
    return any(each.plan.fits == "yes" for each in found)


def rank(found: PlannedRecipe) -> tuple[int, float, float]:
    """Sort key: recipes that fit, then tight ones, by time per token over all devices and memory; then the others by memory."""
    made = found.plan
    order = ("yes", "tight", "no").index(made.fits)
    if order == 2:
        return order, made.device_gib, 0.0
    seconds = made.step_seconds / made.tokens_per_step if made.step_seconds is not None else float("inf")
    return order, seconds, made.device_gib


def cheapest(search: Search, base: Recipe, trace: Trace) -> list[PlannedRecipe]:
    """Plan layouts on all GPUs and on smaller powers of two of them."""
    found: list[PlannedRecipe] = []
    size = base.world_size
    counts = [size, *(1 << power for power in range(size.bit_length() - 1, -1, -1) if 1 << power < size)]
    for number in counts:
        machines = max(1, -(-number // base.local_world_size))
        other = base if number == size else changed(base, {"launch.num_processes": number, "launch.num_machines": machines, **_same(base)})
        if other is None or other.global_batch_size != base.global_batch_size:
            continue
        search.progress(f"{number} GPUs")
        for each in best_layouts(search, other, trace):
            made = replace(each.plan, recipe_changes=differences(base, each.recipe))
            found.append(PlannedRecipe(each.recipe, made))
    return found


def _by_cost(found: PlannedRecipe) -> tuple[int, float]:
    """Sort key: fewest GPU-seconds per token first."""
    return rank(found)[0], _device_seconds(found)


def _same(base: Recipe) -> Changes:
    """Return the changes that keep the global batch on fewer GPUs, by more accumulation."""
    return {"training.global_batch_size": base.global_batch_size, **batch_changes(1, None)}


def longest(search: Search, base: Recipe, trace: Trace) -> list[PlannedRecipe]:
    """Plan one sequence per forward, doubling the length of rows while they fit and the model has positions for them."""
    positions = trace.facts.get("max_positions")
    found: list[PlannedRecipe] = []
    for offload in OFFLOADS:
        if offload == "parameters" and _any_fits(found):
            break
        for changes in layouts(base, offload=offload):
            if changes["fsdp.sharding_strategy"] == "FULL_SHARD" or base.world_size == 1:
                search.progress(_words(changes))
                found += _lengths(search, base, changes, positions)
    return found


def _by_length(found: PlannedRecipe) -> tuple[int, int, float, float]:
    """Sort key: longest rows first."""
    order, *others = rank(found)
    return order, -found.recipe.data.max_length, others[0], others[1]


def _lengths(search: Search, base: Recipe, changes: Changes, positions: int | None) -> list[PlannedRecipe]:
    found: list[PlannedRecipe] = []
    length = base.data.max_length
    each = base.global_batch_size // base.data_size
    while positions is None or length <= positions:
        recipe = changed(base, changes | batch_changes(1, each) | {"data.max_length": length})
        traced = None if recipe is None else next(search.trace([recipe]))
        if recipe is None or traced is None:
            break
        found.append(search.price(recipe, traced, base))
        if found[-1].plan.fits == "no":
            break
        length *= 2
    return found


def smallest_hardware(search: Search, base: Recipe, ranked: Sequence[PlannedRecipe]) -> dict[str, Any] | None:
    """Return hardware for a recipe that does not fit: as many larger GPUs, else more of the same; None if 1,024 are not enough."""
    leanest = min((each.recipe for each in ranked), key=lambda recipe: recipe.training.per_device_train_batch_size, default=base)
    nothing = {"fsdp.activation_checkpointing_offload": False, "fsdp.offload_params": False}
    lean = changed(leanest, {"fsdp.sharding_strategy": "FULL_SHARD", "fsdp.activation_checkpointing": "full", **nothing})
    one = lean and changed(lean, batch_changes(1, base.global_batch_size // base.data_size))
    traced = next(search.trace([one])) if one else None
    if one is None or traced is None:
        return None
    larger = sorted(known_hardware().values(), key=lambda gpu: gpu.usable_bytes)
    multiplies_in = "fp8" if computes_in_fp8(one) else one.compute_dtype
    for gpu in (gpu for gpu in larger if gpu.usable_bytes > search.hardware.usable_bytes and gpu.peak_flops(multiplies_in)):
        if fit(traced, gpu).answer == "yes":
            return {"gpu": gpu.name, "num_processes": base.world_size, "recipe_changes": differences(base, one)}
    return _more(search, base, one)


def _more(search: Search, base: Recipe, one: Recipe) -> dict[str, Any] | None:
    number = base.world_size * 2
    while number <= MOST_DEVICES:
        machines = max(1, -(-number // ranks_of_machine(base, search.hardware)))
        batch = batch_changes(1, max(1, base.global_batch_size * base.parallelism.sp_size // number))
        other = changed(one, {"launch.num_processes": number, "launch.num_machines": machines, **batch})
        traced = next(search.trace([other])) if other else None
        if other is not None and traced is not None and fit(traced, search.hardware).answer == "yes":
            return {"gpu": search.hardware.name, "num_processes": number, "recipe_changes": differences(base, other)}
        number *= 2
    return None


LORA: Changes = {"lora.target_modules": "all-linear"}
NF4: Changes = {"quantization.load": "nf4"}


def other_trainings(search: Search, base: Recipe) -> list[PlannedRecipe]:
    """Plan LoRA and QLoRA for a recipe that does not fit, QLoRA alone if it has adapters: another training, not another layout.

    Each has one sequence a forward and recomputes all layers. Parameters are offloaded only if neither fits without.
    """
    trainings = [LORA, LORA | NF4] if base.lora is None else [NF4] if base.quantization is None else []
    found: list[PlannedRecipe] = []
    for offload in (False, True):
        found = list(_trainings(search, base, trainings, offload=offload))
        if _any_fits(found):
            break
    return found


def _trainings(search: Search, base: Recipe, trainings: list[Changes], *, offload: bool) -> Iterator[PlannedRecipe]:
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
    return float("inf") if made.step_seconds is None else made.step_seconds * made.num_processes / made.tokens_per_step


def why_first(ranked: Sequence[PlannedRecipe], target: Target) -> str | None:
    """Explain the first rank in a sentence with figures; None if nothing fits."""
    first = ranked[0].plan if ranked else None
    if first is None or first.fits == "no":
        return None
    fitting = [each for each in ranked if each.plan.fits == first.fits]
    what = {"fastest": "fastest", "cheapest": "cheapest", "largest-context": "longest"}[target]
    if first.step_seconds is None and target != "largest-context":
        what = f"smallest (the speed of {first.gpu} is unknown)"
    said = [f"the {what} of {len(fitting)} that fit" if first.fits == "yes" else "nothing fits with memory to spare; this one is tight"]
    others = [each for each in fitting[1:] if _layout_of(each) != _layout_of(ranked[0])]
    if others and first.step_seconds is not None and others[0].plan.step_seconds is not None:
        more = _device_seconds(ranked[0]) / _device_seconds(others[0]) - 1
        than = f"{abs(more):.0%} {'more' if more > 0 else 'less'} time per token"
        said.append(f"{than} than the next layout, {_name(others[0].recipe)}")
    recipe = ranked[0].recipe
    possible = {each.recipe.fsdp.activation_checkpointing for each in ranked if each.plan.fits == "yes"}
    cheaper = [kind for kind in _less_recomputation(recipe) if kind not in possible]
    refused = [each for each in ranked if each.recipe.fsdp.activation_checkpointing in cheaper]
    if refused:
        least = min(refused, key=lambda each: each.plan.device_gib)
        without = least.recipe.fsdp.activation_checkpointing
        needed = f"{_name(least.recipe)} needs {least.plan.device_gib:.1f} GiB of {least.plan.usable_gib:.1f}"
        answer = "it is tight at best" if least.plan.fits == "tight" else "none fits"
        said.append(f"with activation checkpointing {without} {answer} ({needed})")
    return "; ".join(said)


def _less_recomputation(recipe: Recipe) -> tuple[str, ...]:
    order = ("none", "selective", "full")
    return order[: order.index(recipe.fsdp.activation_checkpointing)] if recipe.fsdp.activation_checkpointing in order else ()


def _layout_of(found: PlannedRecipe) -> tuple[str, str, bool, bool]:
    fsdp = found.recipe.fsdp
    return fsdp.sharding_strategy, fsdp.activation_checkpointing, fsdp.activation_checkpointing_offload, fsdp.offload_params


def _name(recipe: Recipe) -> str:
    fsdp = recipe.fsdp
    strategy = fsdp.sharding_strategy + (" + offload" if fsdp.offload_params else "")
    inputs = ", inputs on the host" if fsdp.activation_checkpointing_offload else ""
    return (
        f"{strategy}, activation checkpointing {fsdp.activation_checkpointing}{inputs}, {recipe.training.per_device_train_batch_size} a GPU"
    )
