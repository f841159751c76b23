"""Generate alternatives to a recipe: the same training with another layout on the same GPUs, or on another number of ranks.

Model, data, length, dtype, global batch and schedule stay the same. Strategy, recomputation, offload, micro-batch × accumulation, size of
a copy (over machines), decoder layers as units (if the recipe has coarser ones), and, for some targets, the ranks that share a row and
the slices of the MLP vary.

Plan recipes from their traces. Every layout is traced once, at a micro-batch from which all others are derived.

For another number of ranks some keys must change; the scaling table has the plan of the recipe on 1 to 1,024 GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.families import expert_count
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.topology import DATA_KEYS
from fsdp_tune.planner.predict.depth import alike, at_micro_batch, at_shards, full_depth, prime_for
from fsdp_tune.planner.predict.memory import CONTEXT_BYTES, DTYPE_BYTES
from fsdp_tune.planner.predict.predict import Plan, ScalingRow, plan
from fsdp_tune.planner.predict.timing import Efficiency
from fsdp_tune.planner.trace_format import Counts, Trace
from fsdp_tune.recipe.resolve import ASSUMED_DEVICES, resolve
from fsdp_tune.recipe.rules.contradictions import INPUTS, RULES
from fsdp_tune.recipe.rules.training import TOKENS_KEY
from fsdp_tune.recipe.schema.keys import refused, value_of
from fsdp_tune.recipe.schema.kinds import STRATEGIES, ShardingStrategy
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import state_bytes
from fsdp_tune.recipe.world import WORLD_RULES, World, data_ranks

Changes = dict[str, Any]
LOSSES = ("full", "chunked")
CHECKPOINTING = ("none", "selective", "full")
Offload = Literal["nothing", "inputs", "parameters"]
OFFLOADS: tuple[Offload, ...] = ("nothing", "inputs", "parameters")
"""Offloaded tensors: inputs of recomputed layers, or all state. Slower, so only tried if memory is short, the cheaper one first."""
SEQUENCE = "parallelism.sp_size"
SLICES = "kernels.mlp_slice_tokens"
MLP_SLICES = (16384, 4096)
"""Tokens of a slice of the MLP. Smaller slices save nothing: other tensors are the peak (docs/guide/long-rows.md)."""
BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")


def changed(recipe: Recipe, changes: Changes) -> Recipe | None:
    """Return a resolved recipe with other values, and dependent keys resolved again; None if it is contradictory or unsupported."""
    data = recipe.model_dump(by_alias=True)
    for key, value in changes.items():
        section, name = key.split(".")
        data[section] = (data[section] or {}) | {name: value}
    if SEQUENCE in changes:  # a rule would refuse the padding that was resolved for another number
        data["data"]["pad_to_multiple_of"] = math.lcm(data["data"]["pad_to_multiple_of"], changes[SEQUENCE])
    if changes.keys() & {"fsdp.sharding_strategy", "launch.num_processes", SEQUENCE}:
        for key in DATA_KEYS:
            data["parallelism"][key] = changes.get(f"parallelism.{key}", "auto")
        data["fsdp"]["reshard_after_forward"] = None
    if "training.gradient_accumulation_steps" in changes and "training.global_batch_size" not in changes:
        data["training"]["global_batch_size"] = None
        # A plan assumes rows of `max_length`, so a token budget has no effect.
        data["training"]["per_device_train_batch_tokens"] = None
    wanted = Recipe.model_validate(data)
    if is_refused(wanted):
        return None
    machine = Machine(wanted.launch.device, wanted.world_size, 1, None)
    try:
        return resolve(wanted, machine, cwd=Path.cwd(), assume=wanted.launch.device).recipe
    except FsdpTuneError:
        return None  # a mesh or a batch that does not divide


def is_refused(recipe: Recipe) -> bool:
    """Return whether the recipe is contradictory or unsupported, other than by inputs that only a run needs."""
    return bool(refused(recipe)) or any(found.code not in INPUTS for rule in RULES for found in rule(recipe))


def differences(recipe: Recipe, other: Recipe) -> Changes:
    """Return the searched keys in which two resolved recipes differ, with the values of `other`."""
    keys = [
        "fsdp.sharding_strategy",
        "fsdp.activation_checkpointing",
        "fsdp.activation_checkpointing_offload",
        "fsdp.offload_params",
        "fsdp.auto_wrap_policy",
        "kernels.loss",
        SLICES,
        SEQUENCE,
        *BATCH,
        "data.max_length",
        "launch.num_processes",
        "launch.num_machines",
    ]
    found = {key: value_of(other, key) for key in keys if value_of(other, key) != value_of(recipe, key)}
    if other.is_hybrid and other.parallelism.dp_shard_size != recipe.parallelism.dp_shard_size:
        found["parallelism.dp_shard_size"] = other.parallelism.dp_shard_size
    budget, slots = recipe.training.per_device_train_batch_tokens, other.training.per_device_train_batch_size * other.data.max_length
    if budget is not None:
        found = {key: value for key, value in found.items() if key not in BATCH}
        return found | ({TOKENS_KEY: slots} if slots != budget else {})
    return found


def layouts(recipe: Recipe, *, offload: Offload) -> Iterator[Changes]:
    """Yield strategy and recomputation, fast ones first. State is offloaded only if sharded, inputs only with full recomputation."""
    # Copies on one machine do not avoid a slower link.
    names: list[ShardingStrategy] = [name for name, row in STRATEGIES.items() if recipe.launch.num_machines > 1 or not row.is_hybrid]
    if recipe.world_size == 1:
        names = [recipe.fsdp.sharding_strategy]
    for strategy in names:
        if offload == "parameters" and not STRATEGIES[strategy].is_sharded:
            continue
        for checkpointing in ("full",) if offload == "inputs" else CHECKPOINTING:
            changes = layout(recipe, strategy, checkpointing) | {"fsdp.offload_params": offload == "parameters"}
            changes["fsdp.activation_checkpointing_offload"] = offload == "inputs"
            # `auto` depends on the number of tokens, so both are tried; the chunked loss only with more than one slice.
            for loss in LOSSES if recipe.kernels.loss == "auto" else (recipe.kernels.loss,):
                yield changes | {"kernels.loss": loss}


def layout(recipe: Recipe, strategy: str, checkpointing: str) -> Changes:
    """Return the changes to a strategy and a kind of recomputation, with nothing offloaded and decoder layers as units."""
    changes: Changes = {"fsdp.sharding_strategy": strategy, "fsdp.activation_checkpointing": checkpointing}
    changes |= {"fsdp.activation_checkpointing_offload": False, "fsdp.offload_params": False}
    return changes | ({"fsdp.auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} if recipe.fsdp.auto_wrap_policy == "NO_WRAP" else {})


def sequence_sizes(recipe: Recipe, heads: int, ranks: int) -> list[int]:
    """Return each number of neighbouring ranks that can share a row, of `ranks` at most: it divides the attention heads, and the global
    batch has a row for every group."""
    sizes = [size for size in range(1, ranks + 1) if recipe.world_size % size == 0 and heads % size == 0]
    return [size for size in sizes if recipe.global_batch_size % (recipe.world_size // size) == 0]


def with_shared_rows(recipe: Recipe, size: int) -> Recipe | None:
    """Return the recipe with `size` ranks a row, one row a forward and the same global batch."""
    return changed(recipe, {SEQUENCE: size, **same_global_batch(recipe)})


def same_global_batch(recipe: Recipe) -> Changes:
    """Return the changes that keep the global batch on other numbers of ranks with rows of their own, by other accumulation."""
    return {"training.global_batch_size": recipe.global_batch_size, **batch_changes(1, None)}


def micro_batches(recipe: Recipe) -> list[tuple[int, int]]:
    """Return each (micro-batch, accumulation) of the recipe's global batch, small micro-batches first, with at most 64 sequences."""
    each = recipe.global_batch_size // recipe.data_size
    return [(size, each // size) for size in range(1, min(each, 64) + 1) if each % size == 0]


def batch_changes(micro_batch: int, accumulation: int | None) -> Changes:
    return {BATCH[0]: micro_batch, BATCH[1]: accumulation}


def least_state_bytes(recipe: Recipe, counts: Counts) -> float:
    """Return the bytes of a device's share of parameters, gradients and optimizer state, a lower bound without activations."""
    if recipe.fsdp.offload_params:
        return 0.0
    size = DTYPE_BYTES[recipe.model.dtype]
    total = counts.parameter_bytes + (size + state_bytes(recipe.training, size)) * counts.trained_parameters
    return total / (recipe.topology.copy_size if recipe.is_sharded else 1)


def devices_of_machine(hardware: Hardware) -> int:
    """Return the number of devices of the vendor's machine, or the assumed number if unknown."""
    return hardware.devices_per_machine or ASSUMED_DEVICES


def ranks_of_machine(recipe: Recipe, hardware: Hardware) -> int:
    """Return the ranks per machine for layouts on other numbers of GPUs: the recipe's, or, on one machine, at least the vendor's."""
    own = recipe.local_world_size
    return own if recipe.launch.num_machines > 1 else max(own, devices_of_machine(hardware))


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

    def layouts(self, base: Recipe, trace: Trace, wanted: Iterable[Changes]) -> list[PlannedRecipe]:
        """Plan each wanted layout that could fit, at every micro-batch up to the first that does not; `trace` is of `base`'s model."""
        batches = micro_batches(base)
        counts, prime = trace.counts, prime_for(trace)
        possible: list[Changes] = []
        traced: list[Recipe] = []
        for changes in wanted:
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
            self.progress(describe(changes))
            if at_prime is not None:
                found += self._layout(base, changes, full_depth(at_prime), batches)
        return found

    def _layout(self, base: Recipe, changes: Changes, at_prime: Trace, batches: list[tuple[int, int]]) -> list[PlannedRecipe]:
        found: list[PlannedRecipe] = []
        in_slices = base.kernels.loss == "auto" and at_prime.facts.slice_tokens
        for micro, accumulation in batches:
            recipe = changed(base, changes | batch_changes(micro, accumulation))
            if recipe is None or (in_slices and micro * base.data.max_length <= in_slices):
                continue
            found.append(self.price(recipe, at_micro_batch(at_prime, micro, accumulation), base))
            if found[-1].plan.fits == "no":
                break
        return found


def describe(changes: Changes) -> str:
    words = {
        key: key.split(".")[1] if value is True else str(value)
        for key, value in changes.items()
        if value is not False and value is not None
    }
    return ", ".join(word for key, word in words.items() if key != "fsdp.auto_wrap_policy")


def any_fits(found: Sequence[PlannedRecipe]) -> bool:
    return any(each.plan.fits == "yes" for each in found)


def rank(found: PlannedRecipe) -> tuple[int, float, float]:
    """Sort key: recipes that fit, then tight ones, by time per token over all devices and memory; then the others by memory."""
    made = found.plan
    order = ("yes", "tight", "no").index(made.fits)
    if order == 2:
        return order, made.device_gib, 0.0
    seconds = made.step_seconds / made.tokens_per_step if made.step_seconds is not None else float("inf")
    return order, seconds, made.device_gib


# ---- Other numbers of ranks


SIZES = tuple(1 << power for power in range(11))


def scaling_table(search: Search, recipe: Recipe) -> list[ScalingRow]:
    """Return one row per size: seconds of a step, tokens of all GPUs, efficiency against single GPUs, memory.

    Only full machines are used. Where the recipe fits on no size, there is no row.
    """
    rows: list[ScalingRow] = []
    for other, trace in _traced(search, recipe):
        made = plan(other, search.hardware, trace, efficiency=search.efficiency)
        speed = made.tokens_per_second_per_device
        rows.append(
            ScalingRow(
                num_processes=other.world_size,
                num_machines=other.launch.num_machines,
                step_seconds=made.step_seconds,
                tokens_per_second=None if speed is None else speed * other.world_size,
                fits=made.fits,
                peak_reserved_gib=made.peak_reserved_gib,
                efficiency=None,
            )
        )
    return _with_efficiency(rows) if any(row.fits != "no" for row in rows) else []


def _traced(search: Search, recipe: Recipe) -> Iterator[tuple[Recipe, Trace]]:
    """Yield every size with its trace. Only different programs are traced."""
    sizes = {size: other for size in sorted({*SIZES, recipe.world_size}) if (other := _sized(search, recipe, size)) is not None}
    own = max(2, recipe.world_size)
    if recipe.is_sharded and not recipe.is_hybrid:
        # Shards are derived from two sizes: the recipe's own and the fewest ranks, since extrapolation far beyond both is inaccurate.
        fewest = min((size for size in sizes if size > 1), default=own)
        pair = [_sized(search, recipe, size) for size in ((fewest, own) if fewest < own else (own, 2 * own))]
        traces = [trace and full_depth(trace) for trace in search.trace([other for other in pair if other is not None])]
        few, many = traces if len(traces) == 2 else (None, None)
        if few is None or many is None or not alike(few, many):
            return
        if expert_count(few.facts.config) == 1:
            yield from ((other, at_shards(few, many, other.topology)) for other in sizes.values())
            return
    # Unsharded copies are equal from two ranks on. Hybrid strategies need a trace for each size, and so do experts: the number of
    # ranks decides in which dimension their stacks are sharded (`shard_dim`).
    stands_for = {size: size if recipe.is_sharded else min(size, own) for size in sizes}
    wanted = sorted(set(stands_for.values()) & sizes.keys())
    traced = dict(zip(wanted, search.trace([sizes[size] for size in wanted]), strict=True))
    for size, other in sizes.items():
        trace = traced.get(stands_for[size])
        if trace is not None:
            yield other, replace(trace, shapes=replace(trace.shapes, topology=other.topology))


def _sized(search: Search, recipe: Recipe, size: int) -> Recipe | None:
    per_machine = ranks_of_machine(recipe, search.hardware)
    if size > per_machine and size % per_machine:
        return None
    batch = batch_changes(recipe.training.per_device_train_batch_size, recipe.training.gradient_accumulation_steps or 1)
    return changed(recipe, {"launch.num_processes": size, "launch.num_machines": max(1, size // per_machine), **batch})


def _with_efficiency(rows: list[ScalingRow]) -> list[ScalingRow]:
    """Add the efficiency relative to the speed per GPU of the smallest size."""
    first = rows[0].tokens_per_second
    if not first:
        return rows
    speed = first / rows[0].num_processes
    return [
        row if row.tokens_per_second is None else replace(row, efficiency=row.tokens_per_second / row.num_processes / speed) for row in rows
    ]


def machines_for(ranks: int, devices_per_machine: int) -> int:
    """Return the smallest number of machines for `ranks` devices, with the same number on each."""
    return next(machines for machines in range(-(-ranks // devices_per_machine), ranks + 1) if ranks % machines == 0)


def forced_changes(recipe: Recipe, world: World) -> dict[str, Any]:
    """Return the keys that must change for `recipe` to run in `world`, with their values; {} if none must.

    The micro-batch shrinks before the global batch grows. Mesh sizes are resolved again, and a hybrid strategy that does not fit
    becomes the one without copies.
    """
    codes = {finding.code for rule in WORLD_RULES for finding in rule(recipe, world)}
    changes: dict[str, Any] = {}
    if "mesh-does-not-fit" in codes:
        changes |= _mesh(recipe, world)
    if recipe.training.global_batch_size is not None:
        changes |= _batch(recipe, recipe.training.global_batch_size, world)
    return changes


def _mesh(recipe: Recipe, world: World) -> dict[str, Any]:
    again: dict[str, Any] = {**dict.fromkeys((f"parallelism.{key}" for key in DATA_KEYS), "auto"), "fsdp.reshard_after_forward": None}
    changes = {key: value for key, value in again.items() if getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) != value}
    fits_two_copies = world.size >= 4 and world.size % 2 == 0
    if recipe.is_hybrid and not fits_two_copies:
        reshards = STRATEGIES[recipe.fsdp.sharding_strategy].reshards
        changes["fsdp.sharding_strategy"] = "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
    return changes


def _batch(recipe: Recipe, wanted: int, world: World) -> dict[str, Any]:
    training = recipe.training
    if training.per_device_train_batch_tokens is not None:
        return {}  # a token budget divides any global batch
    micro, ranks = training.per_device_train_batch_size, data_ranks(recipe, world)
    fitting = next((size for size in range(min(micro, wanted), 0, -1) if wanted % (size * ranks) == 0), None)
    size = fitting or min(micro, max(1, wanted // ranks))
    at_once = size * ranks
    batch = -(-wanted // at_once) * at_once
    values = {
        "training.per_device_train_batch_size": (micro, size),
        "training.global_batch_size": (wanted, batch),
        "training.gradient_accumulation_steps": (training.gradient_accumulation_steps, batch // at_once),
    }
    return {key: new for key, (old, new) in values.items() if old is not None and new != old}
