"""A run that continues on fewer machines: the same rows a step, in more micro-batches a rank."""

from __future__ import annotations

from fsdp_tune.recipe.schema.keys import Finding
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.strategies import ShardingStrategy
from fsdp_tune.recipe.world import WORLD_RULES, World, mesh_sizes

MIN_MACHINES = "launch.min_machines"


_OF_ONE_COPY: dict[ShardingStrategy, ShardingStrategy] = {
    "HYBRID_SHARD": "FULL_SHARD",
    "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP",
}


def recipe_for_machines(recipe: Recipe, resolved: Recipe, machines: int) -> Recipe:
    """Return the unresolved recipe for another number of machines, each with as many ranks.

    `resolved`: the same recipe, resolved for all machines. A step has the sequences that it has there, and a
    stream its lanes. One copy of the model for each machine becomes, on one machine, a strategy of one copy.
    """
    ranks = machines * resolved.local_world_size
    training: dict[str, object] = {
        "global_batch_size": resolved.global_batch_size,
        "gradient_accumulation_steps": None,
    }
    sections: dict[str, object] = {
        "launch": recipe.launch.model_copy(
            update={"num_machines": machines, "num_processes": ranks, "min_machines": machines}
        ),
        "training": recipe.training.model_copy(update=training),
    }
    if recipe.data.streaming:
        sections["data"] = recipe.data.model_copy(update={"stream_lanes": resolved.data.stream_lanes})
    is_copy_of_machine = recipe.parallelism.dp_replicate_size == recipe.parallelism.dp_shard_size == "auto"
    if machines == 1 and resolved.launch.num_machines > 1 and recipe.is_hybrid and is_copy_of_machine:
        strategy = _OF_ONE_COPY[recipe.fsdp.sharding_strategy]
        sections["fsdp"] = recipe.fsdp.model_copy(update={"sharding_strategy": strategy})
    return recipe.model_copy(update=sections)


def smaller_sizes(recipe: Recipe, resolved: Recipe) -> dict[int, str | None]:
    """Return, for each number of machines below all down to `launch.min_machines`, why the run cannot
    continue on it, or None."""
    launch = recipe.launch
    fewest = (
        launch.min_machines
        if launch.min_machines is not None and launch.max_restarts > 0
        else launch.num_machines
    )
    found: dict[int, str | None] = {}
    for machines in range(launch.num_machines - 1, fewest - 1, -1):
        smaller = recipe_for_machines(recipe, resolved, machines)
        world = World(machines * resolved.local_world_size, machines)
        wrong = next((finding for rule in WORLD_RULES for finding in rule(smaller, world)), None)
        found[machines] = wrong.message if wrong is not None else _against_experts(smaller, resolved, world)
    return found


def _against_experts(smaller: Recipe, resolved: Recipe, world: World) -> str | None:
    """Return why `fsdp.ep_size` may not fit a smaller number of ranks; None if it does.

    The ranks with the same experts shard each expert evenly. A recipe does not have the widths of experts,
    but those of all machines are known to divide by the ranks of all machines, and therefore by any divisor
    of their number.
    """
    size = resolved.fsdp.ep_size
    if size == 1 or not resolved.is_sharded:
        return None
    before, after = (
        topology.copy_size // size for topology in (resolved.topology, mesh_sizes(smaller, world).topology)
    )
    if before % after == 0:
        return None
    return (
        f"with `fsdp.ep_size: {size}`, {after} ranks would shard each expert, and {after} is not a "
        f"divisor of the {before} on all machines"
    )


def described_sizes(recipe: Recipe, resolved: Recipe) -> tuple[Finding | None, bool]:
    """Return what to report about a run that may continue on fewer machines, and whether it is an error:
    there is no such number."""
    sizes = smaller_sizes(recipe, resolved)
    if not sizes:
        return None, False
    reasons = "; ".join(
        f"not on {machines}: {reason}" for machines, reason in sizes.items() if reason is not None
    )
    fitting = [str(machines) for machines, reason in sizes.items() if reason is None]
    if not fitting:
        message = (
            f"`{MIN_MACHINES}: {recipe.launch.min_machines}` allows no smaller number of machines; {reasons}"
        )
        hint = (
            "use a `training.global_batch_size` that divides by the ranks of fewer machines, or leave "
            "the key out"
        )
        return Finding(
            "indivisible", (MIN_MACHINES, "training.global_batch_size", "launch.num_processes"), message, hint
        ), True
    message = f"if a machine is lost and not replaced, the run continues on {_one_of(fitting)}" + (
        f"; {reasons}" if reasons else ""
    )
    return Finding("fewer-machines", (MIN_MACHINES,), message), False


def _one_of(numbers: list[str]) -> str:
    named = f"{', '.join(numbers[:-1])} or {numbers[-1]}" if len(numbers) > 1 else numbers[0]
    return f"{named} machine{'' if named == '1' else 's'}"
