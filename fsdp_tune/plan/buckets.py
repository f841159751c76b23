"""DDP's buckets: which gradients are summed together, and when.

A trace has one sum for each parameter, where its gradient becomes ready. DDP waits for a bucket to be full: it fills buckets in the
order in which gradients became ready in the first step (`Reducer::rebuild_buckets`), and one that has reached its limit is closed, the
parameter that went over it included.
"""

from __future__ import annotations

import numpy as np

from fsdp_tune.plan.trace_format import COLLECTIVES, PHASES, Records, Trace
from fsdp_tune.units import MIB

FIRST_BUCKET_BYTES = 1 * MIB
"""`dist._DEFAULT_FIRST_BUCKET_BYTES`: the first sum is to begin early."""
BUCKET_BYTES = 25 * MIB
"""`bucket_cap_mb` of DistributedDataParallel."""


def in_buckets(trace: Trace, collectives: Records) -> Records:
    """The collectives of one step, those of DDP's gradients joined; each bucket is where its last gradient is. Others are untouched."""
    shapes = trace.shapes
    if shapes.shard_size > 1 or shapes.replicate_size != shapes.world_size:
        return collectives
    is_sum = (collectives["kind"] == COLLECTIVES.index("all_reduce")) & (collectives["phase"] == PHASES.index("backward"))
    kept, sizes = np.ones(len(collectives), bool), collectives["bytes"].copy()
    gathered, limit = 0, FIRST_BUCKET_BYTES
    sums = np.flatnonzero(is_sum).tolist()
    for row in sums:
        gathered += int(sizes[row])
        if gathered >= limit or row == sums[-1]:
            sizes[row], gathered, limit = gathered, 0, BUCKET_BYTES
        else:
            kept[row] = False
    joined: Records = collectives.copy()
    joined["bytes"] = sizes
    return joined[kept]
