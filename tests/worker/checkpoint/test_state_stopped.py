"""A signal while the ranks load a checkpoint is a stop, and no failure of the load."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import SHORT, Case

BASE = Case(steps=SHORT)


def stop_in_load(path: str, folder: str, rank: int) -> dict[str, Any]:
    """The worker; one rank gets SIGTERM while it reads its part of a folder of the checkpoint."""
    import torch.distributed as dist

    from fsdp_tune.worker.checkpoint.storage import RestrictedReader

    original = RestrictedReader.read_data

    def read_data(self: Any, *arguments: Any) -> Any:
        if dist.get_rank() == rank and Path(self.path).name == folder:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    with patch.object(RestrictedReader, "read_data", read_data):
        return runs.run_worker(path)


@pytest.mark.ranks
@pytest.mark.parametrize(("folder", "rank"), [("pytorch_model_fsdp_0", 0), ("optimizer_0", 1)])
def test_signal_during_a_load_stops_all_ranks(bench: Bench, folder: str, rank: int) -> None:
    run = bench.written_run(BASE.recipe(str(bench.model("llama"))))
    runs.resume_from(run, bench.run(BASE), BASE.saved_step)
    outcomes = bench.on_ranks.run(2, functools.partial(stop_in_load, str(run.path), folder, rank))
    assert [(outcome["exit_code"], outcome["exit_reason"]) for outcome in outcomes] == [
        (143, "preempted")
    ] * 2
