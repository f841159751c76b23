"""Ranks are compared before they load anything, and a stop signal to loader processes stops only the
ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest

from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker import rank_identity as same
from tests.parity.bench import Bench
from tests.ranks import Ranks


def check_with(path: str, odd_rank: int | None, what: str, value: str) -> str | None:
    """Return the error of `check_same` on a rank if one rank differs."""
    import torch.distributed as dist

    from fsdp_tune.core.errors import FailedError

    run = RunDir(Path(path))
    mine = same.identity(run) | ({what: value} if dist.get_rank() == odd_rank else {})
    with patch.object(same, "identity", lambda run: mine):
        try:
            same.check_same(run)
        except FailedError as error:
            return error.problems[0].message
    return None


@pytest.mark.ranks
def test_differing_ranks_are_named_with_versions(on_ranks: Ranks, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.recipe_json.write_text("{}")
    run.data_json.write_text("{}")
    assert on_ranks.run(3, check_with, str(tmp_path), None, "", "") == [None] * 3
    (message,) = set(on_ranks.run(3, check_with, str(tmp_path), 2, "torch", "2.0.0"))
    assert message.startswith("rank 2 has torch 2.0.0, rank 0 has ")
    (message,) = set(on_ranks.run(2, check_with, str(tmp_path), 1, "recipe.json", "another"))
    assert message.startswith("rank 1 has recipe.json another, rank 0 has ")


def read_on_after(path: str, number: int) -> list[int]:
    """Reads batches by a loader's process, which gets a signal in the middle."""
    from fsdp_tune.data.row_order import Attempt, RowOrder
    from fsdp_tune.data.store import RowStore
    from fsdp_tune.worker.rows.batches import Collator, MicroBatches, loader

    store = RowStore(path)
    import numpy as np

    order = RowOrder(
        lambda epoch, lengths, _: np.arange(len(lengths), dtype=np.int64), store.lengths, [Attempt(0, 4)]
    )
    sampler = MicroBatches(order, data_rank=0, data_size=1, micro_batch=4, accumulation=1)
    batches = iter(loader(store, sampler, Collator(0, 1), workers=1, pin_memory=False, prefetch=2))
    rows = list(next(batches).row_ids)
    (process,) = batches._workers  # type: ignore[attr-defined]
    os.kill(process.pid, number)
    for batch in batches:
        rows.extend(batch.row_ids)
    return rows


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
def test_stop_signal_does_not_end_the_loaders_processes(bench: Bench, number: int) -> None:
    """torchrun's agent signals a rank's whole process group."""
    (rows,) = bench.on_ranks.run(1, read_on_after, str(bench.store / "train"), int(number))
    assert rows == list(range(len(rows)))
    assert len(rows) > 8
