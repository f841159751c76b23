"""Explain the first recipe of a ranking in a sentence with figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_tune.core.command import Target
from fsdp_tune.planner.search.candidates import PlannedRecipe, device_seconds
from fsdp_tune.recipe.schema.recipe import Recipe


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
        are, need = ("is", "needs") if len(equal) == 2 else ("are", "need")
        said.append(
            f"{len(equal) - 1} more {are} equal within the median error of such times ({error:g} %) "
            f"and {need} no less memory"
        )
    others = [each for each in fitting[1:] if each not in equal and _layout_of(each) != _layout_of(ranked[0])]
    if others and first.step_seconds is not None and others[0].plan.step_seconds is not None:
        more, gpus = device_seconds(ranked[0]) / device_seconds(others[0]) - 1, others[0].plan.num_processes
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
