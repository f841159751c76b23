"""Experts of a mixture by the names of their modules and parameters, in models and in files.

Everything that reads one of these names reads it here. The fields of configurations are in `core.families`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fsdp_tune.core.families import EMPTY_EXPERTS, expert_count

EXPERT_INDEX_ARGUMENTS = ("top_k_index", "router_indices")
"""Arguments [tokens, chosen] of the forward of stacked experts with the indices of the chosen experts."""
EXPERT_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Stacked parameter → names of the tensors of one expert in files, whose rows follow each other in the
stack."""
EXPERT_MODULES = ((".mlp.", ".mlp."), (".mlp.", ".block_sparse_moe."))
"""Module in the model → module in the files: Mixtral's kept its name from before transformers 5."""
_IN_EXPERTS = ".experts."
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROUTER_IN_EXPERTS = ".router."
_SHARED = "shared"


def dim_inside(shape: Sequence[int], ranks: int) -> int | None:
    """Return the dimension in which `ranks` with the same experts shard a stack of them: the first after that
    of the experts which they divide, since FSDP2 shards it evenly or not at all; None if there is none."""
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), None)


def is_in_experts(name: str) -> bool:
    """Return whether a module or a parameter is below `experts`. JetMoE's routers are, and some of its stacks
    are not."""
    return _IN_EXPERTS in name


def number_of_expert(name: str) -> int | None:
    """Return which expert a parameter belongs to; None if experts are stacked, or it belongs to none."""
    return int(found[1]) if (found := _EXPERT.search(name)) else None


def stack_of(name: str) -> str | None:
    """Return the module that holds the experts of a layer, of a name of one of them that may be stacked in
    it; None for other names."""
    return name[: found.start(1) - 1] if (found := _EXPERT.search(name)) else None


def is_router_in_experts(name: str) -> bool:
    """Return whether a parameter of `is_in_experts` is one of a router (JetMoE)."""
    return _ROUTER_IN_EXPERTS in name


def is_shared_expert(name: str) -> bool:
    """Return whether a parameter belongs to an expert that every token uses."""
    return _SHARED in name


def are_stacked_experts(module: str) -> bool:
    """Return whether a module of this name may hold stacked experts."""
    return module.endswith("experts")


def have_experts(modules: Iterable[str]) -> bool:
    """Return whether a model with modules of these names has experts or routers of its own kind."""
    return any("expert" in name for name in modules)


def is_router(config: object, outputs: int) -> bool:
    """Return whether a linear layer with this number of outputs has one for each expert of a mixture."""
    experts = expert_count(config)
    return experts > 1 and outputs == experts + (EMPTY_EXPERTS.of(config) or 0)
