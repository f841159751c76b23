"""How the weights reach the ranks: each reads its own slices, or rank 0 reads all and sends them. Seconds and host memory.

    python benchmarks/load.py [--parameters 500m] [--ranks 2] [--rounds 3] [--cold]

Writes a random Llama once, then loads it on CPU ranks (gloo), the two ways in turn, every round in fresh processes; the files
are in the page cache, or with `--cold` dropped from it before every round. `rank 0` is what `cpu_ram_efficient_loading` means: one
rank reads the whole model with `from_pretrained` and sends each other its part. Host memory is the rise of a rank's peak
resident set; where a library maps the files, their pages count in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HIDDEN = {"100m": 768, "500m": 1536, "1b": 2048}
WAYS = ("slices", "rank 0")


def write_model(directory: Path, size: str, dtype: str = "float32") -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = HIDDEN[size]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=12, num_attention_heads=hidden // 64, vocab_size=32000
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="500MB")


def load_on_this_rank(directory: str, way: str) -> None:
    import torch
    import torch.distributed as dist

    import fsdp_tune.model.loading.assemble as loading
    from fsdp_tune.model.loading.construct import model_config
    from fsdp_tune.recipe.schema import Recipe

    dist.init_process_group("gloo")
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": directory},
            "precision": {"mixed_precision": "no"},
            "parallelism": {"dp_shard_size": dist.get_world_size(), "dp_replicate_size": 1},
            "launch": {"device": "cpu", "num_processes": dist.get_world_size()},
        }
    )
    if way == "rank 0":
        loading.fits = lambda *_: False
    dist.barrier()
    started = time.perf_counter()
    loaded = loading.load(recipe, model_config(recipe), torch.device("cpu"), vocabulary=None)
    dist.barrier()
    assert loaded.way == way
    mine = {
        "seconds": time.perf_counter() - started,
        "peak_growth_bytes": loaded.peak_growth_bytes,
        "model_bytes": loaded.size.parameter_bytes,
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        print(json.dumps(every))
    dist.destroy_process_group()


def set_cache(directory: Path, *, cold: bool) -> None:
    """Drops the model's files from the page cache, or brings them into it. Only what is on the disk can be dropped."""
    os.sync()
    for path in directory.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        if cold:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(descriptor, 1 << 24):
                pass
        os.close(descriptor)


def measure(directory: Path, way: str, ranks: int, *, cold: bool) -> list[dict[str, float]]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        __file__,
        "--directory",
        str(directory),
        "--way",
        way,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    set_cache(directory, cold=cold)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{way}: exit code {done.returncode}\n{done.stderr}")
    measured: list[dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=sorted(HIDDEN), default="500m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="read the files from the disk")
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.directory:
        load_on_this_rank(arguments.directory, arguments.way)
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "model")
        write_model(directory, arguments.parameters)
        rounds = [{way: measure(directory, way, arguments.ranks, cold=arguments.cold) for way in WAYS} for _ in range(arguments.rounds)]
    gib = 1 << 30
    print(
        f"{rounds[0]['slices'][0]['model_bytes'] / gib:.2f} GiB of parameters, {arguments.ranks} ranks, {arguments.rounds} rounds, "
        f"{'cold' if arguments.cold else 'warm'}, medians"
    )
    for way in WAYS:
        seconds = statistics.median(each[way][0]["seconds"] for each in rounds)
        growth = [statistics.median(each[way][rank]["peak_growth_bytes"] for each in rounds) / gib for rank in range(arguments.ranks)]
        print(f"  {way:8}  {seconds:6.2f} s   peak host memory by rank (GiB): {', '.join(f'{value:.2f}' for value in growth)}")
    ratio = statistics.median(each["slices"][0]["seconds"] / each["rank 0"][0]["seconds"] for each in rounds)
    print(f"  slices / rank 0 = {ratio:.2f} of the time")


if __name__ == "__main__":
    main()
