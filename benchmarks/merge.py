"""Times `cp -r` + fsync, `fsdp-tune merge-checkpoint` and `accelerate merge-weights` on one checkpoint, warm
and cold.

    python benchmarks/merge.py --params 1b

Writes a Llama-shaped fp32 checkpoint of two FSDP ranks with torch.distributed.checkpoint, then runs each in a
process of its own. Ours and cp end with everything synced to the disk; accelerate does not sync. Cold means
that the checkpoint's pages were dropped from this machine's page cache (posix_fadvise on every file, and seen
to be gone), not those of the programs; what the host of a virtual machine caches is out of reach. Needs about
3 times the checkpoint's size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SIZES = {  # name: (hidden, intermediate, layers, vocabulary)
    "10m": (256, 704, 6, 8_000),
    "100m": (768, 2_048, 10, 32_000),
    "1b": (2_048, 5_632, 18, 32_000),
    "3b": (3_072, 8_192, 24, 64_000),
}
RANKS = 2
SHARDS = "pytorch_model_fsdp_0"
WRITE_RANK = "write-rank"
CP = "cp -r + fsync"


@dataclass
class Timing:
    seconds: float
    peak_rss_mib: float


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    hidden, intermediate, layers, vocabulary = SIZES[size]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"model.layers.{layer}.self_attn.{name}.weight"] = (hidden, hidden)
        for name, shape in (
            ("gate_proj", (intermediate, hidden)),
            ("up_proj", (intermediate, hidden)),
            ("down_proj", (hidden, intermediate)),
        ):
            found[f"model.layers.{layer}.mlp.{name}.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = (hidden,)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def write_rank(rank: int, folder: str, size: str, rendezvous: str) -> None:
    """One rank of the writer: its own half of every tensor, in a DTensor, saved by
    torch.distributed.checkpoint."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(rank)
    state = {
        name: DTensor.from_local(
            torch.empty(shape[0] // RANKS, *shape[1:]).normal_(generator=generator), mesh, [Shard(0)]
        )
        for name, shape in shapes(size).items()
    }
    dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(folder))
    dist.destroy_process_group()


def write_checkpoint(folder: Path, size: str) -> None:
    """In processes of their own: what this one had resident would count as the peak of the programs that it
    starts."""
    with tempfile.TemporaryDirectory() as place:
        arguments = [str(folder / SHARDS), size, f"{place}/rendezvous"]
        ranks = [
            subprocess.Popen([sys.executable, __file__, WRITE_RANK, str(rank), *arguments])
            for rank in range(RANKS)
        ]
        if any(process.wait() for process in ranks):
            raise SystemExit("the checkpoint could not be written")


def run_child(argv: list[str]) -> float:
    """Peak resident MiB of the child; its failure ends the benchmark with its output."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())},
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(argv)}\n{output.read().decode(errors='replace')}")
    return usage.ru_maxrss / 1024


def sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def set_cache(folder: Path, *, warm: bool) -> None:
    """Brings the checkpoint's files into the page cache, or drops them from it."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            if warm:
                while os.read(descriptor, 1 << 24):
                    pass
            else:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def cached_share(folder: Path) -> float:
    """The part of 64 places in every large file that can be read without waiting for the disk; 0 where the
    system cannot tell."""
    seen: list[bool] = []
    for path in folder.rglob("*"):
        if not path.is_file() or (size := path.stat().st_size) < 1 << 20:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        for number in range(64):
            try:
                seen.append(os.preadv(descriptor, [bytearray(1)], size * number // 64, os.RWF_NOWAIT) == 1)
            except BlockingIOError:
                seen.append(False)
            except OSError:  # a file system without RWF_NOWAIT
                os.close(descriptor)
                return 0.0
        os.close(descriptor)
    return sum(seen) / max(len(seen), 1)


def copy(source: Path, target: Path) -> float:
    peak = run_child(["cp", "-r", str(source), str(target)])
    sync_tree(target)
    return peak


def ours(source: Path, target: Path, dtype: str) -> float:
    return run_child(
        [
            sys.executable,
            "-m",
            "fsdp_tune",
            "merge-checkpoint",
            str(source),
            "--output",
            str(target),
            "--dtype",
            dtype,
        ]
    )


def accelerate(source: Path, target: Path) -> float:
    return run_child(
        [
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            "merge-weights",
            str(source / SHARDS),
            str(target),
        ]
    )


def measure(action: Callable[[Path], float], source: Path, target: Path, *, warm: bool) -> Timing:
    os.sync()  # what others left dirty is not for this run to pay; and only what is clean can be dropped
    set_cache(source, warm=warm)
    if not warm and (share := cached_share(source)) > 0.05:
        raise SystemExit(f"{share:.0%} of the checkpoint are still in the page cache: this is no cold start")
    start = time.perf_counter()
    peak = action(target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return Timing(seconds, peak)


def measure_rounds(
    programs: dict[str, Callable[[Path], float]], source: Path, target: Path, *, warm: bool, rounds: int
) -> dict[str, list[Timing]]:
    """Every program once a round, so that a change of the machine's load meets them all."""
    timings: dict[str, list[Timing]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, action in programs.items():
            timings[name].append(measure(action, source, target, warm=warm))
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", choices=list(SIZES), default="1b", help="size of the model")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where to write (default: the temporary directory)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=None,
        help="an existing checkpoint directory, instead of writing one",
    )
    parser.add_argument("--without-accelerate", action="store_true")
    parser.add_argument(
        "--warm-only", action="store_true", help="for a file system in memory, such as /dev/shm"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="merge-benchmark-") as place:
        source, target = arguments.checkpoint or Path(place, "checkpoint"), Path(place, "target")
        if arguments.checkpoint is None:
            write_checkpoint(source, arguments.params)
        size_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        programs: dict[str, Callable[[Path], float]] = {
            CP: lambda out: copy(source, out),
            "ours": lambda out: ours(source, out, "keep"),
            "ours, to bf16": lambda out: ours(source, out, "bf16"),
        }
        if not arguments.without_accelerate:
            programs["accelerate"] = lambda out: accelerate(source, out)
        timings = {
            warmth: measure_rounds(programs, source, target, warm=warmth == "warm", rounds=arguments.rounds)
            for warmth in (("warm",) if arguments.warm_only else ("warm", "cold"))
        }
    report(size_bytes, timings, as_json=arguments.json)


def ratio(one: list[Timing], other: list[Timing]) -> float:
    """The median over the rounds."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(one, other, strict=True))


def report(size_bytes: int, timings: dict[str, dict[str, list[Timing]]], *, as_json: bool) -> None:
    if as_json:
        rounds = {
            warmth: {name: [vars(timing) for timing in each] for name, each in row.items()}
            for warmth, row in timings.items()
        }
        print(json.dumps({"bytes": size_bytes, **rounds}, indent=1))
        return
    print(
        f"{size_bytes / 1e9:.2f} GB of fp32 weights from {RANKS} ranks, {os.cpu_count()} cores, "
        "medians of the rounds"
    )
    for warmth, row in timings.items():
        for name, each in row.items():
            seconds, peak = (
                statistics.median(timing.seconds for timing in each),
                max(timing.peak_rss_mib for timing in each),
            )
            print(f"{warmth}  {name:<14} {seconds:7.2f} s  {peak:8.0f} MiB  {ratio(each, row[CP]):5.2f} x cp")
        if "accelerate" in row:
            print(
                f"{warmth}  ours is {ratio(row['accelerate'], row['ours']):.1f} times as fast as accelerate"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == [WRITE_RANK]:
        write_rank(int(sys.argv[2]), *sys.argv[3:])
    else:
        main()
