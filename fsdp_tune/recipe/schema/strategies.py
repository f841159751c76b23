"""Sharding strategies: what each shards.

Every list of strategies is derived from `STRATEGIES`, except `recipe.fsdp_arguments`, which defines the
expected state of a live run independently, so that a mistake here is found.
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
    """Sharded within each of several copies. The search tries it over several machines, where copies avoid
    traffic on slow links."""
    reshards: bool
    """Whether a unit frees its gathered parameters after its forward, and gathers them again for its backward
    (ZeRO-3)."""


STRATEGIES: dict[ShardingStrategy, Strategy] = {
    "FULL_SHARD": Strategy(1, is_sharded=True, is_hybrid=False, reshards=True),
    "SHARD_GRAD_OP": Strategy(2, is_sharded=True, is_hybrid=False, reshards=False),
    "HYBRID_SHARD": Strategy(4, is_sharded=True, is_hybrid=True, reshards=True),
    "HYBRID_SHARD_ZERO2": Strategy(5, is_sharded=True, is_hybrid=True, reshards=False),
    "NO_SHARD": Strategy(3, is_sharded=False, is_hybrid=False, reshards=False),
}
"""In the order in which the search tries them."""
