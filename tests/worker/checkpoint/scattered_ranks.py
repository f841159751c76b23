"""Rank functions for checkpoints of machines with a run directory each: ranks are divided among directories
in their order."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from fsdp_tune.core.errors import FailedError
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.checkpoint import exchange, restore
from fsdp_tune.worker.checkpoint.exchange import (
    ByteRange,
    ScatteredFiles,
    scattered_checkpoint,
    weights_to_first_machine,
)
from fsdp_tune.worker.checkpoint.save import Checkpointer, Saved, trainer_state_facts
from fsdp_tune.worker.checkpoint.state import Live
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from tests.faults.ranks import is_at, make_live, set_step


def take_place(folder: Path, ranks_of: Sequence[int]) -> RunDir:
    """Make this rank one of a machine: `ranks_of` has the number of ranks of each. Returns its run
    directory."""
    rank, machine = dist.get_rank(), 0
    while rank >= ranks_of[machine]:
        rank, machine = rank - ranks_of[machine], machine + 1
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks_of[machine]))
    run = RunDir(folder / f"machine-{machine}")
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def fetch(
    folder: Path,
    contents: dict[str, bytes],
    ranks_of: Sequence[int],
    held: Sequence[Sequence[str]],
    seed: int,
) -> int:
    """Get random ranges on every rank, and return the number of bytes that differ from the file's."""
    run = take_place(folder, ranks_of)
    machine = int(run.name.rpartition("-")[2])
    checkpoint = run.checkpoint(1)
    checkpoint.mkdir(exist_ok=True)
    for name in held[machine]:
        (checkpoint / name).write_bytes(contents[name])
    files = ScatteredFiles(
        checkpoint, [frozenset(held[at]) for at, count in enumerate(ranks_of) for _ in range(count)]
    )
    draw = random.Random(seed * 1000 + dist.get_rank())
    ranges: list[ByteRange] = []
    for name, raw in contents.items():
        for _ in range(draw.randrange(4)):
            start = draw.randrange(len(raw) + 1)
            ranges.append(ByteRange(name, start, draw.randrange(len(raw) - start + 1)))
    target = run.path / f"target-{dist.get_rank()}"
    with patch.object(exchange, "ROUND_BYTES", 37 * dist.get_world_size()):
        files.fetch([each for each in ranges if each.file not in files.here], target)
    wrong = 0
    for name, start, length in ranges:
        if name not in files.here and length:
            got = (target / name).read_bytes()[start : start + length]
            wrong += sum(
                one != other for one, other in zip(got, contents[name][start : start + length], strict=True)
            )
    return wrong


def save(
    folder: Path, ranks_of: Sequence[int], steps: Sequence[int], full: bool = False, keep: int | None = None
) -> list[str]:
    """Save checkpoints, and return the errors."""
    run = take_place(folder, ranks_of)
    live, saved = make_live(full=full), list[Saved]()
    facts = trainer_state_facts(dist.get_world_size(), [dist.get_world_size()], run.name)
    checkpointer = Checkpointer(
        run, live, "cpu", False, keep, facts, saved.append, HeartbeatWriter(run, 0), is_scattered=True
    )
    checkpointer.probe("{}", {"sums": [0.0], "loss_scale": None})
    for step in steps:
        set_step(live, step)
        torch.manual_seed(step + dist.get_rank())
        checkpointer.save(
            step,
            f'{{"global_step": {step}}}',
            {"sums": [1.0 + dist.get_rank()], "loss_scale": None},
            best_step=None,
        )
        checkpointer.wait()
    return [str(each.error) for each in saved if each.error is not None]


def load(folder: Path, ranks_of: Sequence[int], step: int, full: bool = False) -> tuple[bool, float, float]:
    """Return whether model and optimizer are those of `step`, this rank's sums, and its next random
    number."""
    run = take_place(folder, ranks_of)
    checkpoint, files = scattered_checkpoint(run.checkpoint(step), digests=True)
    live = make_live(full=full)
    live = Live(live.wrapped, live.optimizer, full=full, scattered=files)
    restore.restore_model(live, str(checkpoint.path))
    restore.restore_optimizer(live, str(checkpoint.path))
    restore.restore_rng(str(checkpoint.path), 0, step, "cpu")
    drawn = torch.rand(1).item()
    return is_at(live, step), restore.restore_own(str(checkpoint.path))["sums"][0], drawn


def refused(folder: Path, ranks_of: Sequence[int], step: int) -> str:
    run = take_place(folder, ranks_of)
    try:
        scattered_checkpoint(run.checkpoint(step), digests=True)
    except FailedError as error:
        return f"{error.problems[0].code}: {error.problems[0].message}"
    return ""


def one_directory(folder: Path, ranks_of: Sequence[int], is_one: bool) -> str:
    """Return the error of machines that see one directory, or each another."""
    run = take_place(folder, ranks_of)
    try:
        exchange.refuse_one_directory(folder if is_one else run.path)
    except FailedError as error:
        return f"{error.problems[0].code}: {error.problems[0].hint}"
    return ""


def bring_weights(folder: Path, ranks_of: Sequence[int], step: int) -> None:
    weights_to_first_machine(take_place(folder, ranks_of).checkpoint(step))
    gather(None)
