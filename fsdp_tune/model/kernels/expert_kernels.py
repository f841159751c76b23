"""Choose the kernel of a model's stacked experts, `kernels.experts`, and read the one that runs.

transformers decorates a class of experts (`use_experts_implementation`): its forward looks up the kernel in
the configuration that the module holds. That configuration is therefore what is read back.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE
from packaging.version import Version
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import is_kernels_available

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS, ExpertsKernel
from fsdp_tune.core.hub import hub_is_reachable
from fsdp_tune.model.internals.transformers_internals import (
    EXPERTS,
    SONICMOE_NEEDS,
    has_experts_kernel,
    has_own_gate,
)
from fsdp_tune.model.model_files import WRITTEN, KernelChoice
from fsdp_tune.model.shard.local import bare_class
from fsdp_tune.recipe.schema.recipe import Recipe

KEY = "kernels.experts"


def request_experts(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Write the kernel of the recipe into the configuration of a model that is built next, in place of any
    that its config.json names.

    With auto and grouped_mm transformers chooses: grouped_mm, or eager for a class that has no other.
    `choose_experts` compares the result with the recipe. transformers itself refuses `grouped_mm` for dense
    models, and for those whose experts are in a nested model.
    """
    requested = recipe.kernels.experts
    EXPERTS.set(config, None if requested in ("auto", "grouped_mm") else requested)


def live_experts(model: nn.Module) -> dict[str, str]:
    """Return {kernel: class of the experts that it computes} of a model; empty if it has no experts whose
    kernel can be chosen."""
    found = [module for module in model.modules() if has_experts_kernel(module)]
    return {str(EXPERTS.of(module.config)): bare_class(module).__name__ for module in found}


def choose_experts(recipe: Recipe, model: PreTrainedModel, device_type: str) -> dict[str, KernelChoice]:
    """Return the kernel by recipe key; empty for a model without experts whose kernel can be chosen.

    Raises: usage error for a kernel that the recipe sets and this model does not have, or that cannot train
    it; and for live kernels that the recipe does not set and that download code.
    """
    requested, live = recipe.kernels.experts, live_experts(model)
    if not live:
        if requested != "auto":
            raise _refused(
                requested, f"{bare_class(model).__name__} has no experts whose kernel can be chosen"
            )
        return {}
    for name in live:
        if name not in EXPERTS_KERNELS:
            raise _refused(
                name,
                f"transformers {importlib.metadata.version('transformers')} has it, and it was not "
                "shown to train",
            )
        if requested not in ("auto", name):
            raise _refused(requested, f"{live[name]} has no such kernel, and would be computed by `{name}`")
        if requested == "auto" and (repository := EXPERTS_KERNELS[name].repository) is not None:
            raise _refused(name, f"the model's files name it, and it runs code from the hub, `{repository}`")
        if reason := _against(EXPERTS_KERNELS[name], model, device_type):
            raise _refused(name, reason)
    classes = " and ".join(sorted(set(live.values())))
    reason = (
        WRITTEN if requested != "auto" else f"transformers' choice for {classes}, whatever config.json names"
    )
    return {KEY: KernelChoice(" and ".join(sorted(live)), reason)}


def _refused(name: str, reason: str) -> FsdpTuneError:
    hint = "`auto` takes the kernel that transformers chooses, or write `grouped_mm`"
    return usage_error(
        "experts-kernel-refused", f"`{KEY}: {name}`: {reason}", where=Where(key=KEY), hint=hint
    )


def _against(kernel: ExpertsKernel, model: PreTrainedModel, device_type: str) -> str | None:
    """Return why a kernel cannot train a model on this machine; None if it can."""
    if kernel.why_not is not None:
        return kernel.why_not
    if kernel.generations and device_type != "cuda":
        return f"it has kernels for CUDA, and the device is {device_type}"
    experts = [module for module in model.modules() if has_experts_kernel(module)]
    if kernel.gate is not None and (
        others := [module for module in experts if not _is_gated_by(module, kernel.gate)]
    ):
        return (
            f"it computes {kernel.gate}(gate) × up, and {bare_class(others[0]).__name__} has experts "
            "that differ from it"
        )
    if missing := [text for name in kernel.distributions if (text := _missing(name)) is not None]:
        return f"it needs {' and '.join(missing)} (`pip install {shlex.join(missing)}`)"
    if kernel.repository is not None and not _is_cached(kernel.repository) and not hub_is_reachable():
        return f"its code, `{kernel.repository}`, is not in the cache of the hub, which cannot be reached"
    return None


def _missing(distribution: str) -> str | None:
    """Return the requirement that is not installed, or not in the versions that transformers takes; None if
    it is."""
    if distribution == "kernels":
        return None if is_kernels_available() else "transformers[kernels]"
    oldest = (SONICMOE_NEEDS.get() or {}).get(distribution)
    try:
        installed = Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed is not None and (oldest is None or installed >= Version(oldest)):
        return None
    return distribution if oldest is None else f"{distribution}>={oldest}"


def _is_cached(repository: str) -> bool:
    """Return whether any revision of a repository of kernels is in the cache that the package `kernels`
    uses."""
    cache = Path(os.environ.get("KERNELS_CACHE") or HF_HUB_CACHE)
    return any(cache.glob(f"*--{repository.replace('/', '--')}/snapshots/*"))


def _is_gated_by(experts: Any, activation: str) -> bool:
    """Return whether experts are `activation(gate) × up` and a projection down, by their code and not by the
    name in config.json.

    transformers calls SonicMoE without the model's `_apply_gate` and with `config.hidden_act`, which a class
    may not use: gpt-oss has a gate of its own, Gemma 4 reads `hidden_activation`.
    """
    is_plain = experts.has_gate and not getattr(experts, "has_post_expert_norm", False)
    named = str(getattr(experts.config, "hidden_act", activation)).lower()  # as transformers reads it
    return (
        is_plain
        and not has_own_gate(experts)
        and named == activation
        and isinstance(experts.act_fn, type(ACT2FN[activation]))
    )
