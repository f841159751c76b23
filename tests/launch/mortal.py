"""The real worker with injected faults. Started as `python -m tests.launch.mortal RUN_DIR`.

RUN/accidents.json is a list of {"rank", "step", "how", "phase"}; each happens once, in order for its rank, at
the first heartbeat in that phase ("training" unless given) at that step or later. `how`: a signal's number,
"raise", "oom", "memory", "sleep" (for ever), "hold" (Python's lock, for ever), "slow disk" (1 MiB takes 30
seconds from then on), "dead disk" (a write never returns from then on).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import IO, Any

from fsdp_tune.core import atomic
from fsdp_tune.worker.observe import heartbeat

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.05 "
    "GiB is free. Including non-PyTorch memory, this process has 78.04 GiB memory in use. Of the allocated "
    "memory 74.02 GiB is allocated by PyTorch, and 1.01 GiB is reserved by PyTorch but unallocated."
)


def due(run: Path, rank: int, step: int, phase: str) -> str | int | None:
    for number, accident in enumerate(json.loads((run / "accidents.json").read_text())):
        mark = run / f"accident-{number}"
        if accident["rank"] != rank or mark.exists():
            continue
        if step < accident["step"] or phase != accident.get("phase", "training"):
            return None
        mark.touch()
        how: str | int = accident["how"]
        return how
    return None


def happen(how: str | int) -> None:
    import torch

    if isinstance(how, int):
        os.kill(os.getpid(), how)
        time.sleep(0 if how == signal.SIGTERM else 600)
    elif how == "raise":
        raise RuntimeError("a library failed")
    elif how == "oom":
        raise torch.OutOfMemoryError(CUDA_MESSAGE)
    elif how == "memory":
        raise MemoryError
    elif how == "sleep":
        time.sleep(600)
    elif how == "hold":
        sleep: Any = ctypes.PyDLL(None).sleep
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            sleep(600)  # a signal cuts it short
    elif how in ("slow disk", "dead disk"):
        atomic.Disk.write = partial(_slowly, 30.0 if how == "slow disk" else 1e6)  # type: ignore[method-assign,assignment]


def _slowly(seconds_for_a_mib: float, file: IO[bytes], data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    for start in range(0, len(view), 1 << 17):
        part = view[start : start + (1 << 17)]
        time.sleep(seconds_for_a_mib * len(part) / (1 << 20))
        file.write(part)


def main() -> int:
    run, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    original = heartbeat.HeartbeatWriter._record

    def record(self: heartbeat.HeartbeatWriter, phase: str, step: int | None) -> None:
        original(self, phase, step)
        how = due(run, rank, self.step, phase)
        if how is not None:
            happen(how)

    heartbeat.HeartbeatWriter._record = record  # type: ignore[method-assign]
    from fsdp_tune.worker.__main__ import main as worker

    return worker(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
