"""The caching allocator of a real run against ours: what torch recorded of it, replayed.

    python -m tests.gpu.snapshot        one JSON line: what was replayed, and what torch said

The setting under test is `PYTORCH_ALLOC_CONF` of the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_tune.planner.predict.allocator import Block, CachingAllocator

STEPS, LAYERS = 3, 6


def replay(entries: Iterable[Mapping[str, Any]], *, expandable: bool) -> CachingAllocator:
    """`device_traces` of `torch.cuda.memory._snapshot`: allocations and completed frees, in order, on their
    streams."""
    allocator = CachingAllocator(expandable=expandable)
    streams: dict[int, int] = {}
    blocks: dict[int, Block] = {}
    for entry in entries:
        if entry["action"] == "alloc":
            stream = streams.setdefault(entry["stream"], len(streams))
            blocks[entry["addr"]] = allocator.allocate(entry["size"], stream)
        elif entry["action"] == "free_completed" and entry["addr"] in blocks:
            allocator.free(blocks.pop(entry["addr"]))
    return allocator


def recorded_run() -> dict[str, Any]:
    """A small training whose activations have many sizes, on two streams."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    widths = [700 + 97 * index for index in range(LAYERS)]
    layers = torch.nn.Sequential(
        *(torch.nn.Linear(a, b) for a, b in zip([512, *widths], [*widths, 512], strict=True))
    ).cuda()
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    other = torch.cuda.Stream()
    for step in range(STEPS):
        loss = layers(torch.randn(1000 + 333 * step, 512, device="cuda")).float().pow(2).mean()
        with torch.cuda.stream(other):
            copies = [parameter.detach() * 1 for parameter in layers.parameters()]
        torch.cuda.current_stream().wait_stream(other)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del copies
    torch.cuda.synchronize()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    replayed = replay(
        entries, expandable="expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    )
    return {
        "allocations": sum(entry["action"] == "alloc" for entry in entries),
        "replayed_allocated": replayed.peak_allocated_bytes,
        "replayed_reserved": replayed.peak_reserved_bytes,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


if __name__ == "__main__":
    print(json.dumps(recorded_run()))
