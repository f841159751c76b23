"""Compare the live model's modules and parameters with the recipe: units, recomputation, kernels, frozen parameters."""

from __future__ import annotations

import fnmatch
import math
from typing import Any

from fsdp_tune.model.attention import choose_attention, stands_for
from fsdp_tune.model.build import frozen_by_its_code
from fsdp_tune.model.load import Loaded
from fsdp_tune.model.step import plain_name
from fsdp_tune.recipe.schema import Recipe


def structure_differences(recipe: Recipe, loaded: Loaded, report: dict[str, Any]) -> list[str]:
    """Return one sentence for each difference between the recipe and the live model."""
    layers = [name for name, _ in loaded.layers]
    found = _units(recipe, layers, report)
    wanted = 0 if recipe.fsdp.activation_checkpointing == "none" else math.ceil(len(layers) / recipe.fsdp.activation_checkpointing_every)
    if report["recomputed_layers"] != wanted:
        found.append(f"recomputed_layers: the recipe means {wanted} of {len(layers)}, the run has {report['recomputed_layers']}")
    kernel = choose_attention(recipe, loaded.model.config).value
    if kernel != "auto" and not stands_for(str(report["attention"]), kernel):
        found.append(f"attention: the recipe means {kernel!r}, the run has {report['attention']!r}")
    wanted_loss = recipe.kernels.loss if recipe.kernels.loss != "auto" else loaded.kernels["kernels.loss"].value
    if report["loss_kernel"] != wanted_loss:
        found.append(f"loss: the recipe means {wanted_loss!r}, the run has {report['loss_kernel']!r}")
    wanted_liger = loaded.kernels["kernels.liger"].value == "true"
    if wanted_liger != bool(report["liger_modules"]):
        found.append(f"liger: the recipe means {wanted_liger}, the run has {report['liger_modules']} modules of Liger's")
    wanted_compiled = len(layers) if recipe.kernels.compile else 0
    if report["compiled_layers"] != wanted_compiled:
        found.append(f"compiled_layers: the recipe means {wanted_compiled} of {len(layers)}, the run has {report['compiled_layers']}")
    return found + _frozen(recipe, loaded)


def _units(recipe: Recipe, layers: list[str], report: dict[str, Any]) -> list[str]:
    """Under TRANSFORMER_BASED_WRAP every decoder layer that FSDP does not ignore is a unit; layers that share parameters share one."""
    if report["wrapper"] != "fsdp2" or recipe.fsdp.auto_wrap_policy != "TRANSFORMER_BASED_WRAP" or recipe.fsdp.ignored_modules is not None:
        return []
    units = {name for unit in report["units"] for name in unit["modules"]}
    missing = [layer for layer in layers if layer not in units]
    return [f"units: {missing[0]} is not a unit ({len(missing)} of {len(layers)} decoder layers)"] if missing else []


def _frozen(recipe: Recipe, loaded: Loaded) -> list[str]:
    """Frozen are the parameters that match `model.freeze` and those that the model's own code froze."""
    own = frozen_by_its_code(loaded.model)
    for wrapped_name, parameter in loaded.wrapped.named_parameters():
        name = plain_name(wrapped_name)
        wanted = name in own or any(fnmatch.fnmatchcase(name, pattern) for pattern in recipe.model.freeze)
        if wanted == parameter.requires_grad:
            state = "frozen" if wanted else "trained"
            return [f"frozen: the recipe means {name} to be {state}, and the run has it {'trained' if wanted else 'frozen'}"]
    return []
