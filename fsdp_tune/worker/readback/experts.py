"""Read the experts that a rank holds, and the ranks that it exchanges tokens with, and compare them with the
recipe."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.shard.expert_parallel import divided_experts, exchange_group
from fsdp_tune.model.shard.local import local_part, offset_of
from fsdp_tune.model.shard.wrap import shard_dim
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.records import LiveState
from fsdp_tune.worker.readback.one_or_all import only


def exchanging_ranks(model: nn.Module) -> dict[str, list[int]]:
    """Return the ranks among which each module of experts exchanges tokens in its live forward, by name of
    the module."""
    groups = {name: exchange_group(module) for name, module in model.named_modules()}
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}


def group_size(exchanging: dict[str, list[int]]) -> int | list[str]:
    """Return the number of ranks among which experts exchange tokens (1: none do); all numbers, if they
    differ between modules."""
    return only({len(ranks) for ranks in exchanging.values()} or {1})


def own_experts(model: nn.Module) -> dict[str, list[int]]:
    """Return the part of each stack that this rank holds, in its first dimension, of modules that exchange
    tokens."""
    stacks = {
        f"{name}.{key}": stack
        for name, module in model.named_modules()
        if exchange_group(module) is not None
        for key, stack in module.named_parameters(recurse=False)
    }
    return {
        name: [offset_of(stack)[0], offset_of(stack)[0] + local_part(stack).shape[0]]
        for name, stack in stacks.items()
    }


def _stacks_to_divide(recipe: Recipe, model: nn.Module) -> dict[str, int]:
    """Return the number of experts in each stack that the recipe divides, by name of the parameter."""
    modules = {name: model.get_submodule(name) for name in divided_experts(recipe, model)}
    return {
        f"{name}.{key}": len(stack)
        for name, module in modules.items()
        for key, stack in module.named_parameters(recurse=False)
    }


def inside_differences(recipe: Recipe, loaded: Loaded, report: LiveState) -> list[str]:
    """Return a sentence if parameters are sharded in another dimension than the recipe means: the first, or
    the second of stacked experts."""
    if report.sharded_inside is None:
        return []
    ranks = report.mesh[-1]
    sharded = [(name, p.shape) for name, p in loaded.model.named_parameters() if isinstance(p, DTensor)]
    divided = _stacks_to_divide(recipe, loaded.model)
    wanted = [name for name, shape in sharded if name in divided or shard_dim(recipe, shape, ranks)]
    wrong = sorted(set(wanted) ^ set(report.sharded_inside))
    if not wrong:
        return []
    meant, live = ("second", "first") if wrong[0] in wanted else ("first", "second")
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return [
        f"sharded_inside: the recipe means `{wrong[0]}` to be sharded in its {meant} dimension, the run has "
        f"it in the {live}{more}"
    ]


def expert_differences(recipe: Recipe, loaded: Loaded, reports: list[LiveState]) -> list[str]:
    """Return a sentence for each rank that does not hold its experts, or exchanges tokens with others than
    the ranks of its group.

    Neighbouring ranks are a group, and hold neighbouring experts of every stack.
    """
    size, found = recipe.fsdp.ep_size, list[str]()
    modules, counts = divided_experts(recipe, loaded.model), _stacks_to_divide(recipe, loaded.model)
    if size > 1 and not modules:
        return ["experts: the recipe divides them, and the run has no divided stack"]
    for rank, report in enumerate(reports):
        place, group = rank % size, list(range(rank - rank % size, rank - rank % size + size))
        parts = {name: [count // size * place, count // size * (place + 1)] for name, count in counts.items()}
        groups, live = dict.fromkeys(modules, group), report.exchanging_ranks
        if (
            other := next(
                (name for name in sorted({*groups, *live}) if live.get(name) != groups.get(name)), None
            )
        ) is not None:
            found.append(
                f"experts of `{other}`: rank {rank} exchanges tokens with ranks {live.get(other)}, "
                f"and its group is {groups.get(other)}"
            )
        elif (
            wrong := next((name for name in parts if report.own_experts.get(name) != parts[name]), None)
        ) is not None:
            found.append(
                f"experts of `{wrong}`: rank {rank} holds {report.own_experts.get(wrong)}, and its "
                f"part is {parts[wrong]}"
            )
    return found
