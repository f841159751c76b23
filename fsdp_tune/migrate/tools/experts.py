"""The kernel of stacked experts in files of tools that pass it on to transformers."""

from __future__ import annotations

from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.migrate.rules import FileKey, Outcome
from fsdp_tune.recipe.outcome import Ask, Write


def experts_kernel(key: FileKey) -> Outcome:
    """Settle transformers' `experts_implementation`; kernels of the tool's own, and those that cannot train, are questions."""
    name = str(key.value)
    known = EXPERTS_KERNELS.get(name)
    if known is not None and known.why_not is None:
        return Write({"kernels.experts": name})
    why = "is a kernel that fsdp-tune does not have" if known is None else f"cannot train: {known.why_not}"
    return Ask(f"`{key.value}` {why}; leave it out, or write `kernels: {{experts: grouped_mm}}`", "kernels.experts")
