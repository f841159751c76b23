"""The real worker with accidents. Started as `python -m tests.launch.mortal RUN_DIR`.

RUN/accidents.json is a list of {"rank", "step", "how"}; each happens once, in order for its rank, at the first sign of life
at that step or later. `how`: a signal's number, "raise", "oom", "memory", "sleep" (for ever), "hold" (Python's lock, for ever).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from fsdp_tune.worker import heartbeat

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.05 GiB is free. "
    "Including non-PyTorch memory, this process has 78.04 GiB memory in use. Of the allocated memory 74.02 GiB is allocated by PyTorch, "
    "and 1.01 GiB is reserved by PyTorch but unallocated."
)


def due(run: Path, rank: int, step: int) -> str | int | None:
    for number, accident in enumerate(json.loads((run / "accidents.json").read_text())):
        mark = run / f"accident-{number}"
        if accident["rank"] != rank or mark.exists():
            continue
        if step < accident["step"]:
            return None
        mark.touch()
        how: str | int = accident["how"]
        return how
    return None


def happen(how: str | int) -> None:
    import torch

    if isinstance(how, int):
        os.kill(os.getpid(), how)
        time.sleep(600)
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


def main() -> int:
    run, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    original = heartbeat.Heartbeat.beat

    def beat(self: heartbeat.Heartbeat, phase: str, step: int | None = None) -> None:
        original(self, phase, step)
        how = due(run, rank, self.step) if phase == "training" else None
        if how is not None:
            happen(how)

    heartbeat.Heartbeat.beat = beat  # type: ignore[method-assign]
    from fsdp_tune.worker.__main__ import main as worker

    return worker(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
