"""Keys about stacked experts: their kernel, which tools pass on to transformers, and the ranks that divide
them."""

from __future__ import annotations

from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.migrate.rules import FileKey, Outcome
from fsdp_tune.recipe.outcome import Ask, Drop, Write


def experts_kernel(key: FileKey) -> Outcome:
    """Settle transformers' `experts_implementation`; kernels of the tool's own, and those that cannot train,
    are questions."""
    name = str(key.value)
    known = EXPERTS_KERNELS.get(name)
    if known is not None and known.why_not is None:
        return Write({"kernels.experts": name})
    why = "is a kernel that fsdp-tune does not have" if known is None else f"cannot train: {known.why_not}"
    return Ask(
        f"`{key.value}` {why}; leave it out, or write `kernels: {{experts: grouped_mm}}`", "kernels.experts"
    )


_UNDIVIDED = (None, 1, "1", "none", "None", "null")


def expert_ranks(key: FileKey) -> Outcome:
    """Settle the number of ranks that divide the experts of a layer."""
    value = key.value
    if not isinstance(value, bool) and value in _UNDIVIDED:
        return Drop("each rank has all experts, as by default")
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (
        Write({"fsdp.ep_size": value})
        if is_number
        else Ask("it is not a number of ranks: write `fsdp: {ep_size: N}`", "fsdp.ep_size")
    )
