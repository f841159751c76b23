"""Sharding strategies: what each shards, and its names in other tools.

Every list of strategies is derived from `STRATEGIES`, except `recipe.fsdp_arguments`, which defines the expected state of a live run
independently, so that a mistake here is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"]


@dataclass(frozen=True, slots=True)
class Strategy:
    number: int
    """torch.distributed.fsdp.ShardingStrategy, as `accelerate config` numbers them."""
    is_sharded: bool
    """False: every rank holds the full model (plain DDP)."""
    is_hybrid: bool
    """Sharded within each of several copies. The search tries it over several machines, where copies avoid traffic on slow links."""
    reshards: bool
    """Whether a unit frees its gathered parameters after its forward, and gathers them again for its backward (ZeRO-3)."""
    other_names: tuple[str, ...]
    """What other tools call it, for hints: in lower case, letters and digits alone."""


STRATEGIES: dict[ShardingStrategy, Strategy] = {
    "FULL_SHARD": Strategy(
        1,
        is_sharded=True,
        is_hybrid=False,
        reshards=True,
        other_names=("zero3", "zerostage3", "stage3", "deepspeedzero3", "fsdp", "fsdp1", "fsdp2", "full", "sharded"),
    ),
    "SHARD_GRAD_OP": Strategy(
        2,
        is_sharded=True,
        is_hybrid=False,
        reshards=False,
        other_names=("zero2", "zerostage2", "stage2", "deepspeedzero2", "zero1", "zerostage1", "stage1", "deepspeedzero1"),
    ),
    "HYBRID_SHARD": Strategy(
        4, is_sharded=True, is_hybrid=True, reshards=True, other_names=("hybrid", "hsdp", "hybridzero3", "hybridfsdp")
    ),
    "HYBRID_SHARD_ZERO2": Strategy(5, is_sharded=True, is_hybrid=True, reshards=False, other_names=("hybridzero2", "hsdpzero2")),
    "NO_SHARD": Strategy(
        3,
        is_sharded=False,
        is_hybrid=False,
        reshards=False,
        other_names=("ddp", "dp", "dataparallel", "distributeddataparallel", "multigpu", "zero0", "stage0", "none", "replicated"),
    ),
}
"""In the order in which the search tries them."""
