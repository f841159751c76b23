"""The sharding strategies and what each is. Every other list of their names is made from this one.

Except one: `fsdp.py` says by hand what a live run of each must look like, so that a mistake here cannot agree with itself.
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
    """False: every rank holds the whole model (plain DDP)."""
    is_hybrid: bool
    """Sharded within a copy, and several copies: the search tries it over machines, where copies spare the slow links."""
    reshards: bool
    """Whether a unit frees what it gathered for its forward, and gathers it again for its backward (ZeRO-3)."""


STRATEGIES: dict[ShardingStrategy, Strategy] = {
    "FULL_SHARD": Strategy(1, is_sharded=True, is_hybrid=False, reshards=True),
    "SHARD_GRAD_OP": Strategy(2, is_sharded=True, is_hybrid=False, reshards=False),
    "HYBRID_SHARD": Strategy(4, is_sharded=True, is_hybrid=True, reshards=True),
    "HYBRID_SHARD_ZERO2": Strategy(5, is_sharded=True, is_hybrid=True, reshards=False),
    "NO_SHARD": Strategy(3, is_sharded=False, is_hybrid=False, reshards=False),
}
"""In the order in which a search tries them."""
