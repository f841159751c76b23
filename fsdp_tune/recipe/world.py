"""Rules and arithmetic that need the number of ranks: the sizes of the mesh, and the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fsdp_tune.core.topology import Topology
from fsdp_tune.core.units import counted
from fsdp_tune.recipe.rules.training import TOKENS_KEY
from fsdp_tune.recipe.schema.keys import Finding
from fsdp_tune.recipe.schema.recipe import Recipe

MESH_KEYS = (
    "parallelism.dp_replicate_size",
    "parallelism.dp_shard_size",
    "fsdp.sharding_strategy",
    "launch.num_processes",
)


BATCH_KEYS = (
    "training.global_batch_size",
    "training.gradient_accumulation_steps",
    "training.per_device_train_batch_size",
    "launch.num_processes",
)


MOST_SIZES_TRIED = 4096


MOST_NARROW_SUMS = 8
"""Largest number of micro-batches whose gradients may be added in bf16. At 8 the error of the sum is 0.36 %,
twice that of rounding it once (docs/guide/precision.md)."""


@dataclass(frozen=True, slots=True)
class World:
    size: int
    """Ranks over all machines."""
    machines: int

    @property
    def local_size(self) -> int:
        return self.size // self.machines


def data_ranks(recipe: Recipe, world: World) -> int:
    """Return the number of groups of ranks that read different rows."""
    return max(1, world.size // recipe.parallelism.of_row.world_size)


WorldRule = Callable[[Recipe, World], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class MeshSizes:
    topology: Topology
    reason: str


def mesh_sizes(recipe: Recipe, world: World) -> MeshSizes:
    """Return the mesh of a recipe that passes the rules below."""
    copies, shards = recipe.parallelism.dp_replicate_size, recipe.parallelism.dp_shard_size
    row, size, strategy = recipe.parallelism.of_row, data_ranks(recipe, world), recipe.fsdp.sharding_strategy
    rows_shared = "".join(f" / {key.split('.')[1]}" for key in row.row_keys())

    def sizes(replicate: int, shard: int, reason: str) -> MeshSizes:
        return MeshSizes(replace(row, replicate=replicate, shard=shard), reason)

    if not recipe.is_sharded:
        return sizes(size, 1, "NO_SHARD: every rank holds the whole model")
    if not recipe.is_hybrid:
        return sizes(1, size, f"{strategy}: one copy, sharded over all ranks{rows_shared}")
    if isinstance(copies, int):
        return sizes(copies, size // copies, f"world size / dp_replicate_size{rows_shared}")
    if isinstance(shards, int):
        return sizes(size // shards, shards, f"world size / dp_shard_size{rows_shared}")
    if world.machines > 1:
        return sizes(world.machines, size // world.machines, f"{strategy}: one copy per machine{rows_shared}")
    return sizes(2, size // 2, f"{strategy} on one machine: two copies{rows_shared}")


def machines_are_alike(_recipe: Recipe, world: World) -> Iterator[Finding]:
    if world.size % world.machines:
        message = (
            f"`launch.num_processes: {world.size}` (the total) is not divisible by `launch.num_machines: "
            f"{world.machines}`"
        )
        below, above = (
            world.size // world.machines * world.machines,
            -(-world.size // world.machines) * world.machines,
        )
        hint = (
            f"every machine must run the same number of ranks: write {f'{below} or ' if below else ''}{above}"
        )
        yield Finding("indivisible", ("launch.num_processes", "launch.num_machines"), message, hint)


def rows_are_shared_evenly(recipe: Recipe, world: World) -> Iterator[Finding]:
    row = recipe.parallelism.of_row
    sharing, size = row.row_keys(), row.world_size
    if world.size % world.machines or not sharing:
        return
    keys = (*sharing, "launch.num_processes", "launch.num_machines")
    what = described_sharing(row)
    if world.size % size:
        message = f"{what} does not divide {world.size} ranks"
        yield Finding("mesh-does-not-fit", keys, message, "write a divisor of the number of ranks")
    elif world.local_size % size and size % world.local_size:
        message = f"{what} spreads the ranks of a row unevenly over machines of {world.local_size} ranks"
        yield Finding(
            "mesh-does-not-fit", keys, message, f"write a divisor or a multiple of {world.local_size}"
        )


def mesh_fits(recipe: Recipe, world: World) -> Iterator[Finding]:
    replicate, shard = recipe.parallelism.dp_replicate_size, recipe.parallelism.dp_shard_size
    size, sharing = data_ranks(recipe, world), recipe.parallelism.of_row.world_size
    if not recipe.is_sharded or world.size % world.machines or world.size % sharing:
        return
    if not recipe.is_hybrid:
        if replicate not in {"auto", 1} or shard not in {"auto", size}:
            strategy = recipe.fsdp.sharding_strategy
            message = (
                f"`fsdp.sharding_strategy: {strategy}` shards over all {world.size} ranks, which "
                "contradicts the sizes of the mesh"
            )
            yield Finding("contradiction", MESH_KEYS, message, "leave the sizes at auto, or use HYBRID_SHARD")
        return
    if isinstance(replicate, int) and isinstance(shard, int) and replicate * shard != size:
        message = (
            f"{replicate} copies × {shard} shards = {replicate * shard} ranks, and there are {world.size}"
        )
        if sharing > 1:
            message = (
                f"{replicate} copies × {shard} shards × {sharing} ranks a row = "
                f"{replicate * shard * sharing} ranks, "
            )
            message += f"and there are {world.size}"
        yield Finding("mesh-does-not-fit", MESH_KEYS, message, "leave one of the two sizes at auto")
        return
    rows_shared = "" if sharing == 1 else f" (of {world.size}, {sharing} share each row)"
    for name, given in (("dp_replicate_size", replicate), ("dp_shard_size", shard)):
        if isinstance(given, int) and size % given:
            message = f"`parallelism.{name}: {given}` does not divide {counted(size, 'rank')}{rows_shared}"
            yield Finding("mesh-does-not-fit", MESH_KEYS, message, "write a divisor, or leave it at auto")
            return
    yield from _hybrid_makes_sense(recipe, world)


def _hybrid_makes_sense(recipe: Recipe, world: World) -> Iterator[Finding]:
    sizes, strategy = mesh_sizes(recipe, world).topology, recipe.fsdp.sharding_strategy
    if sizes.world_size == world.size and sizes.replicate > 1 and sizes.copy_size > 1:
        return
    if recipe.parallelism.dp_replicate_size == recipe.parallelism.dp_shard_size == "auto":
        where = "on one machine" if world.machines == 1 else f"over {world.machines} machines"
        message = (
            f"`fsdp.sharding_strategy: {strategy}` {where} needs at least two copies of two shards; "
            f"there are {world.size} ranks"
        )
        message += "" if world.size % 2 == 0 else ", an odd number"
        message += "" if sizes.row_size == 1 else f", and {sizes.row_size} share each row"
        other = "FULL_SHARD" if strategy == "HYBRID_SHARD" else "SHARD_GRAD_OP"
        hint = f"use {other}, or an even number of ranks from 4"
    else:
        what, other = (
            ("one copy", "FULL_SHARD") if sizes.replicate == 1 else ("one rank per copy", "NO_SHARD")
        )
        message = f"a mesh of {sizes.replicate} copies × {sizes.shard} shards is not a hybrid: {what}"
        hint = f"that is `fsdp.sharding_strategy: {other}`"
    yield Finding("mesh-does-not-fit", MESH_KEYS, message, hint)


def resharding_divides(recipe: Recipe, world: World) -> Iterator[Finding]:
    ranks = recipe.fsdp.reshard_after_forward
    if type(ranks) is not int or world.size % world.machines:
        return
    of_copy = mesh_sizes(recipe, world).topology.copy_size
    if not 1 < ranks < of_copy or of_copy % ranks:
        message = (
            f"`fsdp.reshard_after_forward: {ranks}` does not divide the {of_copy} ranks that share one copy"
        )
        hint = "write a divisor above 1, such as the ranks of a machine, or leave it out"
        yield Finding("mesh-does-not-fit", ("fsdp.reshard_after_forward", *MESH_KEYS), message, hint)


def experts_divide(recipe: Recipe, world: World) -> Iterator[Finding]:
    size = recipe.fsdp.ep_size
    if size == 1 or world.size % world.machines or not recipe.is_sharded:
        return
    of_copy = mesh_sizes(recipe, world).topology.copy_size
    if of_copy % size:
        message = f"`fsdp.ep_size: {size}` does not divide the {counted(of_copy, 'rank')} that share one copy"
        yield Finding(
            "mesh-does-not-fit",
            ("fsdp.ep_size", *MESH_KEYS),
            message,
            "write a divisor of the number of ranks, or 1",
        )


def batch_divides(recipe: Recipe, world: World) -> Iterator[Finding]:
    training = recipe.training
    wanted, micro, accumulation = (
        training.global_batch_size,
        training.per_device_train_batch_size,
        training.gradient_accumulation_steps,
    )
    if wanted is None:
        return
    if training.per_device_train_batch_tokens is not None:
        needed = budget_accumulation(recipe, world)
        if accumulation not in (None, needed):
            message = (
                f"`training.gradient_accumulation_steps: {accumulation}` fixes the micro-batches of a "
                f"step, and under `{TOKENS_KEY}` "
            )
            message += f"their number varies from step to step: {needed} at most"
            keys = ("training.gradient_accumulation_steps", TOKENS_KEY)
            yield Finding("contradiction", keys, message, "leave `gradient_accumulation_steps` out")
        return
    size = data_ranks(recipe, world)
    at_once, ranks = micro * size, readers_of_rows(recipe, size)
    if accumulation is not None and at_once * accumulation != wanted:
        message = (
            f"`training.global_batch_size: {wanted}` is not {micro} sequences × {ranks} × {accumulation} "
            "accumulation"
        )
        hint = f"that makes {at_once * accumulation}; leave one of the two out"
        yield Finding("contradiction", BATCH_KEYS, message, hint)
        return
    if wanted % at_once:
        message = (
            f"`training.global_batch_size: {wanted}` is not divisible by {micro} sequences × {ranks} = "
            f"{at_once}"
        )
        below, above = wanted // at_once * at_once, -(-wanted // at_once) * at_once
        fitting = [
            rows for rows in range(min(micro, wanted, MOST_SIZES_TRIED), 0, -1) if wanted % (rows * size) == 0
        ]
        ways = [f"a global batch of {f'{below} or ' if below else ''}{above}"]
        ways += [f"`per_device_train_batch_size: {fitting[0]}`"] if fitting else []
        yield Finding("indivisible", BATCH_KEYS, message, f"use {', or '.join(ways)}")


def budget_accumulation(recipe: Recipe, world: World) -> int:
    """Return the largest number of micro-batches of a step under a token budget: that of rows as long as
    `data.max_length`."""
    training = recipe.training
    assert training.global_batch_size is not None
    assert training.per_device_train_batch_tokens is not None
    # `rules.training` refuses a budget of less than one
    rows = max(1, training.per_device_train_batch_tokens // recipe.data.max_length)
    return -(-training.global_batch_size // (rows * data_ranks(recipe, world)))


def gradient_sums_are_exact(recipe: Recipe, world: World) -> Iterator[Finding]:
    """Refuse accumulation over many micro-batches where torch adds their gradients in 16 bits; elsewhere they
    are added in fp32."""
    micro_batches = _micro_batches(recipe, world)
    if micro_batches <= MOST_NARROW_SUMS or not _sums_in_16_bits(recipe):
        return
    where = (
        recipe.fsdp.sharding_strategy
        if not recipe.is_sharded or recipe.fsdp.version == 2
        else "fsdp.version: 1"
    )
    message = (
        f"`{where}` adds the gradients of {micro_batches} micro-batches in 16 bits, which is exact "
        f"enough for {MOST_NARROW_SUMS}"
    )
    hint = (
        "fewer, larger micro-batches; or `model.dtype: fp32`, `precision.reduce_dtype: fp32`, or "
        "FULL_SHARD on FSDP2, which adds in fp32"
    )
    keys = (
        "training.gradient_accumulation_steps",
        "training.global_batch_size",
        "model.dtype",
        "precision.reduce_dtype",
    )
    yield Finding("sums-in-16-bits", keys, message, hint)


def _sums_in_16_bits(recipe: Recipe) -> bool:
    """Return whether gradients of micro-batches are added in 16 bits.

    DDP and FSDP1 add in the dtype of the weights (FSDP1 without sync in the compute dtype). FSDP2 adds in
    `reduce_dtype`, except to the gradient of a shard, which `model.optim.optimizer` keeps in fp32.
    """
    narrow, fsdp = recipe.model.dtype != "fp32", recipe.fsdp
    if not recipe.is_sharded:
        return narrow
    if fsdp.version == 1:
        return narrow or (not fsdp.sync_each_batch and recipe.compute_dtype != "fp32")
    return recipe.precision.reduce_dtype != "fp32" and (recipe.is_hybrid or not fsdp.sync_each_batch)


def _micro_batches(recipe: Recipe, world: World) -> int:
    training = recipe.training
    if training.gradient_accumulation_steps is not None or training.global_batch_size is None:
        return training.gradient_accumulation_steps or 1
    if training.per_device_train_batch_tokens is not None:
        return budget_accumulation(recipe, world)
    return training.global_batch_size // (training.per_device_train_batch_size * data_ranks(recipe, world))


STREAM_LANES = 16
"""Lanes of a stream unless the recipe says otherwise, or there are more ranks."""


def lanes_of(recipe: Recipe, world: World) -> int:
    """Return the number of lanes of a stream: 16, or the smallest multiple of the ranks with rows of their
    own from there on."""
    lanes, size = recipe.data.stream_lanes, data_ranks(recipe, world)
    return -(-STREAM_LANES // size) * size if lanes == "auto" else lanes


def lanes_divide(recipe: Recipe, world: World) -> Iterator[Finding]:
    lanes, size = recipe.data.stream_lanes, data_ranks(recipe, world)
    if recipe.data.streaming and lanes != "auto" and lanes % size:
        message = (
            f"`data.stream_lanes: {lanes}` is not divisible by {readers_of_rows(recipe, size)}, each of "
            "which reads lanes of its own"
        )
        hint = (
            f"train on a number of ranks that divides {lanes}, or start a new run with "
            f"{-(-lanes // size) * size} lanes"
        )
        yield Finding("indivisible", ("data.stream_lanes", "launch.num_processes"), message, hint)


WORLD_RULES: tuple[WorldRule, ...] = (
    *(
        machines_are_alike,
        rows_are_shared_evenly,
        mesh_fits,
        resharding_divides,
        experts_divide,
        batch_divides,
        gradient_sums_are_exact,
    ),
    lanes_divide,
)


def batch_arithmetic(recipe: Recipe) -> str:
    """Describe the batch of a resolved recipe in one line, for `plan`, `train` and the report."""
    training, sequences = recipe.training, recipe.global_batch_size
    steps, tokens = training.gradient_accumulation_steps or 1, sequences * recipe.data.max_length
    ranks = readers_of_rows(recipe, recipe.data_size)
    if training.per_device_train_batch_tokens is not None:
        factors = (
            f"up to {training.per_device_train_batch_tokens:,} token slots × {ranks} × {steps} accumulation"
        )
        return (
            f"{factors} hold {counted(sequences, 'sequence')} a step; × {recipe.data.max_length:,} = "
            f"{tokens:,} tokens at most"
        )
    factors = f"{counted(training.per_device_train_batch_size, 'sequence')} × {ranks} × {steps} accumulation"
    return (
        f"{factors} = {counted(sequences, 'sequence')} a step; × {recipe.data.max_length:,} = {tokens:,} "
        "tokens at most"
    )


def readers_of_rows(recipe: Recipe, size: int) -> str:
    """Describe what reads rows of its own: `8 ranks`, or `2 groups of 4 ranks`."""
    return readers(size, recipe.parallelism.of_row.world_size)


def described_sharing(row: Topology) -> str:
    """Return the keys by which ranks share a row, with their sizes."""
    return " × ".join(f"`{key}: {size}`" for key, size in row.row_keys().items())


def readers(groups: int, sharing: int) -> str:
    """Describe `groups` of `sharing` ranks, each of which reads rows of its own."""
    return counted(groups, "rank") if sharing == 1 else f"{counted(groups, 'group')} of {sharing} ranks"
