"""Choose the kernel of a model's stacked experts, `kernels.experts`, and read the one that runs.

transformers decorates a class of experts (`use_experts_implementation`): its forward looks up the kernel in the configuration that the
module holds. That configuration is therefore what is read back.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS, ExpertsKernel
from fsdp_tune.model.internals.transformers_internals import EXPERTS, has_experts_kernel, has_own_gate
from fsdp_tune.model.model_files import WRITTEN, KernelChoice
from fsdp_tune.model.shard.local import bare_class
from fsdp_tune.recipe.schema.recipe import Recipe

KEY = "kernels.experts"


def request_experts(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Write the kernel of the recipe into the configuration of a model that is built next; auto leaves transformers' choice."""
    if recipe.kernels.experts != "auto":
        EXPERTS.set(config, recipe.kernels.experts)


def live_experts(model: nn.Module) -> dict[str, str]:
    """Return {kernel: class of the experts that it computes} of a model; empty if it has no experts whose kernel can be chosen."""
    found = [module for module in model.modules() if has_experts_kernel(module)]
    return {str(EXPERTS.of(module.config)): bare_class(module).__name__ for module in found}


def choose_experts(recipe: Recipe, model: PreTrainedModel, device_type: str) -> dict[str, KernelChoice]:
    """Return the kernel by recipe key; empty for a model without experts whose kernel can be chosen.

    Raises: usage error for a kernel that the recipe or the model's config.json sets and that cannot train this model.
    """
    requested, live = recipe.kernels.experts, live_experts(model)
    if not live:
        if requested != "auto":
            raise _refused(requested, f"{bare_class(model).__name__} has no experts whose kernel can be chosen")
        return {}
    for name in live:
        if name not in EXPERTS_KERNELS:
            raise _refused(name, f"transformers {importlib.metadata.version('transformers')} has it, and it was not shown to train")
        if reason := _against(EXPERTS_KERNELS[name], model, device_type):
            raise _refused(name, reason)
    classes = " and ".join(sorted(set(live.values())))
    reason = WRITTEN if requested != "auto" else f"transformers' choice for {classes}"
    return {KEY: KernelChoice(" and ".join(sorted(live)), reason)}


def _refused(name: str, reason: str) -> FsdpTuneError:
    hint = "`auto` takes the kernel that transformers chooses, or write `grouped_mm`"
    return usage_error("experts-kernel-refused", f"`{KEY}: {name}`: {reason}", where=Where(key=KEY), hint=hint)


def _against(kernel: ExpertsKernel, model: PreTrainedModel, device_type: str) -> str | None:
    """Return why a kernel cannot train a model on this machine; None if it can."""
    if kernel.why_not is not None:
        return kernel.why_not
    if kernel.generations and device_type != "cuda":
        return f"it has kernels for CUDA, and the device is {device_type}"
    experts = [module for module in model.modules() if has_experts_kernel(module)]
    if kernel.gate is not None and (others := [module for module in experts if not _is_gated_by(module, kernel.gate)]):
        return f"it computes {kernel.gate}(gate) × up, and {bare_class(others[0]).__name__} has experts that differ from it"
    missing = [name for name in kernel.distributions if not _is_installed(name)]
    return f"it needs {' and '.join(missing)} (`pip install {' '.join(missing)}`)" if missing else None


def _is_gated_by(experts: Any, activation: str) -> bool:
    """Return whether experts are `activation(gate) × up` and a projection down, by their code and not by the name in config.json.

    transformers calls SonicMoE without the model's `_apply_gate` and with `config.hidden_act`, which a class may not use: gpt-oss has
    a gate of its own, Gemma 4 reads `hidden_activation`.
    """
    is_plain = experts.has_gate and not getattr(experts, "has_post_expert_norm", False)
    named = str(getattr(experts.config, "hidden_act", activation)).lower()  # as transformers reads it
    return is_plain and not has_own_gate(experts) and named == activation and isinstance(experts.act_fn, type(ACT2FN[activation]))


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
