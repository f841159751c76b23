"""The kernel of stacked experts in files of tools that pass it on to transformers."""

from __future__ import annotations

from typing import Any

from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.migrate.ledger import Fate, Ledger, Path


def experts_kernel(ledger: Ledger, path: Path, value: Any) -> None:
    """Settle transformers' `experts_implementation`; kernels of the tool's own, and those that cannot train, are questions."""
    known = EXPERTS_KERNELS.get(str(value))
    if known is not None and known.why_not is None:
        ledger.write(path, {"kernels.experts": str(value)}, Fate.CONVERTED)
    else:
        why = "is a kernel that fsdp-tune does not have" if known is None else f"cannot train: {known.why_not}"
        ledger.ask(path, f"`{value}` {why}; leave it out, or write `kernels: {{experts: grouped_mm}}`", ("kernels", "experts"))
