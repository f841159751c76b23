"""How long training stands still for a save: in the background, and synchronously, of the same state on CPU
ranks.

    python benchmarks/checkpoint.py [--ranks 2] [--parameters 100] [--rounds 7]

One process tree of gloo ranks holds a sharded model and its AdamW state, and saves it in turns: background,
synchronous, background … Between two saves it computes for as long as a background save takes, as a run does
that saves every few hundred steps. The stall is what `Checkpointer.save` keeps the training thread from; the
bound is 20 % of a synchronous save.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

BOUND = 0.20
WIDTH = 1024


def rank_main(rank: int, world_size: int, folder: str, layers: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from fsdp_tune.core.parent_death import die_with_parent

    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
    )
    stalls, size_bytes = measure(Path(folder) / "run", layers, rounds)
    every: list[dict[bool, list[float]] | None] = [None] * world_size
    dist.all_gather_object(every, stalls)
    if rank == 0:
        report([one for one in every if one is not None], size_bytes, world_size)
    dist.destroy_process_group()


def measure(folder: Path, layers: int, rounds: int) -> tuple[dict[bool, list[float]], int]:
    """Seconds that each save kept this rank's training, by whether it went on in the background; size of a
    checkpoint."""
    import torch
    import torch.distributed as dist

    from fsdp_tune.run.directory import RunDir
    from fsdp_tune.worker.checkpoint.save import Checkpointer, Saved, trainer_state_facts
    from fsdp_tune.worker.checkpoint.state import Live
    from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter

    model, optimizer = sharded_model(layers)
    batch = torch.randn(8, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def is_saving() -> bool:
        """On any rank: all of them step together."""
        thread = checkpointer._thread
        flag = torch.tensor(int(thread is not None and thread.is_alive()))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    step()
    saved: list[Saved] = []
    facts = trainer_state_facts(dist.get_world_size(), [dist.get_world_size()], "0" * 64)
    folder.mkdir(exist_ok=True)
    run = RunDir(folder)
    run.logs.mkdir(parents=True, exist_ok=True)
    heartbeat = HeartbeatWriter(run, dist.get_rank())
    checkpointer = Checkpointer(
        run, Live(model, optimizer, full=False), "cpu", False, 1, facts, saved.append, heartbeat
    )
    stalls: dict[bool, list[float]] = {True: [], False: []}
    for number in range(1, 2 * rounds + 3):  # the first of each kind finds cold caches and is left out
        checkpointer.asynchronous = number % 2 == 1
        dist.barrier()
        checkpointer.save(number, "{}", {"sums": [0.0, 0.0, 0.0], "loss_scale": None}, best_step=None)
        while is_saving():  # the next save must not wait for this one
            step()
        checkpointer.wait()
        error = saved[-1].error
        if error is not None:
            raise error
        if number > 2:
            stalls[checkpointer.asynchronous].append(saved[-1].stall_seconds)
    return stalls, saved[-1].size_bytes


def sharded_model(layers: int) -> tuple[Any, Any]:
    """Linear layers of `WIDTH`, each a unit, and their AdamW."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def report(stalls: list[dict[bool, list[float]]], size_bytes: int, world_size: int) -> None:
    """A save stalls as long as its slowest rank; medians over the rounds."""
    background = [max(times) for times in zip(*(one[True] for one in stalls), strict=True)]
    synchronous = [max(times) for times in zip(*(one[False] for one in stalls), strict=True)]
    for name, times in (("background", background), ("synchronous", synchronous)):
        spread = f"{min(times):.3f} to {max(times):.3f}"
        print(f"{name:12} stall {statistics.median(times):.3f} s (median of {len(times)}, {spread})")
    ratio = statistics.median(background) / statistics.median(synchronous)
    pairs = sorted(one / other for one, other in zip(background, synchronous, strict=True))
    print(f"checkpoint of {size_bytes / 2**20:,.0f} MiB, {world_size} ranks over gloo")
    verdict = "held" if ratio <= BOUND else "NOT held"
    print(
        f"background / synchronous = {ratio:.1%} (pair by pair {pairs[0]:.1%} to {pairs[-1]:.1%}); "
        f"bound {BOUND:.0%}: {verdict}"
    )


def main() -> int:
    import torch.multiprocessing as mp

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--parameters",
        type=int,
        default=100,
        help="millions; a checkpoint holds three times as many fp32 numbers",
    )
    parser.add_argument("--rounds", type=int, default=7, help="saves of each kind that count")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: the temporary directory"
    )
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="benchmark-checkpoint-", dir=options.folder)
    layers = max(1, round(options.parameters * 1e6 / WIDTH**2))
    started = time.monotonic()
    try:
        mp.spawn(rank_main, (options.ranks, folder, layers, options.rounds), nprocs=options.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
