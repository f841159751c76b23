"""What a run of 8 to 4,096 ranks costs outside of the GPUs: connections, files, store operations, time and
memory of the first rank.

    python benchmarks/scale.py [--ranks 8 64 512 4096] [--only PART ...] [--write]

No process group of that size is started: ranks are threads, files and plans that are made in their number,
and the code that works on them is the product's (or torch's, where the product calls it). Eight ranks a
machine. Each part and size runs in a process of its own; `--write` keeps the table in
docs/evidence/data/scale.tsv.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PER_MACHINE = 8
WEIGHTS = 291
"""Weights of a Llama 7B."""
ROWS = 1_000_000
MOST_THREADS = 128
"""Of gloo in one process: the connections of more need more descriptors than a process may have."""
TABLE = Path(__file__).resolve().parent.parent / "docs/evidence/data/scale.tsv"
Figures = dict[str, float]


class Opens:
    """Counts files that this process opens, and directories that it lists."""

    def __init__(self) -> None:
        self.number = 0
        sys.addaudithook(self._count)

    def _count(self, event: str, _arguments: tuple[object, ...]) -> None:
        self.number += event in ("open", "os.scandir", "os.listdir")

    def during(self, function: Callable[[], object]) -> tuple[float, int]:
        """Seconds and opens of a call."""
        before, began = self.number, time.perf_counter()
        function()
        return time.perf_counter() - began, self.number - before


def connections(ranks: int, folder: Path) -> Figures:  # noqa: ARG001  all parts have one signature
    """Open descriptors of a rank after a gather, a sum and a broadcast in one gloo group: all connected, and
    connected on use."""
    if ranks > MOST_THREADS:
        return {}
    return {
        f"{how}: descriptors a rank": _descriptors(ranks, value)
        for value, how in (("0", "full mesh"), ("1", "on use"))
    }


def _descriptors(ranks: int, lazy: str) -> float:
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    gloo: Any = c10d.ProcessGroupGloo
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    made, ended = threading.Barrier(ranks + 1), threading.Barrier(ranks + 1)

    def run(rank: int) -> None:
        group = gloo(c10d.PrefixStore(lazy, store), rank, ranks, timedelta(minutes=5))
        value, every = torch.full((4,), float(rank)), [torch.empty(4) for _ in range(ranks)]
        group.allgather([every], [value]).wait()
        group.allreduce([value]).wait()
        options: Any = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group.broadcast([value], options).wait()
        assert value[0] == sum(range(ranks))
        made.wait()
        ended.wait()

    before = _open_files()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    made.wait()
    found = (_open_files() - before) / ranks
    ended.wait()
    for thread in threads:
        thread.join()
    return found


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class CountingStore:
    def __init__(self, store: Any, counter: Counter[str]) -> None:
        self._store, self._counter = store, counter

    def set(self, key: str, value: str) -> None:
        self._counter["store"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._counter["store"] += 1
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._counter["store"] += 1
        return self._store.multi_get(keys)


def control_channel(ranks: int, folder: Path) -> Figures:  # noqa: ARG001  all parts have one signature
    """One exchange of all machines over torch's store, as every machine does each second."""
    from fsdp_tune.launch.machines.store import StoreExchange, keys_of
    from fsdp_tune.launch.machines.tcp_store import connect_to, listening_socket, serve

    machines = ranks // PER_MACHINE
    if machines < 2:
        return {}
    listener, _ = listening_socket("127.0.0.1", 0)
    port, counter = listener.getsockname()[1], Counter[str]()
    served = serve(listener, keys_of(machines))
    exchanges = [StoreExchange(0, machines, lambda: CountingStore(served, counter))]
    began = time.perf_counter()
    for machine in range(1, machines):
        store = connect_to("127.0.0.1", port)
        exchanges.append(StoreExchange(machine, machines, lambda store=store: CountingStore(store, counter)))
    connected_seconds = time.perf_counter() - began
    document = {"token": "0123456789abcdef", "state": "running", "identity": "x" * 2000}
    first_seconds = seconds = 0.0
    # the first exchange writes, the second reads what all have written, the third has nothing new
    for version in range(3):
        counter.clear()
        first_seconds, began = 0.0, time.perf_counter()
        for exchange in exchanges:
            started = time.perf_counter()
            found = exchange.tick(document, min(version, 1))
            assert found.fault is None, found.fault
            first_seconds = first_seconds or time.perf_counter() - started
        seconds = time.perf_counter() - began
    return {
        "connecting a machine, ms": 1e3 * connected_seconds / (machines - 1),
        "store operations a second": counter["store"],
        "an exchange of machine 0, ms": 1e3 * first_seconds,
        "of another machine, ms": 1e3 * (seconds - first_seconds) / (machines - 1),
    }


