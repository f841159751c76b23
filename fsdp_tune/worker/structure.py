"""What the recipe says of single modules and parameters, held against the live model: units, recomputation, kernel, freezing."""

from __future__ import annotations

import fnmatch
import math
from typing import Any

from fsdp_tune.model.load import Loaded
from fsdp_tune.model.step import plain_name
from fsdp_tune.model.units import decoder_layers
from fsdp_tune.recipe.schema import Recipe


def structure_differences(recipe: Recipe, loaded: Loaded, report: dict[str, Any]) -> list[str]:
    """One sentence for each that is not as the recipe says."""
    layers = [name for name, _ in decoder_layers(loaded.model, recipe.layer_classes)]
    found = _units(recipe, layers, report)
    wanted = 0 if recipe.fsdp.activation_checkpointing == "none" else math.ceil(len(layers) / recipe.fsdp.activation_checkpointing_every)
    if report["recomputed_layers"] != wanted:
        found.append(f"recomputed_layers: the recipe means {wanted} of {len(layers)}, the run has {report['recomputed_layers']}")
    asked = recipe.model.attn_implementation
    kernel = asked if asked != "auto" else loaded.kernels["model.attn_implementation"].value
    if kernel != report["attention"]:
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
    """Under the wrap by class every decoder layer is a unit of its own, but for those that FSDP was told to leave alone."""
    if report["wrapper"] != "fsdp2" or recipe.fsdp.auto_wrap_policy != "TRANSFORMER_BASED_WRAP" or recipe.fsdp.ignored_modules is not None:
        return []
    units = {unit["modules"][0] for unit in report["units"] if len(unit["modules"]) == 1}
    missing = [layer for layer in layers if layer not in units]
    return [f"units: {missing[0]} is no unit of its own ({len(missing)} of {len(layers)} decoder layers)"] if missing else []


def _frozen(recipe: Recipe, loaded: Loaded) -> list[str]:
    for name, parameter in loaded.wrapped.named_parameters():
        wanted = any(fnmatch.fnmatchcase(plain_name(name), pattern) for pattern in recipe.model.freeze)
        if wanted == parameter.requires_grad:
            state = "frozen" if wanted else "trained"
            return [f"frozen: the recipe means {plain_name(name)} to be {state}, and the run has it {'trained' if wanted else 'frozen'}"]
    return []
