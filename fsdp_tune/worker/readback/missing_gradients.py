"""Gradients of step 1: which adapters and trained parameters have none, on any rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.model.adapters.lora import ADAPTER_NAME, adapters_of
from fsdp_tune.model.adapters.targets import last_parts
from fsdp_tune.model.shard.local import local_part

_ABSENT, _ZERO, _PRESENT = range(3)


def adapter_gradients(model: nn.Module) -> dict[str, int]:
    """Return adapted module or parameter → whether its adapter has no gradient on this rank, one of zeros, or
    another one."""
    found: dict[str, int] = {}
    for name, layer in adapters_of(model).items():
        # The factor that starts at zero: as long as it does, the gradient of the other one is zero.
        is_embedding = ADAPTER_NAME in layer.lora_embedding_A
        factor = layer.lora_embedding_A[ADAPTER_NAME] if is_embedding else layer.lora_B[ADAPTER_NAME].weight
        gradient = factor.grad
        found[name] = _ABSENT if gradient is None else _PRESENT if bool(local_part(gradient).any()) else _ZERO
    return found


def adapters_without_gradient(every: Sequence[dict[str, int]]) -> str | None:
    """Return a warning that counts the adapters without a gradient, from the `adapter_gradients` of all
    ranks.

    Raises: usage error if the adapters of a kind get none in any layer, whatever the data: the model's code
    reads the weight of such a module without calling it (Jamba's `dt_proj`, the router of LongCat), and
    PEFT's layer is never run.
    """
    kinds: dict[str, dict[str, int]] = defaultdict(dict)
    for name in every[0]:
        kinds[name.rpartition(".")[2]][name] = max(found[name] for found in every)
    if dead := [kind for kind, found in kinds.items() if max(found.values()) == _ABSENT]:
        names = ", ".join(f"`{kind}`" for kind in dead)
        message = (
            f"the adapters of {names} get no gradient in any layer: the model does not call these modules"
        )
        left = last_parts(kind for kind in kinds if kind not in dead)
        hint = f"leave them out: name only {left}" if left else None
        raise usage_error("lora-target", message, where=Where(key="lora"), hint=hint)
    lost = {
        kind: [name for name, gradient in found.items() if gradient != _PRESENT]
        for kind, found in kinds.items()
    }
    counts = ", ".join(f"{len(names)} of {len(kinds[kind])} {kind}" for kind, names in lost.items() if names)
    first = next((name for names in lost.values() for name in names), None)
    return (
        f"adapters without a gradient in the first step: {counts}, such as that of `{first}`"
        if first
        else None
    )


def parameters_without_gradient(every: Sequence[Sequence[str]]) -> str | None:
    """Return a warning about trained parameters, from the names of those that have no gradient on each rank;
    None if each has one."""
    others = [set(own) for own in every[1:]]
    names = [name for name in every[0] if all(name in own for own in others)]
    if not names:
        return None
    have = "trained parameter has" if len(names) == 1 else "trained parameters have"
    why = "the model's code or a kernel does not differentiate it, and training leaves it as it is"
    return f"{len(names):,} {have} no gradient in the first step, such as `{names[0]}`: {why}"