def rank_files(ranks: int, folder: Path) -> Figures:
    """Heartbeats and outcomes: what ranks write, what `status` reads, and what a machine reads while its
    ranks are silent."""
    from fsdp_tune.core.errors import ExitCode, ExitReason
    from fsdp_tune.launch import run_status
    from fsdp_tune.launch.supervise.rank_watch import ALL_ROUND_SECONDS, RankWatch
    from fsdp_tune.run.directory import RunDir
    from fsdp_tune.run.rank_files import Heartbeat, Outcome, clear
    from fsdp_tune.worker.observe.heartbeat import interval_seconds

    run, opens = RunDir(folder / "run"), Opens()
    run.logs.mkdir(parents=True)
    for rank in range(ranks):
        Heartbeat(rank, 1, 5, "training", 1.0, 2.0, 900.0).write(run.rank_heartbeat(rank))
        if rank % 2:
            Outcome(ExitCode.OK, ExitReason.FINISHED, rank=rank).write(run.rank_outcome(rank))
    status_seconds, status_opens = opens.during(
        lambda: [run_status._rank_status(run, rank, is_elsewhere=True) for rank in range(ranks)]
    )
    watch = RankWatch(run, range(PER_MACHINE))
    _, round_opens = opens.during(watch.read_all)
    clear_seconds, _ = opens.during(lambda: clear(run, range(PER_MACHINE), with_verdict=False))
    return {
        "heartbeats a second": sum(1 / interval_seconds(rank, ranks) for rank in range(ranks)),
        "status, s": status_seconds,
        "status, opens": status_opens,
        "silent: opens a second on each machine": round_opens / ALL_ROUND_SECONDS,
        "clearing before a launch, ms a machine": 1e3 * clear_seconds,
    }


def manifest(ranks: int, folder: Path) -> Figures:
    """The manifest of a checkpoint with three files a rank: its size, and what a resume reads before the
    tensors."""
    from fsdp_tune.run.directory import CHECKPOINT_KIND, Checkpoint, inspect_checkpoint
    from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, damage, digest_data

    path, opens = folder / "checkpoint-1", Opens()
    names = [
        f"{part}/__{rank}_0.distcp"
        for part in ("pytorch_model_fsdp_0", "optimizer_0")
        for rank in range(ranks)
    ]
    names += [f"rng_state_{rank}.pth" for rank in range(ranks)]
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    began = time.perf_counter()
    made = Manifest(CHECKPOINT_KIND, dict.fromkeys(names, digest_data(b"")), {"step": 1})
    (path / MANIFEST_NAME).write_text(made.to_json())
    written_seconds = time.perf_counter() - began
    inspected_seconds, inspected_opens = opens.during(
        lambda: isinstance(inspect_checkpoint(path, digests=False), Checkpoint)
    )
    part = Manifest(CHECKPOINT_KIND, dict(list(made.files.items())[::ranks]), made.facts)
    share_seconds, share_opens = opens.during(lambda: damage(path, part, digests=True))
    return {
        "MB": (path / MANIFEST_NAME).stat().st_size / 1e6,
        "written, s": written_seconds,
        "first rank: inspected, s": inspected_seconds,
        "first rank: opens": inspected_opens,
        "another rank: digests, opens": share_opens,
        "another rank: its share, ms": 1e3 * share_seconds,
        "looked up by a rank for its machine": len(names) / PER_MACHINE,
    }


