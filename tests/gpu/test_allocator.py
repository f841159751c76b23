"""The replay of a real run's allocations reserves as much as CUDA's allocator; on the CPU, a hand-written
record is replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fsdp_tune.core.units import MIB
from tests.gpu.conftest import IS_EMULATED, ON_CPU
from tests.gpu.snapshot import replay

pytestmark = pytest.mark.gpu


def entry(action: str, address: int, size: int = 0, stream: int = 0) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": stream}


def test_allocator_record_is_replayed_by_stream_in_order() -> None:
    """A block whose free is still pending is not reused; another stream has separate memory."""
    record = [
        entry("segment_alloc", 1, 20 * MIB),
        entry("alloc", 1, 4 * MIB, 7),
        entry("free_requested", 1, 4 * MIB, 7),
        entry("alloc", 2, 14 * MIB, 7),
        entry("free_completed", 1, 4 * MIB, 7),
        entry("alloc", 3, 4 * MIB, 9),
        entry("free_completed", 99, MIB, 9),
    ]
    made = replay(record, expandable=False)
    assert made.peak_allocated_bytes == 18 * MIB
    assert made.allocated_bytes == 18 * MIB
    assert made.reserved_bytes == (20 + 20) * MIB


@pytest.mark.skipif(ON_CPU, reason="torch records its allocator on CUDA alone")
@pytest.mark.parametrize("setting", ["expandable_segments:False", "expandable_segments:True"])
def test_predicted_reserved_memory_equals_cuda(setting: str) -> None:
    if IS_EMULATED and setting.endswith("True"):
        pytest.skip("the emulated device has no expandable segments")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.snapshot"],
        env=os.environ | {"PYTORCH_ALLOC_CONF": setting},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    print(f"{setting}: {run}")
    assert run["allocations"] > 100
    assert run["replayed_allocated"] == run["allocated"]
    assert run["replayed_reserved"] == run["reserved"]
