"""What becomes of GSM8K: how full rows and batches are, how fast it is tokenised, how long a cached start
takes, how long a step waits.

    python benchmarks/data.py --gsm8k train.jsonl [--repeat 8] [--part fill,budget,budget-wall,tokenise,wait]

The tokenizer is a byte-level BPE of 8,192 tokens, trained on the file. Rows are question, newline, answer,
end; all of it is trained. `fill` counts slots that hold a real token, over an epoch in the order of a run;
for batches of unequal rows it is the share after padding to the longest row of a micro-batch. `budget` cuts
the same steps by rows and by token slots, with as much memory; `budget-wall` trains both on two CPU ranks and
compares the time of their steps, and their losses. `tokenise` reads the file `--repeat` times over, so that
processes are worth their start. `wait` trains on two CPU ranks, and reads waiting and step from the run's own
lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from step_inputs import SIZES, learn_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from fsdp_tune.data.preparation import Prepared
    from fsdp_tune.recipe.schema.recipe import Recipe

MICRO_BATCH, RANKS = 8, 2
PARTS = ("fill", "budget", "budget-wall", "tokenise", "wait")
GLOBAL_BATCH, BUDGET_LENGTH = 64, 512
BUDGET = MICRO_BATCH * BUDGET_LENGTH


def recipe_of(folder: Path, rows: Path, **data: Any) -> dict[str, Any]:
    return {
        "model": {"from_config": SIZES["gsm8k"].model, "tokenizer": str(folder / "tokenizer")},
        "data": {
            "train": [{"path": str(rows), "rename_columns": {"question": "prompt", "answer": "completion"}}],
            "loss_on": "all",
            "separator": "\n",
            "max_length": 2048,
            "cache_dir": str(folder / "cache"),
            **data,
        },
        "precision": {"mixed_precision": "no"},
        "training": {"per_device_train_batch_size": MICRO_BATCH, "report_to": []},
        "launch": {"device": "cpu", "num_processes": RANKS, "num_cpu_threads_per_process": 1},
        "output_dir": str(folder / "run"),
    }


def resolved(folder: Path, rows: Path, **data: Any) -> Recipe:
    from fsdp_tune.core.devices import Machine
    from fsdp_tune.recipe.resolve import resolve
    from fsdp_tune.recipe.schema.recipe import Recipe

    recipe = Recipe.model_validate(recipe_of(folder, rows, **data))
    return resolve(recipe, Machine("cpu", 0, os.cpu_count() or 1, None), cwd=folder).recipe


def prepared(recipe: Recipe) -> tuple[Prepared, float]:
    """The data, and the seconds that they took; opening the tokenizer counts."""
    from fsdp_tune.data.preparation import prepare
    from fsdp_tune.data.tokenise.tokenizer import load_encoder

    started = time.perf_counter()
    data = prepare(recipe, load_encoder(recipe), check_rows=False)
    return data, time.perf_counter() - started


def fill(folder: Path, gsm8k: Path) -> None:
    print("| rows | max_length | rows of an epoch | real tokens |\n| --- | --- | --- | --- |")
    for max_length in (512, 2048):
        one_a_row, _ = prepared(resolved(folder, gsm8k, max_length=max_length))
        lengths, wide = lengths_of(one_a_row), len(str(max_length))
        told = f"{max_length:{wide},} | {len(lengths):,}"
        print(f"| padded to max_length | {told} | {lengths.mean() / max_length:.2%} |")
        print(
            f"| padded to the longest of {MICRO_BATCH}, drawn at random | {told} | "
            f"{after_padding(lengths, grouped=False):.2%} |"
        )
        print(
            f"| the same, rows of similar length together (the default) | {told} | "
            f"{after_padding(lengths, grouped=True):.2%} |"
        )
        for strategy in ("bfd", "wrapped"):
            packed, _ = prepared(
                resolved(folder, gsm8k, max_length=max_length, packing=True, packing_strategy=strategy)
            )
            account = packed.report["sets"]["train"]
            print(f"| packed, `{strategy}` | {max_length:,} | {account['rows']:,} | {account['fill']:.2%} |")


def lengths_of(data: Prepared) -> Any:
    from fsdp_tune.data.store import RowStore

    return RowStore(data.train).lengths


def after_padding(lengths: Any, *, grouped: bool) -> float:
    from fsdp_tune.data.batches import epoch_order

    size = MICRO_BATCH * RANKS
    order = epoch_order(
        lengths, seed=42, epoch=0, shuffle=True, group_by_length=grouped, global_batch_size=size
    )
    whole = lengths[order[: len(order) // size * size]].reshape(-1, MICRO_BATCH)
    widths = -(-whole.max(axis=1) // 8) * 8
    return float(whole.sum() / (widths.sum() * MICRO_BATCH))


def budget(folder: Path, gsm8k: Path) -> None:
    """An epoch's whole steps of `GLOBAL_BATCH` sequences over two ranks, as `train` would order and cut
    them."""
    from fsdp_tune.data.batches import epoch_order, rank_micro_batches
    from fsdp_tune.data.token_budget import TokenBudget, filling, token_micro_batches

    one_a_row, _ = prepared(resolved(folder, gsm8k, max_length=BUDGET_LENGTH))
    lengths, slots = lengths_of(one_a_row), TokenBudget(BUDGET, 8, BUDGET_LENGTH)

    def by_slots(rows: Any) -> list[list[Any]]:
        return [list(ranks) for ranks in token_micro_batches(rows, slots, RANKS)]

    def by_rows(rows: Any) -> list[list[Any]]:
        mine = [
            rank_micro_batches(
                np.arange(len(rows)), dp_rank=rank, dp_size=RANKS, micro_batch_size=MICRO_BATCH
            )
            for rank in range(RANKS)
        ]
        return [list(ranks) for ranks in zip(*mine, strict=True)]

    ways = {f"{MICRO_BATCH} rows": by_rows, f"{BUDGET:,} slots": by_slots}
    print(
        "| a micro-batch | order of the rows | real tokens | of what the slower rank takes | "
        "micro-batches a step and rank |"
    )
    print("| --- | --- | --- | --- | --- |")
    for grouped in (False, True):
        order = epoch_order(
            lengths, seed=42, epoch=0, shuffle=True, group_by_length=grouped, global_batch_size=GLOBAL_BATCH
        )
        steps = lengths[order[: len(order) // GLOBAL_BATCH * GLOBAL_BATCH]].reshape(-1, GLOBAL_BATCH)
        for name, cut in ways.items():
            found = filling(
                ([[rows[taken] for taken in ranks] for ranks in cut(rows)] for rows in steps), slots
            )
            least, mean, most = min(found.micro_steps), np.mean(found.micro_steps), max(found.micro_steps)
            told = f"{least} to {most}, mean {mean:.2f}" if least < most else str(least)
            alike = "similar lengths together" if grouped else "drawn at random"
            print(
                f"| {name} | {alike} | {found.tokens / found.slots:.1%} | "
                f"{found.tokens / found.held_slots:.1%} | {told} |"
            )


def budget_wall(folder: Path, gsm8k: Path) -> None:
    """The same steps both ways; of each run the median of its steps but the first. With `shuffle: false` rows
    come as in the file."""
    for shuffle in (True, False):
        lines: list[list[dict[str, Any]]] = []
        for slots in (None, BUDGET):
            keys = {
                "per_device_train_batch_tokens": slots,
                "global_batch_size": GLOBAL_BATCH,
                "max_steps": 6,
                "logging_steps": 1,
            }
            lines.append(
                trained(
                    folder,
                    gsm8k,
                    f"{'grouped' if shuffle else 'as-they-come'}-{slots or 'rows'}",
                    keys,
                    shuffle=shuffle,
                )
            )
        rows, slots = (float(np.median([line["step_seconds"] for line in each[1:]])) for each in lines)
        off = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(*lines, strict=True))
        order = "similar lengths together" if shuffle else "in the order of the file"
        told = (
            f"{rows:.2f} s by {MICRO_BATCH} rows, {slots:.2f} s by {BUDGET:,} slots, {rows / slots:.2f} "
            f"×; losses at most {off:.0e} apart"
        )
        print(f"a step of {GLOBAL_BATCH} rows on {RANKS} CPU ranks, {order}: {told}")


def trained(
    folder: Path, gsm8k: Path, name: str, training: dict[str, Any], **data: Any
) -> list[dict[str, Any]]:
    """The lines with losses of a run by the command."""
    recipe = recipe_of(folder, gsm8k, max_length=BUDGET_LENGTH, **data)
    recipe["training"] |= {"logging_steps": 3, "save_strategy": "no", **training}
    recipe |= {"checkpoint": {"probe": False}, "merge": {"at_end": False}, "output_dir": str(folder / name)}
    file = folder / f"{name}.json"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", str(file), "--ignore-plan"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
    }
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    lines = [
        json.loads(line)
        for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [line for line in lines if "loss" in line]


def tokenise(folder: Path, gsm8k: Path, repeat: int) -> None:
    rows = folder / "repeated.jsonl"
    rows.write_bytes(gsm8k.read_bytes() * repeat)
    one = None
    for processes in (1, 2):
        data, seconds = prepared(
            resolved(
                folder, rows, num_proc=processes, packing=True, cache_dir=str(folder / f"cache-{processes}")
            )
        )
        tokens = data.report["sets"]["train"]["tokens"]
        one = one or seconds
        speed = f"{tokens / seconds:,.0f} tokens/s, {one / seconds:.2f} × one process"
        print(f"num_proc {processes}: {tokens:,} tokens in {seconds:.1f} s, {speed}")
    again, seconds = prepared(
        resolved(folder, rows, num_proc=2, packing=True, cache_dir=str(folder / "cache-2"))
    )
    assert again.reused
    print(f"from the cache: {seconds:.2f} s")


def wait(folder: Path, gsm8k: Path) -> None:
    """Of a small model on CPU ranks: a step with more in it waits for a smaller part."""
    for workers in (0, 1):
        training = {
            "per_device_train_batch_size": 2,
            "max_steps": 30,
            "logging_steps": 10,
            "dataloader_num_workers": workers,
        }
        lines = trained(folder, gsm8k, f"run-{workers}", training, packing=True)
        told = [(line["data_wait_seconds"], line["step_seconds"]) for line in lines][1:]
        waited, step = np.array(told).mean(axis=0)
        print(
            f"dataloader_num_workers {workers}: {1000 * waited:.2f} ms of a step of "
            f"{1000 * step:.0f} ms, {waited / step:.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl (question, answer)")
    parser.add_argument("--repeat", type=int, default=8, help="how often the file is tokenised over")
    parser.add_argument("--part", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    options = parser.parse_args()
    parts: list[str] = options.part.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    gsm8k = options.gsm8k.resolve()
    with tempfile.TemporaryDirectory(prefix="benchmark-data-") as scratch:
        folder = Path(scratch)
        write_tokenizer(folder / "tokenizer", learn_tokenizer(gsm8k, SIZES["gsm8k"].model["vocab_size"])[0])
        if "fill" in parts:
            fill(folder, gsm8k)
        if "budget" in parts:
            budget(folder, gsm8k)
        if "budget-wall" in parts:
            budget_wall(folder, gsm8k)
        if "tokenise" in parts:
            tokenise(folder, gsm8k, options.repeat)
        if "wait" in parts:
            wait(folder, gsm8k)


if __name__ == "__main__":
    main()