def checkpoint_plan(ranks: int, folder: Path) -> Figures:  # noqa: ARG001  all parts have one signature
    """torch's global plan of a save on the first rank, FULL_SHARD: every weight has a piece on every rank."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def local(rank: int) -> SavePlan:
        offsets, sizes, properties = torch.Size([rank]), torch.Size([1]), TensorProperties(torch.float32)
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size([ranks]))
        indices = (MetadataIndex(f"w.{number}", offsets) for number in range(WEIGHTS))
        return SavePlan(
            [WriteItem(index, WriteItemType.SHARD, tensor_data=data) for index in indices], planner_data={}
        )

    plans = [local(rank) for rank in range(ranks)]
    began = time.perf_counter()
    _, metadata = DefaultSavePlanner().create_global_plan(plans)
    assert len(metadata.state_dict_metadata) == WEIGHTS
    return {"weights, global plan, s": time.perf_counter() - began}


def batch_order(ranks: int, folder: Path) -> Figures:  # noqa: ARG001  all parts have one signature
    """The order of a million rows on the last rank: to the first batch of an epoch, and the steps after."""
    import numpy as np

    from fsdp_tune.data.row_order import Attempt, RowOrder
    from fsdp_tune.worker.rows.batches import MicroBatches

    def shuffled(epoch: int, lengths: np.ndarray, _: int) -> np.ndarray:
        return np.random.default_rng(epoch).permutation(len(lengths))

    order = RowOrder(shuffled, np.full(ROWS, 9), [Attempt(0, ranks * 4)])
    rows = MicroBatches(order, data_rank=ranks - 1, data_size=ranks, micro_batch=1, accumulation=4)
    began = time.perf_counter()
    batches = iter(rows)
    next(batches)
    first_seconds, began = time.perf_counter() - began, time.perf_counter()
    micro_steps = sum(1 for _ in zip(range(200), batches, strict=False))
    return {
        "first batch, s": first_seconds,
        "a micro-step, µs": 1e6 * (time.perf_counter() - began) / micro_steps,
    }


def mirror_listing(ranks: int, folder: Path) -> Figures:
    """One listing of a mirror with two checkpoints, as a start does."""
    from fsdp_tune.cluster.mirror.remote_run import RemoteRun

    for step in (1, 2):
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            (folder / f"run/checkpoint-{step}/{part}").mkdir(parents=True)
            for rank in range(ranks):
                (folder / f"run/checkpoint-{step}/{part}/__{rank}_0.distcp").touch()
    remote = RemoteRun(f"file://{folder}", "run")
    began = time.perf_counter()
    assert len(remote.directory.list()) == 4 * ranks
    return {"listing, s": time.perf_counter() - began}


def plan(ranks: int, folder: Path) -> Figures:
    """`plan` of a 7B recipe, with its trace kept from the first call."""
    import subprocess

    words = [
        "plan",
        "llama7b_full_shard",
        "--gpu",
        "H100-SXM",
        "--num-gpus",
        str(ranks),
        "--json",
        "--set",
        f"data.cache_dir={folder}",
    ]
    words += ["--set", f"training.global_batch_size={4 * ranks}"]
    seconds: list[float] = []
    for _ in range(2):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "fsdp_tune", *words], capture_output=True, text=True, check=False
        )
        seconds.append(time.perf_counter() - began)
        assert "fits" in json.loads(done.stdout), done.stdout[-2000:]
    return {"first, s": seconds[0], "again, s": seconds[1]}


PARTS: dict[str, Callable[[int, Path], Figures]] = {
    "gloo connections": connections,
    "control channel": control_channel,
    "files of ranks": rank_files,
    "manifest": manifest,
    "plan of a save": checkpoint_plan,
    "batch order": batch_order,
    "mirror": mirror_listing,
    "plan": plan,
}


def _measure(part: str, ranks: int, answer: Any) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found = PARTS[part](ranks, Path(folder))
    if found:
        found["peak memory, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer.send(found)


def measure(part: str, ranks: int) -> Figures:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=_measure, args=(part, ranks, writer))
    child.start()
    writer.close()
    try:
        return reader.recv()
    except EOFError:
        sys.exit(f"{part} of {ranks} ranks failed")
    finally:
        child.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = ["\t".join(["part", "figure", *map(str, options.ranks)])]
    for part in options.only:
        by_ranks = {ranks: measure(part, ranks) for ranks in options.ranks}
        names = list(dict.fromkeys(name for found in by_ranks.values() for name in found))
        for name in names:
            line = "\t".join([part, name, *(_number(found.get(name)) for found in by_ranks.values())])
            print(line, flush=True)
            lines.append(line)
    if options.write:
        TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
