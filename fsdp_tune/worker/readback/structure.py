"""Compare the live model's modules and parameters with the recipe: units, recomputation, kernels, frozen
parameters."""

from __future__ import annotations

import math

from fsdp_tune.model.kernels.attention import choose_attention, stands_for
from fsdp_tune.model.kernels.expert_kernels import KEY
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.records import LiveState
from fsdp_tune.worker.readback.trained import training_differences


def structure_differences(recipe: Recipe, loaded: Loaded, report: LiveState) -> list[str]:
    """Return one sentence for each difference between the recipe and the live model."""
    layers = [name for name, _ in loaded.layers]
    found = _units(recipe, layers, report)
    wanted = (
        0
        if recipe.fsdp.activation_checkpointing == "none"
        else math.ceil(len(layers) / recipe.fsdp.activation_checkpointing_every)
    )
    if report.recomputed_layers != wanted:
        found.append(
            f"recomputed_layers: the recipe means {wanted} of {len(layers)}, the run has "
            f"{report.recomputed_layers}"
        )
    kernel = choose_attention(recipe, loaded.model.config).value
    if kernel != "auto" and not stands_for(str(report.attention), kernel):
        found.append(f"attention: the recipe means {kernel!r}, the run has {report.attention!r}")
    found += experts_differences(recipe, report)
    wanted_loss = (
        recipe.kernels.loss if recipe.kernels.loss != "auto" else loaded.kernels["kernels.loss"].value
    )
    if report.loss_kernel != wanted_loss:
        found.append(f"loss: the recipe means {wanted_loss!r}, the run has {report.loss_kernel!r}")
    wanted_liger = loaded.kernels["kernels.liger"].value == "true"
    if wanted_liger != bool(report.liger_modules):
        found.append(
            f"liger: the recipe means {wanted_liger}, the run has {report.liger_modules} modules of Liger's"
        )
    wanted_slices = [recipe.kernels.mlp_slice_tokens] if recipe.kernels.mlp_slice_tokens is not None else []
    if report.mlp_slice_tokens != wanted_slices:
        found.append(
            f"mlp_slice_tokens: the recipe means {wanted_slices}, the run has {report.mlp_slice_tokens}"
        )
    wanted_compiled = len(layers) if recipe.kernels.compile else 0
    if report.compiled_layers != wanted_compiled:
        found.append(
            f"compiled_layers: the recipe means {wanted_compiled} of {len(layers)}, the run has "
            f"{report.compiled_layers}"
        )
    return found + training_differences(recipe, loaded)


def experts_differences(recipe: Recipe, report: LiveState) -> list[str]:
    """Return a sentence if experts run another kernel than the recipe's, or than the one that was chosen when
    the model was built."""
    chosen = report.kernels.get(KEY)
    wanted = (
        recipe.kernels.experts
        if recipe.kernels.experts != "auto"
        else chosen.value
        if chosen is not None
        else None
    )
    live = " and ".join(report.experts) or None
    return [f"experts: the recipe means {wanted!r}, the run has {live!r}"] if live != wanted else []


def _units(recipe: Recipe, layers: list[str], report: LiveState) -> list[str]:
    """Under TRANSFORMER_BASED_WRAP every decoder layer that FSDP does not ignore is a unit; layers that share
    parameters share one."""
    if (
        report.wrapper != "fsdp2"
        or recipe.fsdp.auto_wrap_policy != "TRANSFORMER_BASED_WRAP"
        or recipe.fsdp.ignored_modules is not None
    ):
        return []
    units = {name for unit in report.units for name in unit.modules}
    missing = [layer for layer in layers if layer not in units]
    return (
        [f"units: {missing[0]} is not a unit ({len(missing)} of {len(layers)} decoder layers)"]
        if missing
        else []
    )
